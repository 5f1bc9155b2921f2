"""A fit that has not ended: its record as it changes, and the task that does its work.

Slots for uploads: arriving uploads and fits are limited together, and arriving uploads per client.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from boxcal.app.fitting.resources import disk_errors_as_problems
from boxcal.app.fitting.server.workspace import Workspace
from boxcal.app.http.problems import FitQueueFull
from boxcal.app.registry.audit import Caller
from boxcal.app.registry.records import Decision, FitRecord, FitState, FittedCalibrator
from boxcal.app.settings import limits

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


UNKNOWN_SECONDS = 5.0
LONGEST_SECONDS = 300.0


class UploadSlots:
    """Slots for uploads, each with a folder."""

    def __init__(self, workspace: Workspace, jobs: Mapping[str, Job]) -> None:
        self._workspace = workspace
        self._jobs = jobs
        self._arriving: Counter[str] = Counter()

    @asynccontextmanager
    async def reserve(self, client: str) -> AsyncIterator[Path]:
        """Reserve a slot and a folder while an upload arrives and is checked.

        The folder is removed at the end, unless it belongs to a fit by then.
        """
        arriving = self._arriving.total()
        if len(self._jobs) + arriving > limits.MAX_WAITING_FITS:
            raise FitQueueFull(
                f"{len(self._jobs)} fits are running or waiting and {arriving} uploads are arriving; "
                f"at most {limits.MAX_WAITING_FITS} may wait.",
                retry_after=self._seconds_to_a_slot(),
            )
        # A client takes half of what the others leave, so that slow uploads of few leave places to more.
        own = self._arriving[client]
        if own and own >= (most := (limits.MAX_WAITING_FITS + 1 - len(self._jobs) - arriving + own) // 2):
            raise FitQueueFull(
                f"{own} uploads are arriving from {client}; the limit is {most}, half of the free places."
            )
        self._arriving[client] += 1
        folder = None
        try:
            with disk_errors_as_problems():
                folder = await asyncio.to_thread(self._workspace.new_folder, secrets.token_hex(8))
            yield folder
        finally:
            self._arriving[client] -= 1
            self._arriving += Counter()  # removes clients without uploads
            if folder is not None and folder.name not in self._jobs:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _seconds_to_a_slot(self) -> int:
        """Estimate when the running fit ends."""
        estimates = (job.seconds_left() for job in self._jobs.values())
        seconds = next((left for left in estimates if left is not None), UNKNOWN_SECONDS)
        return max(1, round(min(seconds, LONGEST_SECONDS)))
