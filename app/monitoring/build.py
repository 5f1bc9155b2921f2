"""Builds feedback and the monitor at start-up, each part after what it depends on.

`PriorAdjustments`: for requests with `prior_adjustment`, calibrators are adjusted to the class frequencies of
recent predictions. The frequencies are estimated by MAP-EM from the predictions that are kept for feedback,
once a minute; where their change is not significant, the answers stay as they are. The registry and the
monitor know nothing of it: the adjustment lasts as long as a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.http.problems import InvalidParameter, TooFewPredictions
from boxcal.app.monitoring.events import EventLog
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.monitor import Monitor, class_prior_of
from boxcal.app.monitoring.refits import RefitRunner
from boxcal.app.monitoring.writer import FeedbackWriter
from boxcal.app.observability.supervised_task import background
from boxcal.app.registry.activator import Activator, ServedCalibrator
from boxcal.app.registry.store import Registry
from boxcal.calibrators.monitoring.class_prior import (
    FEWEST_ROWS,
    SMALLEST_FREQUENCY,
    estimate_class_prior,
    is_shifted,
    prior_offsets,
)
from boxcal.calibrators.monitoring.stored_logits import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from boxcal.app.observability.telemetry import Telemetry
    from boxcal.app.settings.service import Settings
    from boxcal.calibrators.monitoring.state import Array

logger = logging.getLogger("boxcal")

REFRESH_SECONDS = 60.0
ROWS = 5000
NUMBERS = 2**22
"""Of logits, at most, unless the fewest rows have more."""


class PriorAdjustments:
    """Adjusts calibrators, on one event loop."""

    def __init__(self, registry: Registry, log: FeedbackLog) -> None:
        self._registry = registry
        self._log = log
        self._lock = asyncio.Lock()
        self._made: dict[int, tuple[float, ServedCalibrator]] = {}

    async def adjusted(self, served: ServedCalibrator) -> ServedCalibrator:
        """Return a calibrator adjusted to the class frequencies of its recent predictions."""
        if served.reads != "logits":
            raise InvalidParameter(
                f"The calibrator {served.version} (`{served.method}`) reads {served.reads}; "
                "`prior_adjustment` needs one that reads logits."
            )
        async with self._lock:
            until, made = self._made.get(served.version, (0.0, served))
            if time.monotonic() >= until:
                made = await self._registry.run(self._adjust, served)
                self._made = {served.version: (time.monotonic() + REFRESH_SECONDS, made)}
        return made

    def _adjust(self, served: ServedCalibrator) -> ServedCalibrator:
        num_classes = served.calibrator.num_classes
        count = max(FEWEST_ROWS, min(ROWS, NUMBERS // num_classes))
        with self._registry.database.read() as connection:
            logits = self._log.newest(connection, served.version, count)
        if len(logits) < FEWEST_ROWS:
            raise TooFewPredictions(
                f"Prior adjustment of calibrator {served.version} needs {FEWEST_ROWS:,} of its predictions "
                f"with the option `feedback`; {len(logits):,} are kept."
            )
        known, samples = class_prior_of(self._registry, served.version)
        source: Array = np.ones(num_classes) if known is None else known
        source = np.maximum(source / source.sum(), SMALLEST_FREQUENCY)
        rows = served.calibrator(np.asarray(logits, np.float64))
        target = estimate_class_prior(rows, source) if is_shifted(rows, source, samples) else source
        offsets = prior_offsets(source, target)
        adjusted = served.calibrator.adjusted(offsets)
        return ServedCalibrator(served.version, adjusted.method, adjusted)


@dataclass(frozen=True, slots=True)
class Monitoring:
    """What the service holds of online calibration."""

    feedback: FeedbackWriter
    monitor: Monitor
    priors: PriorAdjustments


@asynccontextmanager
async def open_monitoring(
    settings: Settings,
    registry: Registry,
    activator: Activator,
    jobs: FitJobs,
    *,
    model: str,
    classes: Sequence[str],
    telemetry: Telemetry,
    owner: str,
    folds: bool = True,
) -> AsyncIterator[Monitoring]:
    """Store feedback and fold it for as long as the block lasts; store what is left at its end."""
    log = FeedbackLog(registry.database, registry.backbone_id, settings.feedback_rows)
    events = EventLog(registry.database, registry.backbone_id)
    monitor = Monitor(
        registry,
        activator,
        log,
        events,
        telemetry,
        classes=classes,
        refits=settings.auto_refit != "off",
        folds=folds,
    )
    await asyncio.to_thread(pack, np.ones((1, 2)))  # compiled now: predictions are packed on the event loop
    writer = FeedbackWriter(registry, log, telemetry, monitor.wake, num_classes=len(classes))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_store_the_rest, writer)
        await stack.enter_async_context(background("feedback", writer.run, telemetry))
        wake_webhook = None
        if folds and settings.alarm_webhook is not None and settings.alarm_secret is not None:
            from boxcal.app.monitoring.webhook import Webhook  # noqa: PLC0415 - only it needs httpx

            secret = settings.alarm_secret.get_secret_value()
            webhook = Webhook(settings.alarm_webhook, secret, registry, events, telemetry, model=model)
            wake_webhook = webhook.wake
            await stack.enter_async_context(background("webhook", webhook.run, telemetry))

        refits = RefitRunner(
            registry,
            activator,
            jobs,
            log,
            monitor,
            owner=owner,
            activate=settings.auto_refit == "activate",
        )
        stack.push_async_callback(refits.close)

        async def after_step() -> None:
            if folds and settings.auto_refit != "off":
                await refits.step()
            if wake_webhook is not None:
                wake_webhook()

        await stack.enter_async_context(background("monitor", lambda: monitor.run(after_step), telemetry))
        yield Monitoring(writer, monitor, PriorAdjustments(registry, log))


async def _store_the_rest(writer: FeedbackWriter) -> None:
    if not await writer.store():
        logger.warning("The registry did not answer: the last predictions are not kept for feedback.")
