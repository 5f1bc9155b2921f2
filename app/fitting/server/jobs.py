"""The fits of this process, for the routes: takes uploads, and reports, waits for and cancels fits.

`slots` limits the uploads, `checks` lets a worker read them, and `runner` runs the fits. Comparisons have a
worker of their own, so that none waits for a fit.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boxcal.app.fitting.backbones import BackboneSource, BackboneSummary
from boxcal.app.fitting.fields import DECLARED, FitFields
from boxcal.app.fitting.messages import (
    BUDGET_SECONDS,
    Compared,
    CompareTask,
    RefitOutcome,
    RefitTask,
    StoredVersion,
)
from boxcal.app.fitting.resources import disk_errors_as_problems
from boxcal.app.fitting.server.runner import WAITING, FitRunner, Job
from boxcal.app.fitting.server.upload_validation import GOING_DOWN, UploadChecks, UploadSlots
from boxcal.app.fitting.server.worker_process import Worker, WorkerFailed, Workers
from boxcal.app.fitting.server.workspace import Workspace
from boxcal.app.http.problems import (
    FitAlreadyOver,
    FitElsewhere,
    FitQueueFull,
    NotReady,
    RegistryUnavailable,
    UnknownMethod,
)
from boxcal.app.registry.activator import Activator, ServedCalibrator
from boxcal.app.registry.audit import SERVICE, Caller
from boxcal.app.registry.fits import CANCELLED, INTERRUPTED
from boxcal.app.registry.records import UNCALIBRATED, ActivatePolicy, FitRecord, FitState
from boxcal.app.registry.storage import SharedSets
from boxcal.app.registry.store import Registry
from boxcal.app.settings import limits
from boxcal.calibrators.method import no_method, reads_of_methods

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry

logger = logging.getLogger("boxcal")

ELSEWHERE_SECONDS = 5.0
POLL_SECONDS = 0.5
TIDY_SECONDS = 3600.0


@dataclass(eq=False)
class FitJobs:
    """The fits of this process that have not ended, and the record of all others.

    Where `closes_workers` is false, the workers belong to another model. Checks of uploads have a worker of
    their own, so that none waits for a fit.
    """

    registry: Registry
    activator: Activator
    workspace: Workspace
    telemetry: Telemetry
    _: KW_ONLY
    source: BackboneSource
    summary: BackboneSummary
    memory_bytes: int
    workers: Workers
    closes_workers: bool = True
    shared: SharedSets | None = None  # Validation sets that other replicas can read
    queues_only: bool = False  # Whether fits are left to other processes, which share the directory

    def __post_init__(self) -> None:
        self._closing = asyncio.Event()
        self._next_tidy = 0.0
        self._jobs: dict[str, Job] = {}
        self._slots = UploadSlots(self.workspace, self._jobs)
        self.checks = UploadChecks(self.workspace, self.summary, self._closing, self.workers.checks)
        self.comparisons = Comparisons(
            self.registry,
            self.activator,
            self.checks,
            self.source,
            memory_bytes=self.memory_bytes,
            worker=self.workers.comparisons,
        )
        self._runner = FitRunner(
            self.registry,
            self.activator,
            self.telemetry,
            workers=self.workers,
            source=self.source,
            memory_bytes=self.memory_bytes,
            closing=self._closing,
        )

    async def close(self) -> None:
        """Stop every fit and check; fits are recorded as interrupted, or left to another replica."""
        self._closing.set()
        for job in self._jobs.values():
            job.stop(FitState.INTERRUPTED, INTERRUPTED)
        if self.closes_workers:
            await self.workers.checks.close()
            await self.workers.comparisons.close()
        while self._jobs:
            await asyncio.wait([job.conclusion for job in self._jobs.values()])
        if self.closes_workers:
            await self.workers.fits.close()

    def reserve_slot(self, client: str = "") -> AbstractAsyncContextManager[Path]:
        """Reserve a slot and a folder for an upload, as `UploadSlots.reserve`."""
        if self._closing.is_set():
            raise NotReady(GOING_DOWN)
        return self._slots.reserve(client)

    async def submit(
        self,
        folder: Path,
        content_type: str,
        caller: Caller = SERVICE,
        permit: Callable[[ActivatePolicy], None] = lambda _: None,
    ) -> FitRecord:
        """Check the request body in a folder of `reserve_slot`, and queue its fit."""
        active = self.activator.active.current
        who = f"the active calibrator, {active.method!r}, which the report compares with"
        fields = tuple(FitFields.model_fields)
        checked = await self.checks.check(folder, content_type, fields, [(who, active.calibrator.reads)])
        permit(checked.activate)
        if self._closing.is_set():
            raise NotReady(GOING_DOWN)
        fit_id = folder.name
        if self.queues_only and await self.registry.run(self.registry.fits.waiting) >= limits.MAX_QUEUED_FITS:
            raise FitQueueFull(f"{limits.MAX_QUEUED_FITS} fits wait for a worker; try again later.")
        if self.shared is not None:
            with disk_errors_as_problems():
                folder = await asyncio.to_thread(self.shared.add, folder, owned=not self.queues_only)
        try:
            record = await self.registry.run(
                self.registry.fits.add,
                fit_id,
                checked.method,
                checked.activate,
                checked.samples,
                budget_seconds=checked.budget_seconds,
                shared=self.shared is not None,
                owned=not self.queues_only,
                caller=caller,
            )
        except BaseException:
            await self._leave(folder, is_over=True)
            raise
        return record if self.queues_only else self._start(record, folder, checked.budget_seconds)

    def _start(self, record: FitRecord, folder: Path, budget_seconds: float) -> FitRecord:
        job = self._runner.start(record, folder, budget_seconds, is_shared=self.shared is not None)
        self._jobs[record.id] = job
        job.conclusion = asyncio.create_task(self._conclude(job))
        if self._closing.is_set():
            job.stop(FitState.INTERRUPTED, INTERRUPTED)
        return job.record

    async def follow(self) -> None:
        """Cancel the fits of this process whose cancellation another replica requested."""
        if self._jobs:
            for fit_id in await self.registry.run(self.registry.fits.cancel_requests):
                if fit_id in self._jobs:
                    self._jobs[fit_id].stop(FitState.CANCELLED, CANCELLED)

    async def sweep(self) -> None:
        """Record that this process is alive; adopt a fit of a process that stopped, or interrupt it."""
        fits, seen = self.registry.fits, self.registry.snapshots.last
        if self._jobs:
            await self.registry.run(fits.keep_alive)
        living = await asyncio.to_thread(self.workspace.sweep)
        if seen is None or seen.is_abandoned:
            await self._adopt(living)
            await self.registry.run(fits.interrupt_abandoned, living)
        now = time.monotonic()
        if self.shared is not None and now >= self._next_tidy:
            self._next_tidy = now + TIDY_SECONDS
            unfinished = await self.registry.run(fits.unfinished)
            await asyncio.to_thread(self.shared.sweep, unfinished)

    async def adopt(self) -> None:
        """Take the oldest fit that has no owner, or that of a process that stopped, if there is one."""
        await self._adopt(await asyncio.to_thread(self.workspace.sweep))

    async def _adopt(self, living: set[str]) -> None:
        fits, shared = self.registry.fits, self.shared
        if (
            shared is None
            or self.queues_only
            or self.workers.turn.locked()
            or self._jobs
            or self._closing.is_set()
        ):
            return
        adopted = await self.registry.run(fits.adopt, living)
        if adopted is None:
            return
        record, former_owner, budget_seconds = adopted
        try:
            folder = await asyncio.to_thread(shared.claim, record.id, former_owner)
        except OSError as error:
            await self.registry.run(fits.end, record, FitState.INTERRUPTED, f"{INTERRUPTED} {error}")
            return
        if former_owner:
            logger.warning("Fit %s is continued: its owner stopped.", record.id)
        else:
            logger.info("Fit %s is taken from the queue.", record.id)
        self._start(record, folder, BUDGET_SECONDS if budget_seconds is None else budget_seconds)

    async def refit(self, write: Callable[[Path], RefitTask]) -> RefitOutcome:
        """Run a refit in the worker of the fits."""
        if self._closing.is_set():
            raise NotReady(GOING_DOWN)
        folder = await asyncio.to_thread(self.workspace.new_folder, f"refit-{secrets.token_hex(8)}")
        try:
            task = await asyncio.to_thread(write, folder)
            return await self._runner.refit(replace(task, classes=list(self.summary.labels)))
        except WorkerFailed as error:
            if self._closing.is_set():
                raise NotReady(GOING_DOWN) from error
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def get(self, fit_id: str) -> FitRecord:
        job = self._jobs.get(fit_id)
        return job.record if job else await self.registry.run(self.registry.fits.get, fit_id)

    async def list(self, limit: int, before: str | None = None) -> list[FitRecord]:
        """Return the records of the newest fits, newest first; only fits older than the fit `before`."""
        records = await self.registry.run(self.registry.fits.list, limit, before)
        return [self._jobs[record.id].record if record.id in self._jobs else record for record in records]

    async def wait(self, fit_id: str, seconds: float) -> FitRecord:
        """Wait for a fit to end, but not longer than `seconds`, and return its record."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for record in self.watch(fit_id):
                    if record.state.is_final:
                        return record
        return await self.get(fit_id)

    async def watch(self, fit_id: str) -> AsyncGenerator[FitRecord]:
        """Yield the record of a fit, now and after every change, until it has ended."""
        job = self._jobs.get(fit_id)
        if job:
            async for record in job.watch():
                yield record
        if job is None or job.is_elsewhere:
            async for record in self._poll(fit_id):
                yield record

    async def cancel(self, fit_id: str, caller: Caller = SERVICE) -> FitRecord:
        """Cancel a waiting or running fit; cancelling it again has no effect."""
        job = self._jobs.get(fit_id)
        if job is not None:
            job.stop(FitState.CANCELLED, CANCELLED, caller)
            async for record in job.watch():
                if record.stage == WAITING and not record.state.is_final:
                    raise RegistryUnavailable(f"Fit {fit_id} ends as soon as the registry answers.")
        record = await self.get(fit_id)
        if not record.state.is_final:
            ended = await self.registry.run(self.registry.fits.request_cancel, fit_id, caller)
            if ended and self.shared is not None:
                with suppress(OSError):  # swept later
                    await asyncio.to_thread(self.shared.remove, fit_id)
            record = await self.wait(fit_id, ELSEWHERE_SECONDS)
        if not record.state.is_final:
            raise FitElsewhere(
                f"Fit {fit_id} runs in another replica, which has not cancelled it within "
                f"{ELSEWHERE_SECONDS:.0f} s. The request is recorded."
            )
        if record.state is not FitState.CANCELLED:
            raise FitAlreadyOver(f"Fit {fit_id} is over: it has {record.state}.")
        return record

    async def _conclude(self, job: Job) -> None:
        """Wait for the end of a fit, and tell those who watch it."""
        record = await self._runner.finish(job)
        await self._leave(job.folder, is_over=not job.is_elsewhere)
        del self._jobs[record.id]
        job.update(record)
        with suppress(RegistryUnavailable):
            await self.adopt()

    async def _leave(self, folder: Path, *, is_over: bool) -> None:
        """Remove a validation set unless another process needs it; what cannot be removed is swept later."""
        if self.shared is None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            return
        try:
            await asyncio.to_thread(self.shared.leave, folder, is_over=is_over)
        except OSError as error:
            logger.warning("The validation set in %s was not removed: %s", folder, error)

    async def _poll(self, fit_id: str) -> AsyncIterator[FitRecord]:
        """Watch a fit that has ended, or that another process runs, in the registry, until this one ends."""
        last = await self.get(fit_id)
        yield last
        while not last.state.is_final and not self._closing.is_set():
            await asyncio.sleep(POLL_SECONDS)
            record = await self.get(fit_id)
            if record != last:
                yield record
            last = record


