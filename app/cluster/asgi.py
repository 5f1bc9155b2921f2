"""Stands between Ray Serve and the application, and makes requests arrive as from uvicorn."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boxcal.app.logs import HEADER

UNWATCHED = (b"x-request-disconnect-disabled", b"?1")
"""Header by which Ray Serve leaves disconnections to the application: it saves a queue and two tasks."""
REPLICA_MODULE = "boxcal.app.cluster.ray"


def middlewares() -> list[Middleware]:
    """Return the layers that Ray Serve puts around a replica, and around nothing else on its node.

    The nodes name this function in `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`.
    """
    return [Middleware(Unwatched)] if REPLICA_MODULE in sys.modules else []


class Unwatched:
    """Asks Ray Serve not to watch the client of a request, because the application does.

    Parameters
    ----------
    app
        Ray Serve's.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        scope["headers"].append(UNWATCHED)
        await self._app(scope, receive, send)


class ServedApp:
    """The application as Ray Serve calls it.

    Ray Serve runs the lifespan, but does not pass its state to requests (its issue 45395), adds the header
    `X-Request-Id` to every response itself, and cancels a request whose client has disconnected, before the
    application can notice and count it, unless it is `Unwatched`.

    Parameters
    ----------
    app
        The application.

    Attributes
    ----------
    state
        What the lifespan yielded.
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
        scope["state"] = self.state.copy()

        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != HEADER]
            await send(message)

        if UNWATCHED in scope["headers"]:
            await self._app(scope, receive, send_without_id)
            return
        request = asyncio.ensure_future(self._app(scope, receive, send_without_id))
        try:
            await asyncio.shield(request)
        except asyncio.CancelledError:
            await request  # it receives the disconnection, and ends
            raise
