"""A fit that has not ended: its record as it changes, and the task that does its work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from boxcal.app.registry.audit import Caller
from boxcal.app.registry.records import Decision, FitRecord, FitState, FittedCalibrator

Result = tuple[FittedCalibrator, Callable[[int], Decision]]
"""The calibrator, and the decision about its activation, given the version that is active at that moment."""


@dataclass(eq=False)
class Job:
    """One fit and those who watch it."""

    record: FitRecord
    folder: Path  # Contains the checked validation set
    budget_seconds: float  # How long `auto` compares methods
    # Whether the folder is in shared storage, so that another process can continue the fit
    is_shared: bool = False
    # Waits for the turn of the fit and for the worker; `stop` cancels it
    work: asyncio.Task[Result] = field(init=False)
    conclusion: asyncio.Task[None] = field(init=False)  # Waits for `work` and records how the fit ended
    # The state and the reason to record, and who cancelled the fit, if it was stopped
    ending: tuple[FitState, str, Caller | None] | None = None
    is_elsewhere: bool = False  # Whether another process continues the fit
    started: float | None = None  # When its turn came, by `time.monotonic`; None while it waits
    # Set when the record changes, and then replaced
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def update(self, record: FitRecord) -> None:
        """Replace the record and wake up those who watch it."""
        self.record = record
        watched, self.changed = self.changed, asyncio.Event()
        watched.set()

    async def watch(self) -> AsyncIterator[FitRecord]:
        """Yield the record, now and after every change, until the fit has ended here."""
        while True:
            changed, record = self.changed, self.record
            yield record
            if record.state.is_final or self.is_elsewhere:
                return
            await changed.wait()

    def stop(self, state: FitState, why: str, canceller: Caller | None = None) -> None:
        """Cancel the work, unless it is done; the first call decides what is recorded, as `FitLog.end`."""
        if self.ending is None and self.work.cancel():
            self.ending = (state, why, canceller)

    def seconds_left(self) -> float | None:
        """Estimate the remaining time from the time and the progress so far; None without any progress."""
        progress = self.record.progress
        if self.started is None or progress == 0:
            return None
        return (time.monotonic() - self.started) * (1 - progress) / progress
