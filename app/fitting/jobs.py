"""The queue of fits: one runs, a few wait, everyone may watch; between the checked upload and the activation.

It lives on the event loop and computes nothing: the fit runs in a worker process, the registry in threads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from boxcal.app.activation.activator import Activator
from boxcal.app.activation.gate import decide
from boxcal.app.errors import NotReady
from boxcal.app.fitting.errors import FitAlreadyOver, FitElsewhere, FitQueueFull
from boxcal.app.fitting.image_sets import BackboneSource, ImageSet
from boxcal.app.fitting.messages import FitTask
from boxcal.app.fitting.validation_set import ValidationSet
from boxcal.app.fitting.worker import FitFailed, Worker
from boxcal.app.registry.fits import INTERRUPTED
from boxcal.app.registry.records import ActivatePolicy, Decision, FitRecord, FitState
from boxcal.app.registry.store import UNCALIBRATED, Registry
from boxcal.app.uploads.workspace import Workspace

if TYPE_CHECKING:
    from boxcal.app.telemetry import Telemetry

logger = logging.getLogger("boxcal")

MAX_WAITING = 8
RECORD_SECONDS = 1.0
WORKER_IDLE_SECONDS = 60.0
CANCELLED = "Cancelled on request."
SERVICE_FAILED = "The service failed while it ran the fit or kept its result; the log has the reason."


@dataclass(eq=False)
class Job:
    """A fit that is not over, and those who watch it.

    Attributes
    ----------
    taken
        Whether someone has taken it from the queue, and so is the one to end it.
    working
        Whether the worker has it.
    ending
        As what it shall end, and why, once someone asked it to.
    """

    record: FitRecord
    data: ValidationSet | ImageSet
    taken: bool = False
    working: bool = False
    ending: tuple[FitState, str] | None = None
    started: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def update(self, record: FitRecord) -> None:
        """Show a new state to everyone who watches."""
        self.record = record
        watched, self.changed = self.changed, asyncio.Event()
        watched.set()


class FitJobs:
    """Takes checked validation sets, and sees every one of them to its end.

    Parameters
    ----------
    registry, activator
        Where results go.
    workspace
        Where validation sets lie while they wait.
    telemetry
        Is told of every fit that ends.
    source
        The backbone, for fits on images.
    max_waiting
        How many may wait beside the one that runs.
    """

    def __init__(
        self,
        registry: Registry,
        activator: Activator,
        workspace: Workspace,
        telemetry: Telemetry,
        source: BackboneSource,
        *,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._registry = registry
        self._activator = activator
        self._workspace = workspace
        self._telemetry = telemetry
        self._source = source
        self._max_waiting = max_waiting
        self._worker = Worker()
        self._arriving = 0
        self._jobs: dict[str, Job] = {}
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._runner: asyncio.Task[None] | None = None
        self._closing = False

    async def start(self) -> None:
        """Begin to take fits from the queue."""
        self._runner = asyncio.create_task(self._run(), name="fits")

    async def close(self) -> None:
        """Stop the fit that runs and forget those that wait; all are recorded as interrupted.

        Whoever watches them is told. Nothing happens the second time.
        """
        self._closing = True
        for job in list(self._jobs.values()):
            await self._stop(job, FitState.INTERRUPTED, INTERRUPTED)
        while self._jobs:
            await next(iter(self._jobs.values())).changed.wait()
        if self._runner is not None:
            self._runner.cancel()
            with suppress(asyncio.CancelledError):
                await self._runner
            self._runner = None
        await asyncio.to_thread(self._worker.close)

    @asynccontextmanager
    async def reserve_slot(self) -> AsyncIterator[Path]:
        """Hold a place in the queue, and a folder, while an upload arrives; the folder goes unless submitted.

        Raises
        ------
        FitQueueFull
            As many fits are running, waiting and arriving as may.
        NotReady
            The service is going down.
        """
        if self._closing:
            raise NotReady("The service is going down and takes no more fits.")
        if len(self._jobs) + self._arriving > self._max_waiting:
            raise FitQueueFull(
                f"{len(self._jobs)} fits are running or waiting and {self._arriving} uploads are arriving; "
                f"at most {self._max_waiting} may wait.",
                retry_after=self._seconds_to_a_slot(),
            )
        self._arriving += 1
        fit_id = secrets.token_hex(8)
        folder = self._workspace.new_folder(fit_id)
        try:
            yield folder
        finally:
            self._arriving -= 1
            if fit_id not in self._jobs:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def submit(
        self, data: ValidationSet | ImageSet, method: str, activate: ActivatePolicy
    ) -> FitRecord:
        """Queue a fit on a validation set whose folder came from `reserve_slot`."""
        fit_id = data.folder.name
        record = await asyncio.to_thread(self._registry.fits.add, fit_id, method, activate, data.samples)
        job = self._jobs[fit_id] = Job(record, data)
        if self._closing:
            await self._stop(job, FitState.INTERRUPTED, INTERRUPTED)
        else:
            self._queue.put_nowait(job)
        return job.record

    async def get(self, fit_id: str) -> FitRecord:
        """Say how a fit stands.

        Raises
        ------
        FitNotFound
            No fit has the id.
        """
        job = self._jobs.get(fit_id)
        return job.record if job else await asyncio.to_thread(self._registry.fits.get, fit_id)

    async def list(self, limit: int) -> list[FitRecord]:
        """Say how the newest fits stand, newest first."""
        records = await asyncio.to_thread(self._registry.fits.list, limit)
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
        """Watch a fit that is over, or that another process writes down the progress of."""
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
        """
        job = self._jobs.get(fit_id)
        if job is not None:
            await self._stop(job, FitState.CANCELLED, CANCELLED)
            async for record in self.watch(fit_id):
                if record.state.is_final:
                    break
        record = await self.get(fit_id)
        if not record.state.is_final:
            raise FitElsewhere(f"Fit {fit_id} runs in another replica; cancel it there.")
        if record.state is not FitState.CANCELLED:
            raise FitAlreadyOver(f"Fit {fit_id} is over: it has {record.state}.")
        return record

    async def _stop(self, job: Job, state: FitState, why: str) -> None:
        """Ask a job to end; the first who asks says as what."""
        if job.ending is None:
            job.ending = (state, why)
        if job.working:
            await asyncio.to_thread(self._worker.stop)
        elif not job.taken:
            job.taken = True
            await self._end(job, *job.ending)

    async def _run(self) -> None:
        while True:
            job = await self._next()
            if job.taken:
                continue
            job.taken = True
            try:
                await self._perform(job)
            except FitFailed as error:
                await self._end(job, *(job.ending or (FitState.FAILED, str(error))))
            except Exception:
                logger.exception("Fit %s failed in the service", job.record.id)
                await self._end(job, FitState.FAILED, SERVICE_FAILED)

    async def _next(self) -> Job:
        """Wait for a fit; where none comes for a while, the worker goes until one does."""
        try:
            async with asyncio.timeout(WORKER_IDLE_SECONDS):
                return await self._queue.get()
        except TimeoutError:
            await asyncio.to_thread(self._worker.close)
            return await self._queue.get()

    async def _perform(self, job: Job) -> None:
        """See one fit through: start, progress, commit and swap."""
        fits, fit_id = self._registry.fits, job.record.id
        job.started = time.monotonic()
        job.update(await asyncio.to_thread(fits.start, fit_id))
        compared_with = self._activator.active.current.version
        against = known = None
        if compared_with != UNCALIBRATED:
            against = await asyncio.to_thread(self._registry.artifact, compared_with)
            known = (await asyncio.to_thread(self._registry.report, compared_with)).get("sketch")
        loop = asyncio.get_running_loop()

        def advanced(progress: float, stage: str) -> None:
            loop.call_soon_threadsafe(lambda: job.update(replace(job.record, progress=progress, stage=stage)))

        if job.ending is not None:
            raise FitFailed("stopped before it started")
        task = FitTask(job.data, self._source, job.record.method, against, known)
        recorder = asyncio.create_task(self._record_progress(job))
        job.working = True
        try:
            outcome = await asyncio.to_thread(self._worker.run, task, advanced)
        finally:
            job.working = False
            recorder.cancel()
        if job.ending is not None:
            raise FitFailed("stopped after its last step")

        def decision(active_version: int) -> Decision:
            return decide(
                job.record.activate,
                is_better=outcome.is_better,
                reason=outcome.fitted.report["against"]["reason"],
                warnings=outcome.fitted.report["warnings"],
                compared_with=compared_with,
                active_version=active_version,
            )

        await asyncio.to_thread(self._activator.accept, fit_id, outcome.fitted, decision)
        await self._finish(job, await asyncio.to_thread(fits.get, fit_id))

    async def _record_progress(self, job: Job) -> None:
        """Write progress down now and then, which also tells other replicas that the fit is alive."""
        while True:
            await asyncio.sleep(RECORD_SECONDS)
            record = job.record
            try:
                await asyncio.to_thread(self._registry.fits.advance, record.id, record.progress, record.stage)
            except SQLAlchemyError:
                logger.exception("The progress of fit %s could not be written down", record.id)

    async def _end(self, job: Job, state: FitState, why: str) -> None:
        try:
            record = await asyncio.to_thread(self._registry.fits.end, job.record.id, state, why)
        except SQLAlchemyError:
            logger.exception("The end of fit %s could not be written down", job.record.id)
            record = replace(job.record, state=state, error=why)
        await self._finish(job, record)

    async def _finish(self, job: Job, record: FitRecord) -> None:
        await asyncio.to_thread(shutil.rmtree, job.data.folder, ignore_errors=True)
        del self._jobs[record.id]
        job.update(record)
        seconds = time.monotonic() - job.started
        self._telemetry.fit_ended(record.state.value, record.method, seconds)

    def _seconds_to_a_slot(self) -> int:
        """Estimate when the fit that runs is over, from how long it took so far."""
        running = [job for job in self._jobs.values() if job.started and job.record.progress > 0]
        if not running:
            return 5
        elapsed, progress = time.monotonic() - running[0].started, running[0].record.progress
        return max(1, min(300, round(elapsed * (1 - progress) / progress)))
