"""Puts the rooms of the service together into one ASGI application."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from boxcal.app import documentation, errors, health
from boxcal.app.fitting import routes as refit
from boxcal.app.middleware import AnswerDirectly, LimitBodies, MeasureRequests
from boxcal.app.predict import routes as predict
from boxcal.app.registry import routes as registry
from boxcal.app.settings import Settings
from boxcal.app.state import lifespan
from boxcal.app.telemetry import UNMATCHED, Telemetry

DOCUMENTS = ("/openapi.json", "/docs")


class Application(FastAPI):
    """The application, and around it what every request meets first; FastAPI's own layers come after that."""

    _outermost: ASGIApp | None = None

    def surround(self, settings: Settings, telemetry: Telemetry) -> None:
        """Measure requests, limit their bodies and answer the hot routes before anything else."""
        direct = AnswerDirectly(super().__call__, predict.ENDPOINTS, telemetry.rejected)
        limited = LimitBodies(direct, {"/fit": None}, settings.max_body_bytes)
        self._outermost = MeasureRequests(limited, telemetry, {*DOCUMENTS, *predict.ENDPOINTS})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if self._outermost is None:
            await super().__call__(scope, receive, send)
        else:
            await self._outermost(scope, receive, send)


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the application; everything that costs time waits for its lifespan.

    Parameters
    ----------
    settings
        By default, what the environment says.
    """
    settings = settings or Settings()
    routers = (predict.router, refit.router, registry.router, health.router)
    measured = Telemetry(declared_statuses(routers))
    app = Application(
        title="boxcal",
        summary="Calibrated classifier probabilities inside the hard bounds that each request sets.",
        version=version("boxcal"),
        lifespan=lifespan,
        openapi_url=DOCUMENTS[0],
        docs_url=DOCUMENTS[1],
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.settings = settings
    app.state.telemetry = measured
    app.surround(settings, measured)
    errors.install(app, measured.rejected)
    for router in routers:
        app.include_router(router)
    describe(app)
    return app


def declared_statuses(routers: Sequence[APIRouter]) -> dict[str, set[int]]:
    """List which statuses each route may answer with, so that every series is there from the start."""
    statuses: dict[str, set[int]] = {UNMATCHED: {404, 405}, **{path: {200} for path in DOCUMENTS}}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute):
                codes = {int(code) for code in route.responses} | {route.status_code or 200}
                statuses.setdefault(route.path_format, set()).update(codes)
    return statuses


def describe(app: FastAPI) -> None:
    """Say in the OpenAPI document that every error is a problem, FastAPI's own validation errors included."""
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
