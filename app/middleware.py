"""What surrounds every request: its measurement and the limit on its body.

Plain ASGI, for they stand in the way of every request.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BodyTooLarge
from app.telemetry import UNMATCHED, Telemetry

METHOD_NOT_ALLOWED = HTTPStatus.METHOD_NOT_ALLOWED


class MeasureRequests:
    """Counts every request by the template of its route and its status.

    Parameters
    ----------
    app
        What answers.
    telemetry
        Where they are counted.
    documents
        Paths that the framework answers itself; they have no template.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry, documents: Collection[str]) -> None:
        self._app = app
        self._telemetry = telemetry
        self._documents = documents

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and count."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        status = 500

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            self._telemetry.request(self._template(scope, status), status, time.perf_counter() - began)

    def _template(self, scope: Scope, status: int) -> str:
        """Name the route that answered, never the path that was asked for."""
        if status == METHOD_NOT_ALLOWED:
            return UNMATCHED
        if "route" in scope:
            return str(scope["route"].path_format)
        return scope["path"] if scope["path"] in self._documents else UNMATCHED


class LimitBodies:
    """Stops reading a body that is longer than the limit of its path.

    Parameters
    ----------
    app
        What answers.
    limits
        Bytes by path; None for a path that limits its bodies itself.
    default
        Bytes for every other path.
    """

    def __init__(self, app: ASGIApp, limits: Mapping[str, int | None], default: int) -> None:
        self._app = app
        self._default = default
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, counting the bytes of the body as they come."""
        limit = self._limits.get(scope["path"], self._default) if scope["type"] == "http" else None
        if limit is None:
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), None)
        total = 0

        async def counted() -> Message:
            nonlocal total
            if declared is not None and declared.isdigit() and int(declared) > limit:
                raise too_large(int(declared), limit)
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > limit:
                    raise too_large(total, limit)
            return message

        await self._app(scope, counted, send)


def too_large(size: int, limit: int) -> HTTPException:
    """Refuse a body; as FastAPI's own kind of error, which it lets pass while it is reading a form."""
    return HTTPException(BodyTooLarge.status, f"The body has {size:,} bytes or more; the limit is {limit:,}.")
