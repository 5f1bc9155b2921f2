"""The state of the service: built in the lifespan, closed in reverse order, read by typed dependencies.

Each model is a `ServedModel`, with everything that belongs to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypedDict

from fastapi import FastAPI

from boxcal.app.access.access import open_access
from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.server.build import FitService, open_refits
from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.http.admission import Admission, event_streams
from boxcal.app.http.limits import Shares
from boxcal.app.http.problems import BoxcalError, InternalError, ModelNotFound, NotReady
from boxcal.app.monitoring.build import open_monitoring
from boxcal.app.monitoring.monitor import Monitor
from boxcal.app.monitoring.writer import FeedbackWriter
from boxcal.app.observability.event_loop import watched
from boxcal.app.observability.stats import Collects, Stats, keep_reading
from boxcal.app.observability.supervised_task import FreeMemory, background
from boxcal.app.observability.telemetry import MetricsOfModels, Telemetry
from boxcal.app.predict.device import Device, Turns
from boxcal.app.predict.options import BoundsOption
from boxcal.app.predict.pipeline import Pipeline, open_pipeline
from boxcal.app.predict.solver import Solver
from boxcal.app.protocols.v2.inference import Models
from boxcal.app.registry.activator import Activator, ActiveCalibrator
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from boxcal.app.settings import limits
from boxcal.app.settings.service import ModelEntry, Settings
from boxcal.app.workers.metrics import SharedMetrics
from boxcal.app.workers.table import Slot
from boxcal.calibrators.errors import hint
from boxcal.models import BackboneError
from boxcal.models.backends.backbone import Backbone

logger = logging.getLogger("boxcal")

ROUTES_OF_MODELS = ("/predict", "/calibrate", "/v2/models/{model}/infer")
"""Routes whose requests each model counts from the start."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its calibrators, its queue and its monitor."""

    name: str  # Selects it in requests
    settings: Settings  # Of the service, with those of this model
    telemetry: Telemetry
    backbone: Backbone
    refits: FitService
    registry: Registry  # As this model sees it: its calibrators, activations and fits
    activator: Activator
    active: ActiveCalibrator  # The reference that predictions read
    fit_jobs: FitJobs
    feedback: FeedbackWriter
    monitor: Monitor
    pipeline: Pipeline
    bounds: BoundsOption  # Of requests that set none
    stats: Stats
    v2: Models  # The model in the Open Inference Protocol


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
    stats: Stats,
    slot: Slot | None = None,
    *,
    solver: Solver,
    others: Sequence[ServedModel] = (),
    devices: dict[str, Device] | None = None,
) -> AsyncIterator[ServedModel]:
    """Load, check and warm up every part of a model after those that it depends on; close them in reverse.

    `devices`: those that the models share, by name; None if there is one model.
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
                memory_bytes=settings.fit_memory_bytes,
                cores=slot.cores if slot else None,
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
        bounds = BoundsOption(lower=entry.lower, upper=entry.upper)
        pipeline = await stack.enter_async_context(
            open_pipeline(
                settings,
                backbone,
                refits.activator,
                telemetry,
                keep=monitoring.feedback.keep,
                adjusted=monitoring.priors.adjusted,
                solver=solver,
                name=entry.name or backbone.name,
                bounds=bounds,
                turns=turns_of(backbone, entry.share, devices),
            )
        )
        yield ServedModel(
            name=pipeline.model,
            settings=settings,
            telemetry=telemetry,
            backbone=backbone,
            refits=refits,
            registry=refits.registry,
            activator=refits.activator,
            active=refits.activator.active,
            fit_jobs=refits.jobs,
            feedback=monitoring.feedback,
            monitor=monitoring.monitor,
            pipeline=pipeline,
            bounds=bounds,
            stats=await stack.enter_async_context(keep_reading(stats)),
            v2=Models(backbone, pipeline),
        )


@dataclass(frozen=True, slots=True)
class State:
    """The objects that exist as long as the service runs."""

    settings: Settings
    telemetry: Telemetry
    models: Mapping[str, ServedModel]  # By name, in the order of the settings
    default: ServedModel  # The first model, which answers requests that name none
    v2: Mapping[str, ServedModel]  # The models by their names in the Open Inference Protocol
    admission: Admission  # Of HTTP and gRPC
    event_streams: Shares
    collected: Collects  # The metrics of all models and, if several serve, of all processes
    is_shared: bool  # Whether several processes serve: the metrics are then read from files
    ending: asyncio.Event = field(default_factory=asyncio.Event)  # Set once no more requests are accepted

    def model(self, name: str) -> ServedModel:
        return _find(self.models, name)

    def check_ready(self) -> None:
        """Raise NotReady if a model can no longer predict."""
        if self.has_failed():
            raise NotReady("The backbone has failed and the service is stopping; see the server log.")

    def has_failed(self) -> bool:
        """Whether a model can no longer predict."""
        return any(model.pipeline.batcher.failure is not None for model in self.models.values())

    def v2_model(self, name: str) -> ServedModel:
        """Return a model by its name in the Open Inference Protocol; raises as `model`."""
        return _find(self.v2, name)


def _find(models: Mapping[str, ServedModel], name: str) -> ServedModel:
    found = models.get(name)
    if found is None:
        there_are = f"the models are {', '.join(models)}."
        raise ModelNotFound(f"There is no model {name!r:.200}{hint(name, models, there_are)}")
    return found


class LifespanState(TypedDict):
    """The state that the server passes to every request."""

    boxcal: State


@asynccontextmanager
async def build(settings: Settings, telemetry: Telemetry, slot: Slot | None = None) -> AsyncIterator[State]:
    """Load, check and warm up every part after those that it depends on; close them in reverse order."""
    async with AsyncExitStack() as stack:
        entries = settings.entries()
        several = len(entries) > 1
        counted = [telemetry.of_model(ROUTES_OF_MODELS) if several else telemetry for _ in entries]
        collected: Collects = telemetry.registry
        if several:
            names = [entry.name for entry in entries]
            collected = MetricsOfModels(telemetry, dict(zip(names, counted, strict=True)))
        metrics = None
        if slot is not None:
            collected = metrics = SharedMetrics(collected, slot.folder)
            stack.push_async_callback(asyncio.to_thread, metrics.save)
            await stack.enter_async_context(background("metrics", metrics.run, telemetry))
        solver = Solver()
        models: dict[str, ServedModel] = {}
        devices: dict[str, Device] | None = {} if several else None
        for entry, own in zip(entries, counted, strict=True):
            stats = Stats(collected, entry.name if several else None)
            with naming(entry.name):
                model = await stack.enter_async_context(
                    opened(entry, own, stats, slot, solver=solver, others=[*models.values()], devices=devices)
                )
            models[model.name] = model
        default = next(iter(models.values()))
        if several:
            telemetry.watch_registry(default.registry.database.availability.seconds_since_answer)
        access = await stack.enter_async_context(open_access(settings, default.registry, telemetry))
        await stack.enter_async_context(background("memory", FreeMemory().run, telemetry))
        state = State(
            settings=settings,
            telemetry=telemetry,
            models=models,
            default=default,
            v2={name: model for model in models.values() for name in model.v2.names},
            admission=Admission(access),
            event_streams=event_streams(),
            collected=collected,
            is_shared=slot is not None,
        )
        await stack.enter_async_context(solver.loading())  # last: a compiler would slow the start down
        if settings.grpc_port is not None:
            await stack.enter_async_context(open_grpc(state, settings))
        stack.enter_context(watched(telemetry.paused))
        yield state


def open_grpc(state: State, settings: Settings) -> AbstractAsyncContextManager[int]:
    """Serve gRPC; raises BoxcalError if its packages are not installed."""
    if settings.tls_cert is not None:
        raise InternalError("BOXCAL_GRPC_PORT is not encrypted; it cannot be set with BOXCAL_TLS_CERT.")
    try:
        from boxcal.app.protocols.grpc.server import serving  # noqa: PLC0415 - an optional package
    except ModuleNotFoundError as error:
        raise InternalError(
            f"BOXCAL_GRPC_PORT needs the package {error.name}: pip install 'boxcal[grpc]'."
        ) from error
    return serving(state, settings.host_of_urls, settings.grpc_port or 0)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[LifespanState]:
    """Keep the state as long as the server runs."""
    async with build(app.state.settings, app.state.telemetry, app.state.slot) as state:
        for model in state.models.values():
            served = model.active.current
            logger.info(
                "serving %s: %d classes on %s, calibrator %d (%s), data in %s",
                model.name,
                model.backbone.num_classes,
                model.backbone.device,
                served.version,
                served.method,
                state.settings.data_dir.absolute(),
            )
        yield {"boxcal": state}
