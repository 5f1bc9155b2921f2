"""Requests reach the application under Ray Serve as they do under uvicorn."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from boxcal.app.protocols.ray.asgi import ServedApp

pytestmark = pytest.mark.anyio

RESPONSE: list[Message] = [
    {"type": "http.response.start", "status": 200, "headers": [(b"x-request-id", b"own"), (b"x", b"y")]},
    {"type": "http.response.body", "body": b"done"},
]


class App:
    """Yields a state, waits for the end of the body or the disconnection, and answers."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.ended = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            scope["state"]["boxcal"] = "state"
            return
        self.seen.append(scope["state"]["boxcal"])
        self.seen.append((await receive())["type"])
        for message in RESPONSE:
            await send({**message})
        self.ended.set()


async def started() -> tuple[App, ServedApp]:
    app = App()
    served = ServedApp(app)
    await served({"type": "lifespan", "state": {}}, nothing, into([]))
    assert served.state == {"boxcal": "state"}
    return app, served


async def nothing() -> Message:
    return {"type": "http.request"}


def into(sent: list[Message]) -> Send:
    async def send(message: Message) -> None:
        sent.append(message)

    return send


async def test_the_state_of_the_lifespan_reaches_requests_and_ray_adds_the_request_id_alone() -> None:
    app, served = await started()
    sent: list[Message] = []
    await served({"type": "http", "path": "/"}, nothing, into(sent))
    assert app.seen == ["state", "http.request"]
    assert sent == [{**RESPONSE[0], "headers": [(b"x", b"y")]}, RESPONSE[1]]


async def test_a_request_that_ray_cancels_receives_the_disconnection() -> None:
    app, served = await started()
    disconnected = asyncio.Event()

    async def receive() -> Message:
        await disconnected.wait()
        return {"type": "http.disconnect"}

    request = asyncio.create_task(served({"type": "http", "path": "/"}, receive, into([])))
    await asyncio.sleep(0)
    request.cancel()
    await asyncio.sleep(0)
    disconnected.set()
    await asyncio.gather(request, return_exceptions=True)
    assert request.cancelled()
    assert app.ended.is_set()
    assert app.seen == ["state", "http.disconnect"]
