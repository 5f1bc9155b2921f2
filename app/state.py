"""The state of the service: built in the lifespan, closed in reverse order, read by typed dependencies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, TypedDict, cast

from fastapi import Depends, FastAPI, Request

from boxcal.app.access.access import Access
from boxcal.app.access.build import open_access
from boxcal.app.activation.activator import Activator
from boxcal.app.activation.active import ActiveCalibrator
from boxcal.app.background import background
from boxcal.app.errors import InternalError
from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.build import open_refits
from boxcal.app.fitting.jobs import FitJobs, FitLimits
from boxcal.app.free_memory import FreeMemory
from boxcal.app.monitoring.build import open_monitoring
from boxcal.app.monitoring.monitor import Monitor
from boxcal.app.monitoring.writer import FeedbackWriter
from boxcal.app.predict.build import open_pipeline
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from boxcal.app.settings import Settings
from boxcal.app.stats import Stats, open_stats
from boxcal.app.telemetry import Telemetry
from boxcal.app.v2.inference import Models
from boxcal.app.workers.metrics import SharedMetrics
from boxcal.app.workers.slot import Slot
from boxcal.models.backbone import Backbone

logger = logging.getLogger("boxcal")


@dataclass(frozen=True, slots=True)
class State:
    """The objects that exist as long as the service runs."""

    settings: Settings
    telemetry: Telemetry
    backbone: Backbone
    registry: Registry
    activator: Activator
    active: ActiveCalibrator
    fit_jobs: FitJobs
    feedback: FeedbackWriter
    monitor: Monitor
    pipeline: Pipeline
    stats: Stats
    access: Access
    v2: Models
    metrics: SharedMetrics | None = None
    """Of all processes, if several serve."""


class LifespanState(TypedDict):
    """The state that the server passes to every request."""

    boxcal: State


async def current_state(request: Request) -> State:
    """Return the state of the service that handles a request."""
    return cast("State", request.state.boxcal)


CurrentState = Annotated[State, Depends(current_state)]


@asynccontextmanager
async def build(settings: Settings, telemetry: Telemetry, slot: Slot | None = None) -> AsyncIterator[State]:
    """Load, check and warm up every part after those that it depends on; close them in reverse order."""
    leads = slot is None or slot.leads
    async with AsyncExitStack() as stack:
        source = BackboneSource.of(settings)
        backbone = await asyncio.to_thread(source.load)
        identity = BackboneIdentity(backbone.name, backbone.fingerprint, tuple(backbone.labels))
        refits = await stack.enter_async_context(
            open_refits(
                settings.data_dir,
                settings.registry_url,
                identity,
                backbone=backbone,
                source=source,
                limits=FitLimits.of(settings),
                keep=(settings.keep_versions, settings.keep_days) if settings.keep_versions else None,
                migrate=settings.migrate == "on",
                shared_dir=settings.shared_dir or (settings.data_dir / "fits" if slot else None),
                queues_only=settings.fits == "queue" or not leads,
                telemetry=telemetry,
            )
        )
        monitoring = await stack.enter_async_context(
            open_monitoring(
                settings,
                refits.registry,
                refits.activator,
                refits.jobs,
                classes=backbone.labels,
                telemetry=telemetry,
                owner=refits.registry.fits.owner,
                folds=leads,
            )
        )
        access = await stack.enter_async_context(open_access(settings, refits.registry, telemetry))
        pipeline = await stack.enter_async_context(
            open_pipeline(
                settings,
                backbone,
                refits.activator,
                telemetry,
                keep=monitoring.feedback.keep,
                adjusted=monitoring.priors.adjusted,
            )
        )
        await stack.enter_async_context(background("memory", FreeMemory().run, telemetry))
        metrics = None
        if slot is not None:
            metrics = SharedMetrics(telemetry.registry, slot.folder)
            stack.push_async_callback(asyncio.to_thread, metrics.save)
            await stack.enter_async_context(background("metrics", metrics.run, telemetry))
        stats = await stack.enter_async_context(open_stats(metrics or telemetry.registry))
        state = State(
            settings=settings,
            telemetry=telemetry,
            backbone=backbone,
            registry=refits.registry,
            activator=refits.activator,
            active=refits.activator.active,
            fit_jobs=refits.jobs,
            feedback=monitoring.feedback,
            monitor=monitoring.monitor,
            pipeline=pipeline,
            stats=stats,
            access=access,
            v2=Models(backbone, pipeline),
            metrics=metrics,
        )
        if settings.grpc_port is not None:
            await stack.enter_async_context(open_grpc(state, settings))
        yield state


def open_grpc(state: State, settings: Settings) -> AbstractAsyncContextManager[int]:
    """Serve gRPC; raises BoxcalError if its packages are not installed."""
    if settings.tls_cert is not None:
        raise InternalError("BOXCAL_GRPC_PORT is not encrypted; it cannot be set with BOXCAL_TLS_CERT.")
    try:
        from boxcal.app.v2.grpc_server import serving  # noqa: PLC0415 - an optional package
    except ModuleNotFoundError as error:
        raise InternalError(
            f"BOXCAL_GRPC_PORT needs the package {error.name}: pip install 'boxcal[grpc]'."
        ) from error
    return serving(state, settings.host, settings.grpc_port or 0, settings.max_body_bytes)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[LifespanState]:
    """Keep the state as long as the server runs."""
    async with build(app.state.settings, app.state.telemetry, app.state.slot) as state:
        served = state.active.current
        logger.info(
            "serving %s: %d classes on %s, calibrator %d (%s), data in %s",
            state.backbone.name,
            state.backbone.num_classes,
            state.backbone.device,
            served.version,
            served.method,
            state.settings.data_dir.absolute(),
        )
        yield {"boxcal": state}