@dataclass(eq=False)
class Comparisons:
    """Comparisons of this process, one at a time."""

    registry: Registry
    activator: Activator
    checks: UploadChecks
    source: BackboneSource
    _: KW_ONLY
    memory_bytes: int
    worker: Worker

    async def find(self, versions: Sequence[int], methods: Sequence[str]) -> list[ServedCalibrator]:
        known = reads_of_methods()
        for name in methods:
            if name not in known:
                raise UnknownMethod(f"There is {no_method(name, known)}.")
        return [await self.activator.fetch(version) for version in versions]

    async def compare(
        self,
        folder: Path,
        content_type: str,
        versions: Sequence[ServedCalibrator],
        methods: Sequence[str],
    ) -> dict[str, Any]:
        """Check the request body in a folder of `FitJobs.reserve_slot`, and compare on it."""
        known = reads_of_methods()
        others = [(f"the method {name!r}", known[name]) for name in methods]
        others += [(f"version {one.version} ({one.method})", one.reads) for one in versions]
        await self.checks.check(folder, content_type, DECLARED, others)
        stored = [await self.registry.run(self._stored, one) for one in versions]
        task = CompareTask(folder, self.source, stored, list(methods), self.memory_bytes)
        try:
            return (await self.worker.run(task, Compared)).document
        except WorkerFailed as error:
            raise self.checks.refusal(error, "The comparison failed.") from error

    def _stored(self, served: ServedCalibrator) -> StoredVersion:
        if served.version == UNCALIBRATED:
            return StoredVersion(served.version, served.method, None, None)
        known = self.registry.report(served.version).get("sketch")
        return StoredVersion(served.version, served.method, self.registry.artifact(served.version), known)
