"""Runs fits one after the other on the event loop, from the first turn to the record of the end.

A worker process fits. Registry calls run in threads, and are retried while the registry does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.messages import FitOutcome, FitTask, RefitOutcome, RefitTask
from boxcal.app.fitting.server.worker_process import WorkerFailed, Workers
from boxcal.app.http.problems import FitLost, RegistryUnavailable
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.audit import Caller
from boxcal.app.registry.fits import INTERRUPTED
from boxcal.app.registry.records import (
    UNCALIBRATED,
    ActivatePolicy,
    Decision,
    FitRecord,
    FitState,
    FittedCalibrator,
)
from boxcal.app.registry.store import Registry

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry

logger = logging.getLogger("boxcal")

RECORD_SECONDS = 1.0
RETRY_SECONDS = 2.0
WAITING = "waiting for the registry"
SERVICE_FAILED = "The service failed while it ran the fit or recorded its result; see the server log."

P = ParamSpec("P")
T = TypeVar("T")

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


@dataclass(eq=False)
class FitRunner:
    """Runs one fit at a time; the others wait in the order of their start."""

    registry: Registry
    activator: Activator
    telemetry: Telemetry
    _: KW_ONLY
    workers: Workers
    source: BackboneSource
    memory_bytes: int
    closing: asyncio.Event

    def start(self, record: FitRecord, folder: Path, budget_seconds: float, *, is_shared: bool) -> Job:
        """Put a fit with a checked validation set at the end of the queue; `finish` must be called next."""
        job = Job(record, folder, budget_seconds, is_shared)
        job.work = asyncio.create_task(self._fit(job), name=f"fit {record.id}")
        return job

    async def finish(self, job: Job) -> FitRecord:
        """Wait for a fit, record how it ended, and return its last record."""
        try:
            record = await self._accept(job, await job.work)
        except asyncio.CancelledError:
            record = await self._end(job, *(job.ending or (FitState.INTERRUPTED, INTERRUPTED)))
        except FitLost:
            record = await self._end(job, FitState.INTERRUPTED, INTERRUPTED)
        except WorkerFailed as error:
            record = await self._end(job, FitState.FAILED, str(error))
        except Exception:
            logger.exception("Fit %s failed in the service", job.record.id)
            record = await self._end(job, FitState.FAILED, SERVICE_FAILED)
        if job.started is not None:
            self.workers.turn.release()
        if job.is_elsewhere:
            return record
        seconds = time.monotonic() - job.started if job.started is not None else 0.0
        self.telemetry.fit_ended(record.state.value, record.method, seconds)
        return record

    async def refit(self, task: RefitTask) -> RefitOutcome:
        """Run a refit after the fits that began before it."""
        async with self.workers.turn:
            return await self.workers.fits.run(replace(task, memory_bytes=self.memory_bytes), RefitOutcome)

    async def _fit(self, job: Job) -> Result:
        """Wait for the turn of a fit, and run it in the worker."""
        await self.workers.turn.acquire()
        job.started = time.monotonic()
        start = asyncio.create_task(self._call(job, self.registry.fits.start, job.record))
        try:
            await asyncio.shield(start)
        finally:
            job.update(await start)  # also if the fit is cancelled: its end must name the attempt that began
        active = self.activator.active.current
        against = known = None
        if active.version != UNCALIBRATED:
            against = await self._call(job, self.registry.artifact, active.version)
            known = (await self._call(job, self.registry.report, active.version)).get("sketch")
        task = FitTask(
            job.folder,
            self.source,
            job.record.method,
            against=against,
            known=known,
            budget_seconds=job.budget_seconds,
            memory_bytes=self.memory_bytes,
        )
        recorder = asyncio.create_task(self._record_progress(job))
        try:
            outcome = await self.workers.fits.run(
                task,
                FitOutcome,
                lambda progress, stage: job.update(replace(job.record, progress=progress, stage=stage)),
            )
        finally:
            recorder.cancel()
        report = outcome.fitted.report
        return outcome.fitted, lambda active_version: decide(
            job.record.activate,
            is_better=outcome.is_better,
            reason=report["against"]["reason"],
            warnings=report["warnings"],
            compared_with=active.version,
            active_version=active_version,
        )

    async def _accept(self, job: Job, result: Result) -> FitRecord:
        """Record a result and, if `decide` says so, activate it."""
        fitted, decision = result
        # The disk may be full; this makes space for the result.
        await asyncio.to_thread(shutil.rmtree, job.folder, ignore_errors=True)
        await self._call(job, self.activator.accept, job.record, fitted, decision)
        return await self._call(job, self.registry.fits.get, job.record.id)

    async def _end(self, job: Job, state: FitState, why: str, canceller: Caller | None = None) -> FitRecord:
        """Record the end of a fit without a result, or leave it to another process; a failure is logged."""
        fits = self.registry.fits
        try:
            try:
                if job.is_shared and state is FitState.INTERRUPTED:
                    job.is_elsewhere = True
                    return await self._call(job, fits.release, job.record)
                return await self._call(job, fits.end, job.record, state, why, canceller)
            except FitLost:  # another process recorded its end, or this one did before a connection broke
                record = await self._call(job, fits.get, job.record.id)
                if record.state.is_final or job.is_elsewhere:
                    return record
        except RegistryUnavailable as error:
            logger.warning("The end of fit %s was not recorded: %s", job.record.id, error)
            if job.is_elsewhere:  # adopted by another process once this one has been silent for a while
                return job.record
        except Exception:
            logger.exception("The end of fit %s could not be recorded", job.record.id)
        return replace(job.record, state=state, error=why)

    async def _call(self, job: Job, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call the registry; retry while it does not answer or its disk is full: no result is lost."""
        while True:
            try:
                return await self.registry.run(call, *arguments, **named)
            except RegistryUnavailable:
                if self.closing.is_set():
                    raise
                job.update(replace(job.record, stage=WAITING))
            with suppress(TimeoutError):
                await asyncio.wait_for(self.closing.wait(), RETRY_SECONDS)

    async def _record_progress(self, job: Job) -> None:
        """Record the progress every second, which also tells other replicas that the fit is alive."""
        while True:
            await asyncio.sleep(RECORD_SECONDS)
            record = job.record
            try:
                await self.registry.run(self.registry.fits.advance, record, record.progress, record.stage)
            except RegistryUnavailable:
                continue  # the registry logs the outage, once
            except FitLost:
                job.stop(FitState.INTERRUPTED, INTERRUPTED)  # another process marked it as interrupted


def decide(
    policy: ActivatePolicy,
    *,
    is_better: bool,
    reason: str,
    warnings: Sequence[dict[str, Any]],
    compared_with: int,
    active_version: int,
) -> Decision:
    """Apply the upload's `activate` field."""
    serious = "; ".join(warning["message"] for warning in warnings if warning["severity"] == "serious")
    if policy is ActivatePolicy.ALWAYS:
        return Decision(
            True, f"Activated, as asked{f', despite a serious warning: {serious}' * bool(serious)}."
        )
    if policy is ActivatePolicy.NEVER:
        return Decision(False, "Not activated, as asked.")
    if active_version != compared_with:
        return Decision(
            False,
            f"Not activated: the fit was compared with version {compared_with}, but version {active_version} "
            "was activated meanwhile. Activate it yourself, or fit again.",
        )
    verdict = f"compared with version {compared_with}, {reason}."
    if serious:
        advice = "Correct the data, or activate it yourself." if is_better else f"Nor is it better: {verdict}"
        return Decision(False, f"Not activated: {serious}. {advice}")
    return Decision(is_better, f"{'Activated' if is_better else 'Not activated'}: {verdict}")
