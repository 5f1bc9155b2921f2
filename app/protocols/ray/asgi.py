"""Stands between Ray Serve and the application, and makes requests arrive as from uvicorn."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boxcal.app.observability.logs import HEADER

REPLICA_MODULE = "boxcal.app.protocols.ray.replica"
ROUTES_OF_RAY = "/-/"


def middlewares() -> list[Middleware]:
    """Return the layers that Ray Serve puts around a replica, and around nothing else on its node.

    The nodes name this function in `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`.
    """
    replica = sys.modules.get(REPLICA_MODULE)
    return [] if replica is None else [*replica.layers()]


class ServedApp:
    """The application as Ray Serve calls it.

    Ray Serve runs the lifespan, but does not pass its state to requests (its issue 45395), adds the header
    `X-Request-Id` to every response itself, and cancels a request whose client has disconnected, before the
    application can notice and count it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.state: dict[str, Any] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the lifespan, or answer a request."""
        if scope["type"] == "lifespan":
            self.state = scope.setdefault("state", self.state)
            await self._app(scope, receive, send)
            return

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != HEADER]
            await send(message)

        request = asyncio.ensure_future(self.answer(scope, receive, send_without_id))
        try:
            await asyncio.shield(request)
        except asyncio.CancelledError:
            await request  # it receives the disconnection, and ends
            raise

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request that arrives as from uvicorn, but for the state."""
        scope["state"] = self.state.copy()
        await self._app(scope, receive, send)


class Direct:
    """Hands a request to the application without what Ray Serve does for each, but for its own routes."""

    def __init__(
        self, app: ASGIApp, served: ServedApp, began: Callable[[], object], ended: Callable[[], object]
    ) -> None:
        self._app = app
        self._served = served
        self._began = began
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(ROUTES_OF_RAY):
            await self._app(scope, receive, send)
            return
        self._began()
        try:
            await self._served.answer(scope, receive, send)
        finally:
            self._ended()
