"""Builds the feedback path at start-up: the log, and the writer that stores what the predict path keeps."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from boxcal.app.background import background
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.writer import FeedbackWriter
from boxcal.app.registry.store import Registry

if TYPE_CHECKING:
    from boxcal.app.settings import Settings
    from boxcal.app.telemetry import Telemetry

logger = logging.getLogger("boxcal")


@asynccontextmanager
async def open_feedback(
    settings: Settings, registry: Registry, telemetry: Telemetry
) -> AsyncIterator[FeedbackWriter]:
    """Store feedback for as long as the block lasts, and what is left at its end."""
    log = FeedbackLog(registry.database, registry.backbone_id, settings.feedback_rows)
    writer = FeedbackWriter(registry, log, telemetry, lambda: None)
    try:
        async with background("feedback", writer.run, telemetry):
            yield writer
    finally:
        if not await writer.store():
            logger.warning("The registry did not answer: the last predictions are not kept for feedback.")
