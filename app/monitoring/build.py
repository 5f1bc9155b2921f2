"""Builds feedback and the monitor at start-up, each part after what it depends on."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.monitoring.events import EventLog
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.monitor import Monitor
from boxcal.app.monitoring.prior import PriorAdjustments
from boxcal.app.monitoring.refits import RefitRunner
from boxcal.app.monitoring.writer import FeedbackWriter
from boxcal.app.observability.supervised_task import background
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.store import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from boxcal.app.observability.telemetry import Telemetry
    from boxcal.app.settings.service import Settings

logger = logging.getLogger("boxcal")


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
