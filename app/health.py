"""Liveness and readiness, for the orchestrator; they compute nothing, so they answer under load."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel

from app.errors import NotReady, problems
from app.state import CurrentState

router = APIRouter(prefix="/health", tags=["health"])


class Live(BaseModel):
    """The process runs."""

    status: Literal["live"] = "live"


class Ready(BaseModel):
    """The service answers predictions."""

    status: Literal["ready"] = "ready"
    model: str
    calibrator: int


@router.get("/live", responses=problems())
async def live() -> Live:
    """Say that the process runs and its event loop turns."""
    return Live()


@router.get("/ready", responses=problems(NotReady))
async def ready(state: CurrentState) -> Ready:
    """Say that the weights are loaded and warm and a calibrator is active."""
    return Ready(model=state.backbone.name, calibrator=state.active.current.version)
