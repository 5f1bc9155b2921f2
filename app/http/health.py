"""Routes for operators: liveness, readiness and metrics. They respond under load."""

import asyncio
from typing import Literal

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from starlette.responses import Response

from boxcal.app.http.problems import NotReady, problems
from boxcal.app.state import CurrentModel, CurrentState

router = APIRouter(tags=["monitoring"])


class Live(BaseModel):
    """The process is alive."""

    status: Literal["live"] = "live"


class Ready(BaseModel):
    """The service is ready for predictions."""

    status: Literal["ready"] = "ready"
    model: str = Field(description="The default model.")
    calibrator: int = Field(description="The version of its active calibrator.")
    models: dict[str, int] = Field(description="The version of the active calibrator of every model.")


@router.get("/health/live", responses=problems())
async def live() -> Live:
    """Return 200 while the process and its event loop run."""
    return Live()


@router.get("/health/ready", responses=problems(NotReady))
async def ready(state: CurrentState) -> Ready:
    """Return 200 if the weights are loaded, a calibrator is active and every thread runs."""
    state.check_ready()
    default = state.default
    active = {name: model.active.current.version for name, model in state.models.items()}
    return Ready(model=default.name, calibrator=default.active.current.version, models=active)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}, "description": "Prometheus' text format."}, **problems()},
)
async def metrics(state: CurrentState) -> Response:
    """Return the metrics in the text format of Prometheus."""
    if state.is_shared:
        content = await asyncio.to_thread(generate_latest, state.collected)
    else:
        content = generate_latest(state.collected)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


@router.get(
    "/stats",
    response_class=Response,
    responses={
        200: {
            "description": "Rates, quantiles and their history of 15 minutes, at most 4 kB.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
        **problems(),
    },
)
async def get_stats(model: CurrentModel) -> Response:
    """Return a summary for people who watch; `/metrics` has everything for machines."""
    return Response(model.stats.response, media_type="application/json")
