"""Calibrators adjusted to the class frequencies of recent predictions, for requests with `prior_adjustment`.

The frequencies are estimated by MAP-EM from the predictions that are kept for feedback, once a minute; where
their change is not significant, the answers stay as they are. The registry and the monitor know nothing of
it: the adjustment lasts as long as a request.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np

from boxcal.app.http.problems import InvalidParameter, TooFewPredictions
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.versions import class_prior_of
from boxcal.app.registry.activator import ServedCalibrator
from boxcal.app.registry.store import Registry
from boxcal.calibrators.monitoring.class_prior import (
    FEWEST_ROWS,
    SMALLEST_FREQUENCY,
    estimate_class_prior,
    is_shifted,
    prior_offsets,
)

if TYPE_CHECKING:
    from boxcal.calibrators.monitoring.state import Array

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
