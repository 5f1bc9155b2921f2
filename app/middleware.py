"""What surrounds every request: its measurement, the limit on its body, and the short way to the hot routes.

Plain ASGI, for they stand in the way of every request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boxcal.app.errors import BodyTooLarge, BoxcalError, answer
from boxcal.app.telemetry import UNMATCHED, Telemetry

logger = logging.getLogger("boxcal")
METHOD_NOT_ALLOWED = HTTPStatus.METHOD_NOT_ALLOWED


class MeasureRequests:
    """Counts every request by the template of its route and its status.

    Parameters
    ----------
    app
        What answers.
    telemetry
        Where they are counted.
    paths
        Those that are answered without a route of the application; each is its own template.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry, paths: Collection[str]) -> None:
        self._app = app
        self._telemetry = telemetry
        self._paths = paths

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
        return scope["path"] if scope["path"] in self._paths else UNMATCHED


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
        total = announced = 0
        for name, value in scope["headers"]:
            # What is declared too large is refused as soon as the route begins to read.
            if name == b"content-length" and value.isdigit() and int(value) > limit:
                total = announced = int(value)

        async def counted() -> Message:
            nonlocal total
            if announced:
                raise too_large(announced, limit)
            message = await receive()
            if message["type"] == "http.request":
                total += len(message.get("body", b""))
                if total > limit:
                    raise too_large(total, limit)
            return message

        await self._app(scope, counted, send)


class AnswerDirectly:
    """Answers the routes on which every microsecond counts before the application looks for one that matches.

    They are routes of the application too, so that they stand in its OpenAPI document.

    Parameters
    ----------
    app
        What answers everything else.
    endpoints
        By path; each takes POST.
    count
        Told the kind of every problem that is answered.
    """

    def __init__(
        self,
        app: ASGIApp,
        endpoints: Mapping[str, Callable[[Request], Awaitable[Response]]],
        count: Callable[[str], None],
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        endpoint = None
        if scope["type"] == "http" and scope["method"] == "POST":
            endpoint = self._endpoints.get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
        except Exception as error:
            if not isinstance(error, BoxcalError | HTTPException | ClientDisconnect):
                logger.exception("%s failed", scope["path"])
            response = answer(error, self._count)
        await response(scope, receive, send)


def too_large(size: int, limit: int) -> HTTPException:
    """Refuse a body; as FastAPI's own kind of error, which it lets pass while it is reading a form."""
    return HTTPException(BodyTooLarge.status, f"The body has {size:,} bytes or more; the limit is {limit:,}.")
