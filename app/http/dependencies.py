"""What routes read of the running service, and routes that read the request and send the response themselves.

`state` builds the service and its models and passes them with every request. Routes name the parts of a model
that they use, so that no package depends on what builds all of them. Plain routes skip FastAPI's dependencies
and are in the OpenAPI document like all others, generated from the same models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Protocol, get_origin

from fastapi import Depends, Query, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from boxcal.app.http.admission import TICKET, Admission
from boxcal.app.http.problems import InvalidParameter
from boxcal.app.http.protocol import EXTENSION, BodyParts
from boxcal.app.observability.stats import Collects
from boxcal.app.observability.telemetry import Telemetry
from boxcal.calibrators.errors import hint, nearest

MODEL = "model"
"""The query parameter that names a model."""
STATE = "boxcal"
"""The key of the state of the service in the state that the server passes to every request."""
TELEMETRY = "boxcal.telemetry"
"""The key in the scope of a request of the metrics that count it, if these are not those of the service."""


class ServiceState(Protocol):
    """What routes and RPCs use of the running service; of a model they name the parts that they use."""

    @property
    def models(self) -> Mapping[str, Any]: ...

    @property
    def default(self) -> Any:
        """The first model."""

    @property
    def v2(self) -> Mapping[str, Any]:
        """The models by their names in the Open Inference Protocol."""

    @property
    def telemetry(self) -> Telemetry:
        """The metrics of the service itself."""

    @property
    def collected(self) -> Collects:
        """The metrics of all models and processes."""

    @property
    def admission(self) -> Admission: ...

    @property
    def is_shared(self) -> bool:
        """Whether several processes serve."""

    @property
    def ending(self) -> asyncio.Event:
        """Set once no more requests are accepted; those in progress are finished."""

    def model(self, name: str) -> Any:
        """Return a model by its name; raises ModelNotFound, as does `v2_model`."""

    def v2_model(self, name: str) -> Any: ...

    def check_ready(self) -> None:
        """Raise NotReady if a model can no longer predict."""

    def has_failed(self) -> bool:
        """Whether a model can no longer predict."""


def state_of(request: Request) -> ServiceState:
    """Return the state of the service that handles a request."""
    state: ServiceState = request.scope["state"][STATE]
    return state


async def current_state(request: Request) -> ServiceState:
    return state_of(request)


CurrentState = Annotated[ServiceState, Depends(current_state)]


def model_of(request: Request) -> Any:
    """Return the model that a request names in its query string, or the default one."""
    state = state_of(request)
    name = request.query_params.get(MODEL) if request.scope["query_string"] else None
    model = state.default if name is None else state.model(name)
    if model.telemetry is not state.telemetry:
        request.scope[TELEMETRY] = model.telemetry
    return model


async def current_model(
    request: Request,
    model: Annotated[
        str | None,
        Query(
            description="Name of the model. Default: the first one; `GET /calibrators` lists those of all."
        ),
    ] = None,
) -> Any:
    return model_of(request)


def check_repeats(request: Request, lists: Collection[str] = ()) -> None:
    """Refuse several different values of a query parameter that is none of `lists`."""
    first: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if first.setdefault(name, value) != value and name not in lists:
            raise InvalidParameter(
                f"The query string has several values of {name!r:.100}: {first[name]!r:.100}, "
                f"{value!r:.100}; give one."
            )


def query_parameters(dependant: Dependant) -> dict[str, Any]:
    """Return the query parameters of a route with their types."""
    own = {one.alias: one.field_info.annotation for one in dependant.query_params}
    for other in dependant.dependencies:
        own |= query_parameters(other)
    return own


class OnlyDeclared:
    """A dependency that refuses query parameters which the route does not read.

    Every route takes `model`, which those of the whole service do not need. `fields`: by path, the members of
    the body, which are often sent in the query string.
    """

    def __init__(self, fields: Mapping[str, Collection[str]] | None = None) -> None:
        self._fields = fields or {}

    async def __call__(self, request: Request) -> None:
        """Raise InvalidParameter, which names the nearest parameter or where a field belongs."""
        if not request.scope["query_string"]:
            return
        route = request.scope["route"]
        types = query_parameters(route.dependant)
        known, fields = {**types, MODEL: str}, self._fields.get(route.path, ())
        for name in request.query_params:
            if name not in known:
                close = nearest(name, [*known, *fields])
                place = hint(name, known) or "."
                if close in fields:
                    place = f"; `{close}` is a field of the form or a member of the JSON body."
                raise InvalidParameter(
                    f"{route.path} has no query parameter {name!r:.100}{place} The query string takes "
                    f"{', '.join(f'`{each}`' for each in known)}."
                )
        check_repeats(request, [name for name, kind in types.items() if get_origin(kind) is list])


async def no_body(request: Request) -> None:
    """Refuse a body with members, which nothing would read; an empty object says nothing."""
    if (body := (await request.body()).strip()) not in (b"", b"{}", b"null"):
        raise InvalidParameter(
            f"{request.url.path} reads no body, and it has {body.decode(errors='replace')!r:.100}; "
            "parameters are in the query string."
        )


Limit = Annotated[int, Query(ge=1, le=1000, description="Maximum number of entries to return.")]


def part_of_model(name: str) -> Any:
    """Depend on a part of the model that a request names: `Annotated[Monitor, part_of_model("monitor")]`."""

    async def part(model: Annotated[Any, Depends(current_model)]) -> Any:
        return getattr(model, name)

    return Depends(part)


CHUNK = 256 * 1024
"""Bytes of a long response that are sent at once; the next wait until the client has read most of them."""
JOINED = 64 * 1024
"""Bytes of a response whose pieces are joined: less work than to send several."""
AT_ONCE = 1024 * 1024
"""Bytes of a response that is sent as a whole: while it lies in the cache, with one call of the system."""


class DirectRequest(Request):
    """A request whose endpoint sends the response itself."""

    async def reply(
        self,
        media_type: str,
        body: Sequence[bytes | memoryview],
        headers: Sequence[tuple[bytes, bytes]] = (),
        status: int = 200,
    ) -> None:
        """Send a whole response, whose body is the concatenation of at least one piece."""
        length = sum(map(len, body))
        if len(body) > 1 and length <= JOINED:
            body = [b"".join(body)]
        if length > AT_ONCE:
            self.scope[TICKET].answer(length)
        fixed = [(b"content-length", b"%d" % length), (b"content-type", media_type.encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
        if length <= AT_ONCE and EXTENSION in self.scope.get("extensions", ()):
            whole = body[0] if len(body) == 1 else BodyParts([*body], length)
            await self._send({"type": "http.response.body", "body": whole})
            return
        sent = 0
        for piece in body:
            view = piece if len(piece) <= CHUNK else memoryview(piece)  # parts of a view are no copies
            for start in range(0, max(1, len(piece)), CHUNK):
                part = view[start : start + CHUNK]
                sent += len(part)
                await self._send({"type": "http.response.body", "body": part, "more_body": sent < length})
                if sent < length:
                    await asyncio.sleep(0)  # a client that reads quickly would never let others run


Endpoint = Callable[[DirectRequest], Awaitable[None]]


class PlainRoute(APIRoute):
    """A route for POST whose endpoint is called without FastAPI's dependencies."""

    def __init__(self, path: str, endpoint: Endpoint, **described: Any) -> None:
        super().__init__(
            path,
            endpoint,
            methods=["POST"],
            response_model=None,
            generate_unique_id_function=lambda route: route.name,
            **described,
        )

        async def answer(scope: AsgiScope, receive: Receive, send: Send) -> None:
            await endpoint(DirectRequest(scope, receive, send))

        self.app = answer


class PlainRoutes:
    """Answers requests to plain routes; others go to the application, which has these routes too.

    Its router would cost a small request another tenth.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[PlainRoute]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope.get("method") == "POST":
            for route in self._routes:
                if (found := route.path_regex.match(scope["path"])) is not None:
                    scope["route"], scope["path_params"] = route, found.groupdict()
                    await route.app(scope, receive, send)
                    return
        await self._app(scope, receive, send)
