"""The first layers of the application: each request gets an id, is measured, checked and limited.

Errors are rendered here. The body of a request with a `Content-Encoding` (RFC 9110) is decompressed as the
application receives it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
import zlib
from collections.abc import Collection, Sequence
from http import HTTPStatus
from itertools import count

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boxcal.app.http import problems as errors
from boxcal.app.http.admission import TICKET, Admission, Ticket
from boxcal.app.http.browsers import BrowserRules
from boxcal.app.http.dependencies import TELEMETRY, DirectRequest
from boxcal.app.http.problem_documents import CLIENT_CLOSED, as_problem, document, media_type
from boxcal.app.http.problems import MalformedBody, UnsupportedMediaType
from boxcal.app.http.scopes import ROUTES, UNKNOWN, Level, Requirement
from boxcal.app.observability.logs import REQUEST_MEMBERS, request_id
from boxcal.app.observability.telemetry import UNMATCHED, Telemetry
from boxcal.calibrators.errors import hint
from boxcal.models import BackboneError

CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Content codings with the `wbits` of zlib."""
ACCEPTED = {"Accept-Encoding": "gzip, deflate"}
STEP = 64 * 1024
"""Bytes that are decompressed at once, and that come of it; other requests run between two steps."""
MAX_MEMBERS = 1000
"""Of a gzip body; each costs as much as a step, however few bytes it has."""


def decompressed(receive: Receive, encoding: str) -> Receive:
    """Return what receives a body without the coding that the header `Content-Encoding` names."""
    names = [name for part in encoding.lower().split(",") if (name := part.strip()) not in ("", "identity")]
    if not names:
        return receive
    if len(names) > 1 or names[0] not in CODINGS:
        raise UnsupportedMediaType(
            f"The content encoding is {', '.join(names)!r:.100}; the service reads gzip or deflate.",
            headers=ACCEPTED,
        )
    return Decompression(receive, names[0])


class Decompression:
    """Receives a body in decompressed pieces of at most `STEP` bytes."""

    def __init__(self, receive: Receive, name: str) -> None:
        self._receive = receive
        self._name = name
        self._stream = zlib.decompressobj(CODINGS[name])
        self._data = memoryview(b"")  # received and not yet decompressed
        self._members = 1
        self._more = self._is_full = False

    async def __call__(self) -> Message:
        """Receive a message of the request."""
        if self._data or self._is_full:
            await asyncio.sleep(0)
        else:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._data = memoryview(message.get("body", b""))
            self._more = message.get("more_body", False)
        piece = self._data[:STEP]
        if piece and self._stream.eof:  # a file of gzip may have several members
            self._members += 1
            if self._members > MAX_MEMBERS:
                raise MalformedBody(f"The {self._name} body has more than {MAX_MEMBERS:,} members.")
            self._stream = zlib.decompressobj(CODINGS[self._name])
        try:
            body = self._stream.decompress(piece, STEP)
        except zlib.error as error:
            raise MalformedBody(f"The body is not {self._name}: {error}.") from error
        left = len(self._stream.unconsumed_tail) + len(self._stream.unused_data)
        self._data = self._data[len(piece) - left :]
        self._is_full = len(body) == STEP  # zlib may hold more of what it has consumed
        more = bool(self._more or self._data or self._is_full)
        if not more and not self._stream.eof:
            raise MalformedBody(f"The {self._name} body ends before its end.")
        return {"type": "http.request", "body": body, "more_body": more}


logger = logging.getLogger("boxcal")
requests_log = logging.getLogger("boxcal.request")
HEADER = b"x-request-id"
VALID_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_PROCESS = os.urandom(4).hex().encode()
_numbers = count(int.from_bytes(os.urandom(4)))


class RequestLog:
    """Gives every request an id, returns it as `X-Request-Id`, and logs one line per request at level debug.

    A valid id of the client (up to 128 letters, digits and `._:-`) is kept; otherwise a new one is drawn.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        header = (HEADER, id_of(scope))
        request_id.set(header[1].decode())  # for the records of this request's task

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], header]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if requests_log.isEnabledFor(logging.DEBUG):
                path = scope["path"] if scope["path"].isprintable() else ascii(scope["path"])
                milliseconds = round((time.perf_counter() - began) * 1e3, 3)
                values = (scope["method"], path, status, milliseconds)
                extra = dict(zip(REQUEST_MEMBERS, values, strict=True))
                requests_log.debug("%s %s %d %.3f ms", *values, extra=extra)


def id_of(scope: Scope) -> bytes:
    """Return the request's own id if it is valid, else a new one."""
    for name, value in scope["headers"]:
        if name == HEADER and VALID_ID.fullmatch(value):
            given: bytes = value
            return given
    return b"%s%08x" % (_PROCESS, next(_numbers) & 0xFFFFFFFF)


