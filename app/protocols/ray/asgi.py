"""Stands between Ray Serve and the application, and makes requests arrive as from uvicorn."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boxcal.app.http.middleware import HEADER


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

        scope["state"] = self.state.copy()
        request = asyncio.ensure_future(self._app(scope, receive, send_without_id))
        try:
            await asyncio.shield(request)
        except asyncio.CancelledError:
            await request  # it receives the disconnection, and ends
            raise
