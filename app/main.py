"""Puts the rooms of the service together into one ASGI application."""

from typing import Any

from fastapi import FastAPI

from app import errors, health
from app.settings import Settings
from app.state import lifespan


def create_app(settings: Settings | None = None) -> FastAPI:
    """Build the application; everything that costs time waits for its lifespan.

    Parameters
    ----------
    settings
        By default, what the environment says.
    """
    app = FastAPI(
        title="boxcal",
        summary="Calibrated classifier probabilities inside the hard bounds that each request sets.",
        version="0.1.0",
        lifespan=lifespan,
    )
    app.state.settings = settings or Settings()
    errors.install(app)
    app.include_router(health.router)
    describe(app)
    return app


def describe(app: FastAPI) -> None:
    """Put the schema that every declared error refers to into the OpenAPI document."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document.setdefault("components", {}).setdefault("schemas", {})["Problem"] = errors.PROBLEM_SCHEMA
        return document

    app.openapi = openapi  # type: ignore[method-assign]