_PATTERNS = tuple(
    (re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), rule.most_bytes)
    for (_, path), rule in ROUTES.items()
    if "{" in path and rule.most_bytes != UNKNOWN.most_bytes
)
_BODIES = {path: rule.most_bytes for (_, path), rule in ROUTES.items()}


def body_limit(path: str) -> int | None:
    """Return the most bytes of a body by the path of its request; None for uploads."""
    if path in _BODIES:
        return _BODIES[path]
    found = (most for pattern, most in _PATTERNS if pattern.fullmatch(path))
    return next(found, UNKNOWN.most_bytes)


class Exchange:
    """Counts the body of one request as it is received, and notes the status that is sent.

    `announced`: the content length; 0 if there is none. `status`: of the response; 0 until it begins.
    """

    __slots__ = ("_headers", "_limit", "_receive", "_send", "_ticket", "_total", "announced", "status")

    def __init__(self, receive: Receive, send: Send, limit: int | None) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._total = self.announced = self.status = 0
        self._headers: list[tuple[bytes, bytes]] = []

    def admit(self, ticket: Ticket, encoding: bytes) -> None:
        """Charge the body to a ticket, without its content coding if it has one."""
        self._ticket = ticket
        self._headers = ticket.rate()
        if encoding:
            self._receive = decompressed(self._receive, encoding.decode("latin-1"))

    async def receive(self) -> Message:
        """Receive a message of the request."""
        limit = self._limit
        if limit is None:
            return await self._receive()
        if self.announced > limit:
            raise errors.BodyTooLarge(f"The body has {self.announced:,} bytes; the limit is {limit:,}.")
        message = await self._receive()
        if message["type"] == "http.request":
            self._total += len(message.get("body", b""))
            if self._total > limit:
                raise errors.BodyTooLarge(f"The body has more bytes than the limit; the limit is {limit:,}.")
            self._ticket.charge(self._total)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self._headers:
                message["headers"] = [*message["headers"], *self._headers]
        await self._send(message)


