"""Does what the refit loop asks for: fits its candidates in the worker and, if asked to, activates what won.

One process of those that share a registry fits; if it dies, another one takes over after 30 s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sqlalchemy import Connection, or_, select, update

from boxcal.app.fitting.messages import RefitOutcome, RefitTask
from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.fitting.server.worker_process import WorkerFailed
from boxcal.app.http.problems import BoxcalError, RegistryUnavailable
from boxcal.app.monitoring.active_version import class_prior, report_of
from boxcal.app.monitoring.fold import MonitorFold
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.monitor import Monitor
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.records import UNCALIBRATED, Reason
from boxcal.app.registry.store import Registry
from boxcal.app.registry.tables import monitors
from boxcal.calibrators.monitoring.decisions import Decision, Phase
from boxcal.calibrators.monitoring.stored_logits import unpack

logger = logging.getLogger("boxcal")

SILENT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class _Request:
    """A fit that the loop waits for, and that this process has claimed."""

    champion: int
    labels: int
    seq: int
    earlier: tuple[int, ...]


class Refits:
    """Runs refits for the monitor, on one event loop.

    Parameters
    ----------
    registry, activator, jobs, log, monitor
        Where calibrators, workers, labels and the loop are.
    owner
        Names this process.
    activate
        Whether to activate what the loop proposes.
    """

    def __init__(
        self,
        registry: Registry,
        activator: Activator,
        jobs: FitJobs,
        log: FeedbackLog,
        monitor: Monitor,
        *,
        owner: str,
        activate: bool,
    ) -> None:
        self._registry = registry
        self._activator = activator
        self._jobs = jobs
        self._log = log
        self._monitor = monitor
        self._owner = owner
        self._activate = activate
        self._own = monitors.c.backbone_id == registry.backbone_id
        self._task: asyncio.Task[None] | None = None

    async def step(self) -> None:
        """Look at what the loop waits for, and begin it."""
        phase = (self._monitor.document or {}).get("phase")
        if self._task is not None and not self._task.done():
            await self._registry.run(self._stay)
        elif phase == "fitting":
            request = await self._registry.run(self._claim)
            if request is not None:
                self._task = asyncio.create_task(self._refit(request), name="refit")
        elif phase == "proposed" and self._activate:
            version = await self._registry.run(self._proposed)
            if version is not None:
                await self._registry.run(self._activator.activate, version, Reason.REFIT)
                self._monitor.wake()

    async def close(self) -> None:
        """Stop a refit that runs; it is done again after the next start."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _refit(self, request: _Request) -> None:
        """Fit, record the best candidate, and tell the loop."""
        try:
            try:
                outcome = await self._jobs.refit(lambda folder: self._task_in(folder, request))
                version = outcome.version if outcome.version is not None else request.champion
                if outcome.fitted is not None:
                    version = await self._registry.run(self._registry.add, outcome.fitted)
                await self._tell(lambda fold: _fitted(fold, version, outcome))
            except WorkerFailed as error:
                reason = str(error)
                logger.warning("A refit failed: %s", reason)
                await self._tell(lambda fold: fold.loop.not_fitted(reason))
        except RegistryUnavailable:
            logger.warning("The registry does not answer; the refit is done again.")
        except BoxcalError as error:
            logger.warning("A refit could not be done: %s", error)
        self._monitor.wake()

    def _task_in(self, folder: Path, request: _Request) -> RefitTask:
        """Write the labels into a folder; blocks."""
        with self._registry.database.read() as connection:
            rows = self._log.labelled_until(connection, request.seq, request.champion, request.labels)
        logits = np.frombuffer(b"".join(bytes(row.logits) for row in rows), np.int16)
        np.save(folder / "logits.npy", unpack(logits.reshape(len(rows), -1)))
        np.save(folder / "labels.npy", np.array([row.latest_label for row in rows], np.int64))
        return RefitTask(
            folder,
            self._artifact(request.champion),
            self._prior(request.champion),
            [(one, self._artifact(one), self._prior(one)) for one in request.earlier],
        )

    def _artifact(self, version: int) -> bytes | None:
        return None if version == UNCALIBRATED else self._registry.artifact(version)

    def _prior(self, version: int) -> list[float] | None:
        found = class_prior(report_of(self._registry, version))
        return None if found is None else found.tolist()

    def _claim(self) -> _Request | None:
        """Take the fit that the loop waits for, unless another living process has it; blocks."""
        now = time.time()
        free = or_(
            monitors.c.refit_owner.is_(None),
            monitors.c.refit_owner == self._owner,
            monitors.c.refit_seen_at < now - SILENT_SECONDS,
        )
        with self._registry.database.read() as connection:
            # `change` writes the whole state, which the process that fits would then read again.
            if connection.execute(select(monitors.c.backbone_id).where(self._own, free)).first() is None:
                return None

        def work(fold: MonitorFold, connection: Connection) -> _Request | None:
            request = fold.loop.request
            if request is None:
                return None
            claim = update(monitors).where(self._own, free)
            claimed = connection.execute(claim.values(refit_owner=self._owner, refit_seen_at=now)).rowcount
            labels, earlier = request.last - request.first, tuple(fold.loop.earlier_versions)
            return _Request(request.champion, labels, fold.refit_seq, earlier) if claimed else None

        found: _Request | None = self._monitor.change(work)
        return found

    def _stay(self) -> None:
        """Record that this process still fits; blocks."""
        with self._registry.database.write() as connection:
            own = update(monitors).where(self._own, monitors.c.refit_owner == self._owner)
            connection.execute(own.values(refit_seen_at=time.time()))

    async def _tell(self, answer: Callable[[MonitorFold], Decision]) -> None:
        """Tell the loop the result of a fit, unless it waits for none any more."""

        def work(fold: MonitorFold, connection: Connection) -> None:
            own = update(monitors).where(self._own, monitors.c.refit_owner == self._owner)
            released = connection.execute(own.values(refit_owner=None, refit_seen_at=None)).rowcount
            if released and fold.loop.phase is Phase.FITTING:
                self._monitor.events.add(connection, [answer(fold)])

        await self._registry.run(self._monitor.change, work)

    def _proposed(self) -> int | None:
        """Return the version that the loop proposes while the active one is still its champion; blocks."""

        def work(fold: MonitorFold, _connection: Connection) -> int | None:
            proposal = fold.loop.proposal
            return None if proposal is None else proposal.version

        found: int | None = self._monitor.change(work)
        return found


def _fitted(fold: MonitorFold, version: int, outcome: RefitOutcome) -> Decision:
    return fold.loop.fitted(
        version,
        name=outcome.name,
        nll=outcome.nll,
        champion_nll=outcome.champion_nll,
        compared=outcome.compared,
    )
