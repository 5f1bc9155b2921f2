"""Ray Serve with one replica per core and the throughput settings of its performance guide."""

import os
import signal

import ray
import work
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

CORES = os.cpu_count() or 1


@serve.deployment(num_replicas=CORES, ray_actor_options={"num_cpus": 1}, max_ongoing_requests=16)
class Bench:
    def __init__(self) -> None:
        if work.task() == "images":
            self.classifier = work.Classifier(threads=1)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        if work.task() == "images":
            return JSONResponse(self.classifier.classify(body))
        return Response(work.softmax_json(body), media_type="application/json")


if __name__ == "__main__":
    ray.init(num_cpus=CORES, include_dashboard=False, log_to_driver=False)
    serve.start(
        http_options={"host": "127.0.0.1", "port": work.port()}, logging_config={"enable_access_log": False}
    )
    serve.run(Bench.bind())  # type: ignore[attr-defined]  # the decorator makes a deployment of the class
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
