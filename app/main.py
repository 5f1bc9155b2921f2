"""Builds the ASGI application from the routes of the packages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from boxcal.app.access import routes as access
from boxcal.app.fitting.server import routes as refit
from boxcal.app.http import health
from boxcal.app.http.browsers import BrowserRules
from boxcal.app.http.dependencies import PlainRoutes
from boxcal.app.http.middleware import RequestLog, RequestMiddleware
from boxcal.app.http.problem_documents import complete
from boxcal.app.monitoring import routes as monitoring
from boxcal.app.observability.telemetry import UNMATCHED, Telemetry
from boxcal.app.observability.tracing import Tracing, provider_from_environment
from boxcal.app.page import routes as page
from boxcal.app.predict import description
from boxcal.app.predict import routes as predict
from boxcal.app.protocols.v2 import routes as v2
from boxcal.app.registry import routes as registry
from boxcal.app.settings.service import Settings
from boxcal.app.state import lifespan
from boxcal.app.workers.table import Slot

DOCUMENTS = ("/openapi.json",)
CORS_REQUEST_HEADERS = (
    "Authorization",
    "Content-Encoding",
    "Content-Type",
    "X-API-Key",
    "X-Request-Id",
    "traceparent",
)
CORS_RESPONSE_HEADERS = (
    "Boxcal-Bounds-Relaxed",
    "Boxcal-Calibrator-Method",
    "Boxcal-Calibrator-Version",
    "Location",
    "RateLimit",
    "RateLimit-Policy",
    "Retry-After",
    "X-Request-Id",
)
PLAIN_ROUTES = (*predict.routes, *v2.infer_routes)
"""The most frequent ones, which are tried first."""
ROUTERS = (
    refit.router,
    monitoring.router,
    registry.router,
    registry.history,
    access.router,
    description.router,
    page.router,
    health.router,
    v2.router,
)


class Application(FastAPI):
    """FastAPI with layers around its router: ids, `RequestMiddleware` for errors, and optionally traces."""

    # FastAPI's own looks up a tracer for every request.
    __call__ = Starlette.__call__

    def build_middleware_stack(self) -> ASGIApp:
        """Return the application's outermost layer."""
        settings: Settings = self.state.settings
        answering: ASGIApp = RequestMiddleware(
            PlainRoutes(AsyncExitStackMiddleware(self.router), PLAIN_ROUTES),
            all_routes(self),
            self.state.telemetry,
            documents=DOCUMENTS,
            browsers=BrowserRules(settings),
            root_path=settings.root_path,
        )
        if settings.cors_origin_list:
            answering = CORSMiddleware(
                answering,
                allow_origins=settings.cors_origin_list,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=CORS_REQUEST_HEADERS,
                expose_headers=CORS_RESPONSE_HEADERS,
            )
        logged = RequestLog(answering)
        provider = self.state.trace_provider
        return logged if provider is None else Tracing(logged, provider)

    def setup(self) -> None:
        """Add the route of the OpenAPI document; a thread builds it at the first request, in 150 ms."""
        building = asyncio.Lock()

        async def openapi(_: Request) -> JSONResponse:
            async with building:
                return JSONResponse(await asyncio.to_thread(self.openapi))

        self.add_route(DOCUMENTS[0], openapi, include_in_schema=False)

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI document, in which every error is a problem."""
        known, document = self.openapi_schema, super().openapi()
        if document is not known:
            complete(document)
            document.setdefault("servers", [{"url": self.state.settings.root_path or "/"}])
        return document


def all_routes(app: FastAPI) -> list[BaseRoute]:
    """Return every route, in the order in which the router tries them."""
    own = [route for route in app.router.routes if isinstance(route, Route)]
    return [*own, *(route for router in ROUTERS for route in router.routes)]


def create_app(settings: Settings | None = None, slot: Slot | None = None) -> FastAPI:
    """Build the application; its lifespan does everything that takes time."""
    settings = settings or Settings()
    measured = Telemetry(
        declared_statuses([*PLAIN_ROUTES, *(route for router in ROUTERS for route in router.routes)])
    )
    app = Application(
        title="boxcal",
        summary="Calibrated classifier probabilities inside the hard bounds that each request sets.",
        version=version("boxcal"),
        license_info={"name": "Apache 2.0", "identifier": "Apache-2.0"},
        lifespan=lifespan,
        openapi_url=DOCUMENTS[0],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        swagger_ui_oauth2_redirect_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.settings = settings
    app.state.slot = slot
    app.state.telemetry = measured
    app.state.trace_provider = provider_from_environment()
    app.router.routes[:0] = PLAIN_ROUTES
    for router in ROUTERS:
        app.include_router(router)
    for route in app.router.routes:  # builds those of the routers, which FastAPI does at the first request
        route.matches({"type": "http", "method": "GET", "path": "/", "root_path": "", "headers": []})
    return app


def declared_statuses(routes: Iterable[BaseRoute]) -> dict[str, set[int]]:
    """List the statuses of each route, so that every series exists from the start."""
    statuses: dict[str, set[int]] = {UNMATCHED: {400, 404, 405, 503}, **{path: {200} for path in DOCUMENTS}}
    for route in routes:
        if isinstance(route, APIRoute):
            codes = {int(code) for code in route.responses} | {route.status_code or 200}
            statuses.setdefault(route.path_format, set()).update(codes)
    return statuses
