"""Routes for operators: liveness, readiness and metrics. They respond under load."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from boxcal.app.http.dependencies import CurrentState, OnlyDeclared, part_of_model
from boxcal.app.http.problem_documents import problems
from boxcal.app.http.problems import NotReady
from boxcal.app.observability.stats import Stats
from boxcal.app.schemas.service import Live, Ready

router = APIRouter(tags=["monitoring"])


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
    # Not on the event loop: with eight models it takes tens of milliseconds.
    content = await asyncio.to_thread(generate_latest, state.collected)
    return Response(content, media_type=CONTENT_TYPE_LATEST)


@router.get(
    "/stats",
    dependencies=[Depends(OnlyDeclared())],
    response_class=Response,
    responses={
        200: {
            "description": "Rates, quantiles and their history of 15 minutes, at most 4 kB.",
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
        **problems(),
    },
)
async def get_stats(stats: Annotated[Stats, part_of_model("stats")]) -> Response:
    """Return a summary for people who watch; `/metrics` has everything for machines."""
    return Response(stats.response, media_type="application/json")
