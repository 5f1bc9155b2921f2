"""What the running service holds: built in the lifespan, torn down in reverse, read by typed dependencies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypedDict, cast

from fastapi import Depends, FastAPI, Request

from app.settings import Settings

if TYPE_CHECKING:
    from app.refit.activation import Activator
    from app.refit.active import ActiveCalibrator
    from app.refit.jobs import FitJobs
    from app.registry.store import Registry
    from models.backbone import Backbone


@dataclass(frozen=True, slots=True)
class State:
    """Everything that lives as long as the service does."""

    settings: Settings
    backbone: Backbone
    registry: Registry
    activator: Activator
    active: ActiveCalibrator
    fit_jobs: FitJobs


class LifespanState(TypedDict):
    """What the server hands to every request."""

    boxcal: State


async def current_state(request: Request) -> State:
    """Give a route the state of the service that answers its request."""
    return cast("State", request.state.boxcal)


CurrentState = Annotated[State, Depends(current_state)]


@asynccontextmanager
async def build(settings: Settings) -> AsyncIterator[State]:
    """Load, check and warm everything, in the order in which it depends on each other."""
    async with AsyncExitStack():
        raise NotImplementedError
        yield


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[LifespanState]:
    """Hold the state for as long as the server runs."""
    async with build(app.state.settings) as state:
        yield {"boxcal": state}
