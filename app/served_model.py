"""One model that the service serves, with everything that is its own.

`opened` builds it at start-up. Routes read it as `CurrentModel` (`state.py`), which chooses it by the query
parameter `model`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass

from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.server.build import Refits, open_refits
from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.fitting.server.limits import FitLimits
from boxcal.app.http.problems import BoxcalError
from boxcal.app.monitoring.build import open_monitoring
from boxcal.app.monitoring.monitor import Monitor
from boxcal.app.monitoring.writer import FeedbackWriter
from boxcal.app.observability.stats import Collects, Stats, open_stats
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.predict.build import open_pipeline
from boxcal.app.predict.device import Device, Turns
from boxcal.app.predict.options import BoundsOption
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.active import ActiveCalibrator
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from boxcal.app.settings import limits
from boxcal.app.settings.service import ModelEntry, Settings
from boxcal.app.v2.inference import Models
from boxcal.app.workers.slot import Slot
from boxcal.models.backends.backbone import Backbone
from boxcal.models.errors import BackboneError


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its calibrators, its queue and its monitor.

    Attributes
    ----------
    name
        Selects it in requests.
    settings
        Of the service, with those of this model.
    v2
        The model in the Open Inference Protocol.
    """

    name: str
    settings: Settings
    telemetry: Telemetry
    backbone: Backbone
    refits: Refits
    feedback: FeedbackWriter
    monitor: Monitor
    pipeline: Pipeline
    stats: Stats
    v2: Models

    @property
    def registry(self) -> Registry:
        """The registry as this model sees it: its calibrators, activations and fits."""
        return self.refits.registry

    @property
    def activator(self) -> Activator:
        """Activates its calibrators."""
        return self.refits.activator

    @property
    def active(self) -> ActiveCalibrator:
        """The reference that predictions read."""
        return self.refits.activator.active

    @property
    def fit_jobs(self) -> FitJobs:
        """Its fits."""
        return self.refits.jobs


def turns_of(backbone: Backbone, share: float, devices: dict[str, Device] | None) -> Turns | None:
    """Return the turns of a model on the device that it shares; None if it shares none."""
    if devices is None or backbone.inputs.kind == "none":
        return None
    return devices.setdefault(str(backbone.device), Device(backbone.passes)).share(share)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Begin the message of an error with the name of the model, if it has one of its own."""
    try:
        yield
    except (BackboneError, BoxcalError) as error:
        if name:
            error.args = (f"The model {name} cannot be served: {error}",)
        raise


@asynccontextmanager
async def opened(
    entry: ModelEntry,
    telemetry: Telemetry,
    collected: Collects,
    slot: Slot | None = None,
    *,
    others: Sequence[ServedModel] = (),
    devices: dict[str, Device] | None = None,
) -> AsyncIterator[ServedModel]:
    """Load, check and warm up every part of a model after those that it depends on; close them in reverse.

    Parameters
    ----------
    collected
        The metrics that its summary is made of.
    slot
        The place of this process, if several serve.
    others
        The models that are open already.
    devices
        Those that the models share, by name; None if there is one model.
    """
    settings = entry.settings
    leads = slot is None or slot.leads
    async with AsyncExitStack() as stack:
        source = BackboneSource.of(settings)
        backbone = await asyncio.to_thread(source.load)
        identity = BackboneIdentity(backbone.name, backbone.fingerprint, tuple(backbone.labels))
        refits = await stack.enter_async_context(
            open_refits(
                settings.data_dir,
                settings.registry_url,
                identity.apart_from([other.registry.backbone for other in others], entry.name),
                backbone=backbone,
                source=source,
                limits=FitLimits.of(settings, slot.cores if slot else None),
                keep=(settings.keep_versions, limits.KEEP_DAYS) if settings.keep_versions else None,
                migrate=settings.migrate == "on",
                shared_dir=settings.shared_dir or (settings.data_dir / "fits" if slot else None),
                queues_only=settings.fits == "queue" or not leads,
                telemetry=telemetry,
                beside=others[0].refits if others else None,
                name=entry.name,
            )
        )
        monitoring = await stack.enter_async_context(
            open_monitoring(
                settings,
                refits.registry,
                refits.activator,
                refits.jobs,
                model=entry.name or backbone.name,
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
                name=entry.name or backbone.name,
                bounds=BoundsOption(lower=entry.lower, upper=entry.upper),
                turns=turns_of(backbone, entry.share, devices),
            )
        )
        yield ServedModel(
            name=pipeline.model,
            settings=settings,
            telemetry=telemetry,
            backbone=backbone,
            refits=refits,
            feedback=monitoring.feedback,
            monitor=monitoring.monitor,
            pipeline=pipeline,
            stats=await stack.enter_async_context(open_stats(collected)),
            v2=Models(backbone, pipeline),
        )
