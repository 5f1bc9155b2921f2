"""What the running service holds: built in the lifespan, torn down in reverse, read by typed dependencies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, TypedDict, cast

from fastapi import Depends, FastAPI, Request

from boxcal.app.activation.activator import Activator
from boxcal.app.activation.active import ActiveCalibrator
from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.build import open_refits
from boxcal.app.fitting.jobs import FitJobs, FitLimits
from boxcal.app.predict.build import open_pipeline
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from boxcal.app.settings import Settings
from boxcal.app.stats import Stats, open_stats
from boxcal.app.telemetry import Telemetry
from boxcal.models.backbone import Backbone
from boxcal.models.loading import load_backbone


@dataclass(frozen=True, slots=True)
class State:
    """Everything that lives as long as the service does."""

    settings: Settings
    telemetry: Telemetry
    backbone: Backbone
    registry: Registry
    activator: Activator
    active: ActiveCalibrator
    fit_jobs: FitJobs
    pipeline: Pipeline
    stats: Stats


class LifespanState(TypedDict):
    """What the server hands to every request."""

    boxcal: State


async def current_state(request: Request) -> State:
    """Give a route the state of the service that answers its request."""
    return cast("State", request.state.boxcal)


CurrentState = Annotated[State, Depends(current_state)]


@asynccontextmanager
async def build(settings: Settings, telemetry: Telemetry) -> AsyncIterator[State]:
    """Load, check and warm everything, each part after what it depends on; close it in reverse."""
    async with AsyncExitStack() as stack:
        backbone = await asyncio.to_thread(
            load_backbone,
            settings.model,
            weights=settings.weights,
            labels=settings.labels,
            device=settings.device,
            precision=settings.precision,
            optimize=settings.optimize == "on",
        )
        identity = BackboneIdentity(backbone.name, backbone.fingerprint, tuple(backbone.labels))
        refits = await stack.enter_async_context(
            open_refits(
                settings.data_dir,
                settings.registry_url,
                identity,
                backbone=backbone,
                source=BackboneSource.of(settings),
                limits=FitLimits.of(settings),
                keep=(settings.keep_versions, settings.keep_days) if settings.keep_versions else None,
                telemetry=telemetry,
            )
        )
        pipeline = await stack.enter_async_context(
            open_pipeline(settings, backbone, refits.activator, telemetry)
        )
        stats = await stack.enter_async_context(open_stats(telemetry.registry))
        yield State(
            settings=settings,
            telemetry=telemetry,
            backbone=backbone,
            registry=refits.registry,
            activator=refits.activator,
            active=refits.activator.active,
            fit_jobs=refits.jobs,
            pipeline=pipeline,
            stats=stats,
        )


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[LifespanState]:
    """Hold the state for as long as the server runs."""
    async with build(app.state.settings, app.state.telemetry) as state:
        yield {"boxcal": state}
