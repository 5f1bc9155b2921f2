"""Plain FastAPI with uvicorn, one process: images in the thread pool, logits in the event loop."""

import os
from typing import Any

import uvicorn
import work
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

app = FastAPI()


@app.get("/ready")
async def ready() -> dict[str, str]:
    return {"status": "ready"}


if work.task() == "images":
    classifier = work.Classifier(threads=os.cpu_count() or 1)

    @app.post("/images")
    async def images(request: Request) -> dict[str, Any]:
        return await run_in_threadpool(classifier.classify, await request.body())


@app.post("/logits")
async def logits(request: Request) -> Response:
    return Response(work.softmax_json(await request.body()), media_type="application/json")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=work.port(), log_level="warning", access_log=False)
