"""The queue of fits, on the event loop: uploads are checked at once, and fits run one after the other.

Two workers do the work, one for checks and one for fits, so that a check never waits for a fit. Registry
calls run in threads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from boxcal.app.activation.activator import Activator
from boxcal.app.activation.gate import decide
from boxcal.app.errors import NotReady
from boxcal.app.fitting.backbones import BackboneSource, BackboneSummary
from boxcal.app.fitting.errors import (
    REFUSALS,
    FitAlreadyOver,
    FitElsewhere,
    FitQueueFull,
    InvalidUpload,
    full_disk_as_problem,
)
from boxcal.app.fitting.messages import Checked, CheckTask, FitOutcome, FitTask, Refused
from boxcal.app.fitting.requirements import reads_of_methods
from boxcal.app.fitting.worker import Worker, WorkerFailed
from boxcal.app.registry.errors import FitLost, RegistryUnavailable
from boxcal.app.registry.fits import INTERRUPTED
from boxcal.app.registry.records import Decision, FitRecord, FitState
from boxcal.app.registry.store import UNCALIBRATED, Registry
from boxcal.app.uploads.workspace import Workspace

if TYPE_CHECKING:
    from boxcal.app.settings import Settings
    from boxcal.app.telemetry import Telemetry

logger = logging.getLogger("boxcal")

MAX_WAITING = 8
MAX_PER_CLIENT = 4
RECORD_SECONDS = 1.0
CHECK_SECONDS = 120.0
CHECK_MEMORY_BYTES = 2**30
RETRY_SECONDS = 2.0
CANCELLED = "Cancelled on request."
SERVICE_FAILED = "The service failed while it ran the fit or recorded its result; see the server log."
WAITING = "waiting for the registry"
GOING_DOWN = "The service is shutting down and takes no more fits."

P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FitLimits:
    """Limits of uploads and fits.

    Attributes
    ----------
    upload_bytes
        Largest upload, as sent, and largest total of its arrays, as stored.
    memory_bytes
        Memory that a fit may allocate.
    seconds
        Time limit of a fit.
    """

    upload_bytes: int
    memory_bytes: int
    seconds: float

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Take them from the service's settings."""
        return cls(settings.max_upload_bytes, settings.fit_memory_bytes, settings.fit_timeout_seconds)


@dataclass(eq=False)
class Job:
    """A fit that is not over, and those who watch it.

    Attributes
    ----------
    work
        Waits for its turn and for the worker; cancelling it stops the fit.
    ending
        As what it shall end, and why, once someone asked it to.
    """

    record: FitRecord
    folder: Path
    budget_seconds: float
    work: asyncio.Task[FitOutcome] | None = None
    conclusion: asyncio.Task[None] | None = None
    ending: tuple[FitState, str] | None = None
    started: float = 0.0
    compared_with: int = UNCALIBRATED
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def update(self, record: FitRecord) -> None:
        """Show a new state to everyone who watches."""
        self.record = record
        watched, self.changed = self.changed, asyncio.Event()
        watched.set()

    def stop(self, state: FitState, why: str) -> None:
        """End the fit, unless its result is there already; the first who asks says as what."""
        if self.ending is None and self.work is not None and self.work.cancel():
            self.ending = (state, why)


