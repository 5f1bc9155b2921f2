"""Builds the ASGI application from the routes of the packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from fastapi.routing import APIRoute
from starlette.applications import Starlette
from starlette.types import ASGIApp

from boxcal.app import description, documentation, errors, health
from boxcal.app.fitting import routes as refit
from boxcal.app.logs import RequestLog
from boxcal.app.middleware import RequestMiddleware
from boxcal.app.monitoring import routes as monitoring
from boxcal.app.page import routes as page
from boxcal.app.predict import routes as predict
from boxcal.app.registry import routes as registry
from boxcal.app.settings import Settings
from boxcal.app.state import lifespan
from boxcal.app.telemetry import UNMATCHED, Telemetry

DOCUMENTS = ("/openapi.json",)
ROUTERS = (
    predict.router,
    refit.router,
    monitoring.router,
    registry.router,
    registry.history,
    description.router,
    page.router,
    health.router,
)


class Application(FastAPI):
    """FastAPI with two layers around its router: ids for requests, and `RequestMiddleware` for errors."""

    # FastAPI's own looks up a tracer for every request.
    __call__ = Starlette.__call__

    def build_middleware_stack(self) -> ASGIApp:
        """Return the application's outermost layer."""
        settings: Settings = self.state.settings
        answering = RequestMiddleware(
            AsyncExitStackMiddleware(self.router),
            [*self.router.routes, *(route for router in ROUTERS for route in router.routes)],
            self.state.telemetry,
            direct=predict.ENDPOINTS,
            documents=DOCUMENTS,
            max_body_bytes=settings.max_body_bytes,
            unlimited={"/fit"},
        )
        return RequestLog(answering)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the application; its lifespan does everything that takes time.

    Parameters
    ----------
    settings
        By default from the environment.
    """
    settings = settings or Settings()
    measured = Telemetry(declared_statuses(ROUTERS))
    app = Application(
        title="boxcal",
        summary="Calibrated classifier probabilities inside the hard bounds that each request sets.",
        version=version("boxcal"),
        lifespan=lifespan,
        openapi_url=DOCUMENTS[0],
        docs_url=None,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.settings = settings
    app.state.telemetry = measured
    for router in ROUTERS:
        app.include_router(router)
    describe(app)
    return app


def declared_statuses(routers: Sequence[APIRouter]) -> dict[str, set[int]]:
    """List the statuses of each route, so that every series exists from the start."""
    statuses: dict[str, set[int]] = {UNMATCHED: {400, 404, 405, 503}, **{path: {200} for path in DOCUMENTS}}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute):
                codes = {int(code) for code in route.responses} | {route.status_code or 200}
                statuses.setdefault(route.path_format, set()).update(codes)
    return statuses


def describe(app: FastAPI) -> None:
    """Declare in the OpenAPI document that every error is a problem, FastAPI's validation errors included."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Problem"] = errors.PROBLEM_SCHEMA
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        declared = errors.problems(errors.InvalidParameter)[errors.InvalidParameter.status]
        for operations in document["paths"].values():
            for operation in operations.values():
                answer = operation["responses"].get("422", declared)
                if errors.PROBLEM_MEDIA_TYPE not in answer.get("content", {}):
                    operation["responses"]["422"] = declared
        documentation.complete(document)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
