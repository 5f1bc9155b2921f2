"""A walk over all routes and RPCs: each declares its key, its body and what limits it, or this fails."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from fastapi.sse import EventSourceResponse
from starlette.applications import Starlette
from starlette.routing import BaseRoute, Route

from boxcal.app.http.admission import count_event_stream
from boxcal.app.http.middleware import RequestLog, RequestMiddleware, body_limit
from boxcal.app.http.scopes import ROUTES, RPCS, UNKNOWN, Level, Rule, Scope
from boxcal.app.main import all_routes, create_app
from boxcal.app.protocols.grpc.admission import Interceptor
from boxcal.app.settings.service import Settings
from tests.app.access.conftest import TESTER, Guarded, guarded
from tests.app.access.test_scopes import address
from tests.app.fitting.service import free_port
from tests.app.running import running
from tests.app.waiting import until

__all__ = ["guarded"]

READ_NO_BODY = {
    "/fits/{fit_id}",
    "/v2/repository/index",
    "/calibrators/rollback",
    "/calibrators/{version}/activate",
}


def routes_of(app: FastAPI) -> Iterator[BaseRoute]:
    """Give the routes that the router tries, those of included routers too."""
    for route in app.router.routes:
        contexts: Callable[[], Iterable[Any]] | None = getattr(route, "effective_route_contexts", None)
        if contexts is None:
            yield route
        else:
            yield from (context.original_route for context in contexts())


def undeclared(app: FastAPI) -> set[str]:
    """Say what is not declared of each route of an application."""
    found = set()
    known = [id(route) for route in all_routes(app)]
    for route in routes_of(app):
        if not isinstance(route, Route) or id(route) not in known:
            found.add(f"{getattr(route, 'path', route)}: not admitted")
            continue
        for method in (route.methods or set()) - {"HEAD"}:
            name = f"{method} {route.path_format}"
            if (method, route.path_format) not in ROUTES:
                found.add(f"{name}: not in the table")
        if (
            isinstance(route, APIRoute)
            and route.response_class is EventSourceResponse
            and count_event_stream not in [one.dependency for one in route.dependencies]
        ):
            found.add(f"{route.path_format}: streams are not counted")
    return found


def test_every_route_declares_its_key_and_its_limits() -> None:
    app = create_app(Settings())
    assert len(list(routes_of(app))) > 50
    assert undeclared(app) == set()
    assert {path for (_, path), rule in ROUTES.items() if rule.most_bytes is None} == {"/fit", "/compare"}
    assert body_limit("/fits/x/events") == 65_536


async def answers() -> dict[str, str]:
    return {}


def test_a_route_that_is_added_without_them_is_found() -> None:
    app = create_app(Settings())
    app.add_api_route("/new", answers, methods=["GET", "POST"])
    app.add_api_route("/stream", answers, response_class=EventSourceResponse)
    app.mount("/mounted", Starlette())
    router = APIRouter()
    router.add_api_route("/included", answers, methods=["PUT"])
    app.include_router(router)
    assert undeclared(app) == {
        "GET /new: not in the table",
        "POST /new: not in the table",
        "GET /stream: not in the table",
        "/stream: streams are not counted",
        "/mounted: not admitted",
        "/included: not admitted",
    }


def test_nothing_answers_before_the_admission() -> None:
    outermost: Any = create_app(Settings(cors_origins="")).build_middleware_stack()
    assert isinstance(outermost, RequestLog)
    assert isinstance(outermost._app, RequestMiddleware)


def test_every_route_with_a_key_counts_the_rate_of_that_key(guarded: Guarded) -> None:
    _, secret = guarded.store.create("walk", {Scope.ADMIN}, TESTER, per_minute=1)
    headers = {"Authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=guarded.url, headers=headers, timeout=30) as http:
        until(lambda: http.get("/whoami").status_code == 429)
        statuses = {
            (method, template): http.request(method, address(template)).status_code
            for (method, template), rule in ROUTES.items()
            if rule.requirement is not Level.OPEN
        }
    assert {route: status for route, status in statuses.items() if status != 429} == {}


@pytest.mark.parametrize(
    ("method", "template"),
    [route for route, rule in ROUTES.items() if route[0] != "GET" and rule.most_bytes is not None],
)
def test_a_body_above_its_limit_is_refused_unread(guarded: Guarded, method: str, template: str) -> None:
    most = (
        32 * 2**20 if template in {"/predict", "/calibrate", "/feedback"} or "infer" in template else 65_536
    )
    assert ROUTES[method, template].most_bytes == body_limit(template) == most
    key = guarded.headers("admin")["Authorization"]
    url, path = httpx.URL(guarded.url), address(template).replace("{model}", "digits")
    head = (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {most + 1}\r\n"
        f"content-type: application/json\r\nauthorization: {key}\r\n\r\n"
    )
    with socket.create_connection((url.host, url.port or 0), timeout=30) as line:
        line.sendall(head.encode())
        status = int(line.recv(100).split()[1])
    assert status == 413 or (template in READ_NO_BODY and status < 500)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, dict[str, Any], list[type]]]:
    """Serve gRPC; gives its address, the handlers of all methods and the types of the interceptors."""
    found: dict[str, Any] = {}
    interceptors: list[type] = []
    real = grpc.aio.server

    def made(**options: Any) -> Any:
        interceptors.extend(map(type, options["interceptors"]))
        server = real(**options)
        add = server.add_generic_rpc_handlers

        def noted(handlers: Any) -> None:
            for one in handlers:
                found.update(one._method_handlers)
            add(handlers)

        server.add_generic_rpc_handlers = noted
        return server

    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpc.aio.server", made)
        with running(folder, model="logits:3", grpc_port=port):
            yield f"127.0.0.1:{port}", found, interceptors


def test_every_rpc_declares_its_key_and_its_message_and_is_admitted(tmp_path: Path) -> None:
    with serving(tmp_path) as (target, found, interceptors), grpc.insecure_channel(target) as channel:
        assert interceptors == [Interceptor]
        assert len(found) == 13
        assert found.keys() == RPCS.keys()
        for method, handler in found.items():
            if not method.endswith("ModelInfer"):
                call = channel.stream_stream if handler.response_streaming else channel.stream_unary
                with pytest.raises(grpc.RpcError, match="The message has 65,537 bytes; the limit is 65,536"):
                    next(iter(call(method)(iter([bytes(65_537)]), timeout=10)))


def test_an_rpc_that_is_missing_in_the_table_requires_admin() -> None:
    assert RPCS["/inference.GRPCInferenceService/ModelInfer"] == Rule(Scope.PREDICT, 8_388_608)
    assert {rpc.most_bytes for name, rpc in RPCS.items() if not name.endswith("ModelInfer")} == {65_536}
    assert Rule(Scope.ADMIN, 65_536) == UNKNOWN