class FitJobs:
    """Takes uploads, has them checked and fitted, and sees every fit to its end.

    Parameters
    ----------
    registry, activator
        Where results go.
    workspace
        Where uploads and validation sets are while they wait.
    telemetry
        Is told of every fit that ends.
    source, summary
        The backbone, as fits load it and as checks compare with it.
    max_waiting
        How many fits may wait beside the one that runs.
    """

    def __init__(
        self,
        registry: Registry,
        activator: Activator,
        workspace: Workspace,
        telemetry: Telemetry,
        *,
        source: BackboneSource,
        summary: BackboneSummary,
        limits: FitLimits,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._registry = registry
        self._activator = activator
        self._workspace = workspace
        self._telemetry = telemetry
        self._source = source
        self._summary = summary
        self._limits = limits
        self._max_waiting = max_waiting
        self._checker = Worker(CHECK_SECONDS)
        self._fitter = Worker(limits.seconds)
        self._turn = asyncio.Lock()
        self._arriving: Counter[str] = Counter()
        self._jobs: dict[str, Job] = {}
        self._closing = asyncio.Event()

    async def close(self) -> None:
        """Stop every fit and check; fits are recorded as interrupted, and those who watch them are told."""
        self._closing.set()
        for job in self._jobs.values():
            job.stop(FitState.INTERRUPTED, INTERRUPTED)
        await self._checker.close()
        while self._jobs:
            await next(iter(self._jobs.values())).changed.wait()
        await self._fitter.close()

    @asynccontextmanager
    async def reserve_slot(self, client: str = "") -> AsyncIterator[Path]:
        """Hold a slot of the queue, and a folder, while an upload arrives and is checked.

        The folder is removed at the end, unless it was submitted.

        Raises
        ------
        FitQueueFull
            As many fits are running, waiting and arriving, or arriving from this client, as may.
        NotReady
            The service is shutting down.
        """
        if self._closing.is_set():
            raise NotReady(GOING_DOWN)
        arriving = self._arriving.total()
        if len(self._jobs) + arriving > self._max_waiting:
            raise FitQueueFull(
                f"{len(self._jobs)} fits are running or waiting and {arriving} uploads are arriving; "
                f"at most {self._max_waiting} may wait.",
                retry_after=self._seconds_to_a_slot(),
            )
        if self._arriving[client] >= MAX_PER_CLIENT:
            raise FitQueueFull(
                f"{self._arriving[client]} uploads are arriving from {client}; the limit is {MAX_PER_CLIENT}."
            )
        self._arriving[client] += 1
        folder = None
        try:
            with full_disk_as_problem():
                folder = await asyncio.to_thread(self._workspace.new_folder, secrets.token_hex(8))
            yield folder
        finally:
            self._arriving[client] -= 1
            self._arriving += Counter()  # forgets clients without uploads
            if folder is not None and folder.name not in self._jobs:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def submit(self, folder: Path, content_type: str) -> FitRecord:
        """Have the body in a folder of `reserve_slot` checked, and queue its fit.

        Raises
        ------
        BoxcalError
            What is wrong with it.
        NotReady
            The service is shutting down.
        """
        checked = await self._check(folder, content_type)
        if self._closing.is_set():
            raise NotReady(GOING_DOWN)
        record = await self._registry.run(
            self._registry.fits.add, folder.name, checked.method, checked.activate, checked.samples
        )
        job = self._jobs[record.id] = Job(record, folder, checked.budget_seconds)
        job.work = asyncio.create_task(self._fit(job), name=f"fit {record.id}")
        job.conclusion = asyncio.create_task(self._conclude(job, job.work))
        if self._closing.is_set():
            job.stop(FitState.INTERRUPTED, INTERRUPTED)
        return job.record

    async def get(self, fit_id: str) -> FitRecord:
        """Say how a fit stands.

        Raises
        ------
        FitNotFound
            No fit has the id.
        """
        job = self._jobs.get(fit_id)
        return job.record if job else await self._registry.run(self._registry.fits.get, fit_id)

    async def list(self, limit: int, before: str | None = None) -> list[FitRecord]:
        """Say how the newest fits stand, newest first; only fits older than the fit `before`."""
        records = await self._registry.run(self._registry.fits.list, limit, before)
        return [self._jobs[record.id].record if record.id in self._jobs else record for record in records]

    async def wait(self, fit_id: str, seconds: float) -> FitRecord:
        """Wait for a fit to end, but not longer than `seconds`, and say how it stands."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                async for record in self.watch(fit_id):
                    if record.state.is_final:
                        return record
        return await self.get(fit_id)

    async def watch(self, fit_id: str) -> AsyncIterator[FitRecord]:
        """Yield how a fit stands, now and after every change, until it is over.

        Raises
        ------
        FitNotFound
            No fit has the id.
        """
        job = self._jobs.get(fit_id)
        if job is None:
            async for record in self._watch_elsewhere(fit_id):
                yield record
            return
        while True:
            changed, record = job.changed, job.record
            yield record
            if record.state.is_final:
                return
            await changed.wait()

    async def _watch_elsewhere(self, fit_id: str) -> AsyncIterator[FitRecord]:
        """Watch a fit that is over, or whose progress another process records."""
        last = await self.get(fit_id)
        yield last
        while not last.state.is_final:
            await asyncio.sleep(RECORD_SECONDS)
            record = await self.get(fit_id)
            if record != last:
                yield record
            last = record

    async def cancel(self, fit_id: str) -> FitRecord:
        """Cancel a fit that waits or runs; one that is cancelled stays so.

        Raises
        ------
        FitNotFound, FitAlreadyOver, FitElsewhere
            No fit has the id; it has ended; another process runs it.
        RegistryUnavailable
            The fit is stopped, but its end cannot be recorded yet.
        """
        job = self._jobs.get(fit_id)
        if job is not None:
            job.stop(FitState.CANCELLED, CANCELLED)
            async for record in self.watch(fit_id):
                if record.state.is_final:
                    break
                if record.stage == WAITING:
                    raise RegistryUnavailable(f"Fit {fit_id} ends as soon as the registry answers.")
        record = await self.get(fit_id)
        if not record.state.is_final:
            raise FitElsewhere(f"Fit {fit_id} runs in another replica; cancel it there.")
        if record.state is not FitState.CANCELLED:
            raise FitAlreadyOver(f"Fit {fit_id} is over: it has {record.state}.")
        return record

    async def _check(self, folder: Path, content_type: str) -> Checked:
        active = self._activator.active.current
        task = CheckTask(
            folder,
            content_type,
            self._summary,
            await asyncio.to_thread(reads_of_methods),
            (active.method, active.calibrator.reads),
            self._limits.upload_bytes,
            CHECK_MEMORY_BYTES + self._limits.upload_bytes,
        )
        try:
            reply = await self._checker.run(task)
        except WorkerFailed as error:
            if self._closing.is_set():
                raise NotReady(GOING_DOWN) from error
            raise InvalidUpload(f"The file could not be read. {error}") from error
        if isinstance(reply, Checked):
            return reply
        detail, kind = _refusal(reply, "The check of an upload failed")
        raise REFUSALS.get(kind, InvalidUpload)(detail)

    async def _fit(self, job: Job) -> FitOutcome:
        """Wait for the turn of a fit, and have it done."""
        await self._turn.acquire()
        job.started = time.monotonic()
        start = asyncio.create_task(self._recorded(job, self._registry.fits.start, job.record))
        try:
            await asyncio.shield(start)
        finally:
            job.update(await start)  # also where the fit is cancelled: its end names the attempt that began
        active = self._activator.active.current
        job.compared_with, against, known = active.version, None, None
        if active.version != UNCALIBRATED:
            against = await self._recorded(job, self._registry.artifact, active.version)
            known = (await self._recorded(job, self._registry.report, active.version)).get("sketch")
        task = FitTask(
            job.folder,
            self._source,
            job.record.method,
            against=against,
            known=known,
            budget_seconds=job.budget_seconds,
            memory_bytes=self._limits.memory_bytes,
        )
        recorder = asyncio.create_task(self._record_progress(job))
        try:
            reply = await self._fitter.run(
                task, lambda progress, stage: job.update(replace(job.record, progress=progress, stage=stage))
            )
        finally:
            recorder.cancel()
        if isinstance(reply, FitOutcome):
            return reply
        raise WorkerFailed(_refusal(reply, f"Fit {job.record.id} failed")[0])

    async def _conclude(self, job: Job, work: asyncio.Task[FitOutcome]) -> None:
        """Record how a fit ended, whatever ended it, and give its turn to the next."""
        try:
            record = await self._record(job, await work)
        except asyncio.CancelledError:
            record = await self._end(job, *(job.ending or (FitState.INTERRUPTED, INTERRUPTED)))
        except FitLost:
            record = await self._end(job, FitState.INTERRUPTED, INTERRUPTED)
        except WorkerFailed as error:
            record = await self._end(job, FitState.FAILED, str(error))
        except Exception:
            logger.exception("Fit %s failed in the service", job.record.id)
            record = await self._end(job, FitState.FAILED, SERVICE_FAILED)
        if job.started:
            self._turn.release()
        await asyncio.to_thread(shutil.rmtree, job.folder, ignore_errors=True)
        del self._jobs[record.id]
        job.update(record)
        seconds = time.monotonic() - job.started if job.started else 0.0
        self._telemetry.fit_ended(record.state.value, record.method, seconds)

    async def _record(self, job: Job, outcome: FitOutcome) -> FitRecord:
        """Keep a result: record it and, where the gate says so, activate it."""

        def decision(active_version: int) -> Decision:
            return decide(
                job.record.activate,
                is_better=outcome.is_better,
                reason=outcome.fitted.report["against"]["reason"],
                warnings=outcome.fitted.report["warnings"],
                compared_with=job.compared_with,
                active_version=active_version,
            )

        # Space for the result, where the disk is full.
        await asyncio.to_thread(shutil.rmtree, job.folder, ignore_errors=True)
        await self._recorded(job, self._activator.accept, job.record, outcome.fitted, decision)
        return await self._recorded(job, self._registry.fits.get, job.record.id)

    async def _end(self, job: Job, state: FitState, why: str) -> FitRecord:
        fits = self._registry.fits
        try:
            try:
                return await self._recorded(job, fits.end, job.record, state, why)
            except FitLost:  # it is recorded otherwise: by another process, or before a connection broke
                record = await self._recorded(job, fits.get, job.record.id)
                if record.state.is_final:
                    return record
        except RegistryUnavailable as error:
            logger.warning("The end of fit %s was not recorded: %s", job.record.id, error)
        except Exception:
            logger.exception("The end of fit %s could not be recorded", job.record.id)
        return replace(job.record, state=state, error=why)

    async def _recorded(
        self, job: Job, call: Callable[P, Result], *arguments: P.args, **named: P.kwargs
    ) -> Result:
        """Call the registry, and retry while it does not answer or its disk is full: a result is not lost."""
        while True:
            try:
                return await self._registry.run(call, *arguments, **named)
            except RegistryUnavailable:
                if self._closing.is_set():
                    raise
                job.update(replace(job.record, stage=WAITING))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), RETRY_SECONDS)

    async def _record_progress(self, job: Job) -> None:
        """Record progress now and then, which also tells other replicas that the fit is alive."""
        while True:
            await asyncio.sleep(RECORD_SECONDS)
            record = job.record
            try:
                await self._registry.run(self._registry.fits.advance, record, record.progress, record.stage)
            except RegistryUnavailable:
                continue  # the registry logs that it is lost, once
            except FitLost:
                job.stop(FitState.INTERRUPTED, INTERRUPTED)  # another process gave it up

    def _seconds_to_a_slot(self) -> int:
        """Estimate when the fit that runs is over, from how long it took so far."""
        running = [job for job in self._jobs.values() if job.started and job.record.progress > 0]
        if not running:
            return 5
        elapsed, progress = time.monotonic() - running[0].started, running[0].record.progress
        return max(1, min(300, round(elapsed * (1 - progress) / progress)))


def _refusal(reply: object, what: str) -> tuple[str, str]:
    """Detail and problem type of a worker's refusal, once it is logged."""
    if not isinstance(reply, Refused):
        raise TypeError(f"A worker answered with {type(reply).__name__}")
    if reply.trace:
        logger.error("%s:\n%s", what, reply.trace)
    return reply.detail, reply.problem