class RequestMiddleware:
    """Measures and checks requests, limits bodies, and renders errors.

    A path with a slash at its end is that without it, unless a route ends with one.
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[BaseRoute],
        telemetry: Telemetry,
        *,
        documents: Collection[str],
        browsers: BrowserRules,
        root_path: str = "",
    ) -> None:
        self._app = app
        self._lifespan = StartupErrorReporter(app)
        self._routes = routes
        self._telemetry = telemetry
        self._labels = documents
        self._root_path = root_path
        self._browsers = browsers
        self._with_slash = {
            route.path for route in routes if isinstance(route, Route) and route.path[-1] == "/"
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._lifespan(scope, receive, send)
            return
        if self._root_path:
            scope = self._below_root(scope)
        if scope["path"].endswith("/") and scope["path"] not in self._with_slash:
            scope = {**scope, "path": scope["path"].rstrip("/")}
        began = time.perf_counter()
        exchange = Exchange(receive, send, body_limit(scope["path"]))
        routed = scope
        try:
            exchange.announced, encoding, *names = read_head(scope)
            self._browsers.check(scope["method"], *names)
            if scope["method"] == "HEAD":  # the server leaves the body of the response out
                routed = {**scope, "method": "GET"}
            admission: Admission = scope["state"]["boxcal"].admission
            requirement = self._requirement(routed) if admission.access.is_required else Level.OPEN
            host, _ = scope.get("client") or ("", 0)
            with await admission.enter(scope["headers"], requirement, host) as ticket:
                routed[TICKET] = ticket
                exchange.admit(ticket, encoding)
                await self._app(routed, exchange.receive, exchange.send)
        except asyncio.CancelledError:  # the server is stopping and does not wait any longer
            if not exchange.status:
                await self._fail(errors.NotReady("The service stopped during the request."), scope, exchange)
        except Exception as error:
            if exchange.status:
                logger.error("%s %s failed after its response had begun", scope["method"], _path(scope))
                raise
            await self._fail(error, scope, exchange)
        finally:
            label = self._label(routed, exchange.status)
            routed.get(TELEMETRY, self._telemetry).request(
                label, exchange.status or 500, time.perf_counter() - began
            )

    def _requirement(self, scope: Scope) -> Requirement:
        """Return what the route requires that will answer; without a route, a key but no scope."""
        route = next((route for route in self._routes if route.matches(scope)[0] is Match.FULL), None)
        if route is None:
            return Level.KEY
        scope["route"] = route  # the label of the request in the metrics, also if it is refused
        return ROUTES.get((scope["method"], getattr(route, "path_format", "")), UNKNOWN).requirement

    def _below_root(self, scope: Scope) -> Scope:
        path: str = scope["path"]
        if path == self._root_path or path.startswith(self._root_path + "/"):
            path = path[len(self._root_path) :] or "/"
        # Not as `root_path` of the scope, which a router takes off the path once more.
        return {**scope, "path": path}

    async def _fail(self, error: Exception, scope: Scope, exchange: Exchange) -> None:
        """Send the problem that describes an exception."""
        if isinstance(error, ClientDisconnect):
            scope.get(TELEMETRY, self._telemetry).rejected("disconnected")
            exchange.status = CLIENT_CLOSED
            return
        if isinstance(error, HTTPException) and isinstance(error.__cause__, errors.BoxcalError):
            error = error.__cause__  # raised while FastAPI read the body
        if isinstance(error, RecursionError):  # nothing calls itself but what reads or quotes a document
            error = MalformedBody("The document is nested too deeply.")
        if isinstance(error, OSError) and error.errno in errors.FULL_DISK:  # of a form
            error = errors.StorageFull(f"No space left for the body: {error.strerror}. Try again later.")
        if not isinstance(error, errors.BoxcalError | HTTPException | RequestValidationError):
            logger.error("%s %s failed", scope["method"], _path(scope), exc_info=error)
        elif isinstance(error, errors.BoxcalError) and error.kind in errors.DEFECTS:
            logger.error("%s %s failed: %s", scope["method"], _path(scope), error)
        problem = as_problem(self._explained(error, scope))
        telemetry: Telemetry = scope.get(TELEMETRY, self._telemetry)
        telemetry.rejected(problem.reason)
        headers = [
            (name.lower().encode(), value.encode("latin-1")) for name, value in problem.headers.items()
        ]
        body = [document(problem, request_id.get())]
        request = DirectRequest(scope, send=exchange.send)
        await request.reply(media_type(_path(scope)), body, headers, problem.status)

    def _explained(self, error: Exception, scope: Scope) -> Exception:
        """Describe the errors of the router."""
        status = error.status_code if isinstance(error, HTTPException) else None
        path = _path(scope)
        if status == HTTPStatus.NOT_FOUND:
            routes = (route.path for route in self._routes if isinstance(route, Route))
            listed = hint(path, routes, "/docs lists all routes.")
            return errors.RouteNotFound(f"No route has the path {path}{listed}")
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            matching = [route for route in self._routes if route.matches(dict(scope))[0] != Match.NONE]
            allowed = {method for route in matching for method in getattr(route, "methods", None) or ()}
            if "GET" in allowed:
                allowed.add("HEAD")
            detail = f"{path} does not support the method {scope['method']}."
            return errors.MethodNotAllowed(detail, headers={"Allow": ", ".join(sorted(allowed))})
        return error

    def _label(self, scope: Scope, status: int) -> str:
        """Return the template of the route, never the path of the request."""
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            return UNMATCHED
        if "route" in scope:
            return str(scope["route"].path_format)
        return scope["path"] if scope["path"] in self._labels else UNMATCHED


class StartupErrorReporter:
    """Reports in a line, without a traceback, why the service cannot start with its settings or database."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the lifespan; replace the report of a failed startup."""
        failures: list[Message] = []

        async def held(message: Message) -> None:
            if message["type"] == "lifespan.startup.failed":
                failures.append(message)
            else:
                await send(message)

        try:
            await self._app(scope, receive, held)
        except (BackboneError, errors.BoxcalError) as error:
            if not failures:
                raise
            await send({"type": "lifespan.startup.failed", "message": str(error)})
        except BaseException:
            for message in failures:
                await send(message)
            raise


def read_head(scope: Scope) -> tuple[int, bytes, bytes, bytes, bytes]:
    """Return the announced size of the body, and the headers that every request is checked for.

    The size is 0 if there is none; the headers are `Content-Encoding`, `Host`, `Origin`, `Sec-Fetch-Site`.
    """
    size = hosts = 0
    encoding = host = origin = site = b""
    for name, value in scope["headers"]:
        if name == b"host":
            hosts += 1
            host = value
        elif name == b"content-length":
            if value.isdigit():
                size = int(value)
        elif name == b"content-encoding":
            encoding += b"," + value
        elif name == b"origin":
            origin = value
        elif name == b"sec-fetch-site":
            site = value
    if hosts != 1 and scope["http_version"] == "1.1":
        raise errors.BadRequest(f"The request has {hosts} Host headers; HTTP/1.1 requires exactly one.")
    if "\0" in scope["path"] or b"%00" in scope["query_string"]:
        raise errors.BadRequest("The path or the query string has a NUL character.")
    return size, encoding, host, origin, site


def _path(scope: Scope) -> str:
    """Return the path without control characters, which a terminal that shows the log would obey."""
    path: str = scope["path"]
    return path if path.isprintable() else ascii(path)
