"""One model that the service serves, with everything that is its own.

`opened` builds it at start-up. Routes read it as `CurrentModel` (`state.py`), which chooses it by the query
parameter `model`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from boxcal.app.activation.activator import Activator
from boxcal.app.activation.active import ActiveCalibrator
from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.build import open_refits
from boxcal.app.fitting.jobs import FitJobs, FitLimits
from boxcal.app.monitoring.build import open_monitoring
from boxcal.app.monitoring.monitor import Monitor
from boxcal.app.monitoring.writer import FeedbackWriter
from boxcal.app.predict.build import open_pipeline
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from boxcal.app.settings import Settings
from boxcal.app.stats import Collects, Stats, open_stats
from boxcal.app.telemetry import Telemetry
from boxcal.app.v2.inference import Models
from boxcal.app.workers.slot import Slot
from boxcal.models.backbone import Backbone


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its calibrators, its queue and its monitor.

    Attributes
    ----------
    name
        Selects it in requests.
    settings
        Of the service, with those of this model.
    registry
        The registry as this model sees it: its calibrators, activations and fits.
    active
        The reference that predictions read.
    v2
        The model in the Open Inference Protocol.
    """

    name: str
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
    v2: Models


@asynccontextmanager
async def opened(
    settings: Settings, telemetry: Telemetry, collected: Collects, slot: Slot | None = None
) -> AsyncIterator[ServedModel]:
    """Load, check and warm up every part of a model after those that it depends on; close them in reverse.

    Parameters
    ----------
    collected
        The metrics that its summary is made of.
    slot
        The place of this process, if several serve.
    """
    leads = slot is None or slot.leads
    async with AsyncExitStack() as stack:
        source = BackboneSource.of(settings)
        backbone = await asyncio.to_thread(source.load)
        refits = await stack.enter_async_context(
            open_refits(
                settings.data_dir,
                settings.registry_url,
                BackboneIdentity(backbone.name, backbone.fingerprint, tuple(backbone.labels)),
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
        yield ServedModel(
            name=backbone.name,
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
            stats=await stack.enter_async_context(open_stats(collected)),
            v2=Models(backbone, pipeline),
        )
