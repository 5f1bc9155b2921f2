"""Does what the refit loop asks for: fits its candidates in the worker and, if asked to, activates what won.

One process of those that share a registry fits; if it dies, another one takes over after 30 s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import numpy as np
from sqlalchemy import Connection, or_, select, update

from boxcal.app.fitting.messages import RefitOutcome, RefitTask
from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.fitting.server.worker_process import WorkerFailed
from boxcal.app.http.problems import BoxcalError, RegistryUnavailable, UnusableCalibrator
from boxcal.app.monitoring.fold import MonitorFold
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.monitor import Monitor, class_prior_of
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.records import UNCALIBRATED, Reason
from boxcal.app.registry.store import Registry
from boxcal.app.registry.tables import monitors, seconds_now
from boxcal.calibrators.monitoring.decisions import LoopDecision, Phase

logger = logging.getLogger("boxcal")

SILENT_SECONDS = 30.0


@dataclass(eq=False)
class RefitRunner:
    """Runs refits for the monitor, on one event loop."""

    registry: Registry
    activator: Activator
    jobs: FitJobs
    log: FeedbackLog
    monitor: Monitor
    _: KW_ONLY
    owner: str
    activate: bool

    def __post_init__(self) -> None:
        self._is_monitor = monitors.c.backbone_id == self.registry.backbone_id
        self._is_mine = self._is_monitor & (monitors.c.refit_owner == self.owner)
        self._task: asyncio.Task[None] | None = None

    async def step(self) -> None:
        """Begin what the loop waits for."""
        phase = (self.monitor.document or {}).get("phase")
        if self._task is not None and not self._task.done():
            await self.registry.run(self._keep_claim)
        elif phase == "fitting":
            if await self.registry.run(self._claim):
                self._task = asyncio.create_task(self._refit(), name="refit")
        elif phase == "proposed" and self.activate:
            proposal = await self.registry.run(self.monitor.change, lambda fold, _: fold.loop.proposal)
            if proposal is not None:
                try:
                    await self.registry.run(self.activator.activate, proposal.version, Reason.REFIT)
                except UnusableCalibrator:  # it was pruned since
                    await self.registry.run(self.monitor.forget, proposal.version)
                self.monitor.wake()

    async def close(self) -> None:
        """Stop a refit that runs; it is done again after the next start."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _refit(self) -> None:
        """Fit, record the best candidate, and tell the loop."""
        try:
            try:
                outcome = await self.jobs.refit(self._write_task)
                version = outcome.version
                if outcome.fitted is not None:
                    version = await self.registry.run(self.registry.add, outcome.fitted)
                await self._answer(lambda fold: _fitted(fold, version, outcome))
            except WorkerFailed as error:
                reason = str(error)
                logger.warning("A refit failed: %s", reason)
                await self._answer(lambda fold: fold.loop.not_fitted(reason))
        except RegistryUnavailable:
            logger.warning("The registry does not answer; the refit is done again.")
        except BoxcalError as error:
            logger.warning("A refit could not be done: %s", error)
        self.monitor.wake()

    def _write_task(self, folder: Path) -> RefitTask:
        """Write the labels that the loop asks for into a folder; blocks."""
        request, seq, versions = self.monitor.change(
            lambda fold, _: (fold.loop.request, fold.refit_seq, fold.loop.earlier_versions)
        )
        if request is None:
            raise BoxcalError("the loop waits for no fit any more")
        count = request.last - request.first
        with self.registry.database.read() as connection:
            logits, labels = self.log.labelled_until(connection, seq, request.champion, count)
        np.save(folder / "logits.npy", logits)
        np.save(folder / "labels.npy", labels)
        earlier = []
        for version in versions:
            with suppress(UnusableCalibrator):  # it was pruned since
                earlier.append((version, *self._stored(version)))
        return RefitTask(folder, *self._stored(request.champion), earlier)

    def _stored(self, version: int) -> tuple[bytes | None, list[float] | None]:
        """Return the artifact of a version, and its class prior."""
        artifact = None if version == UNCALIBRATED else self.registry.artifact(version)
        prior, _ = class_prior_of(self.registry, version)
        return artifact, None if prior is None else prior.tolist()

    def _claim(self) -> bool:
        """Take the fit that the loop waits for, unless another living process has it; blocks."""
        now = seconds_now()
        free = self._is_monitor & or_(
            monitors.c.refit_owner.is_(None),
            monitors.c.refit_owner == self.owner,
            monitors.c.refit_seen_at < now - SILENT_SECONDS,
        )
        with self.registry.database.read() as connection:
            if connection.execute(select(monitors.c.backbone_id).where(free)).first() is None:
                return False
        with self.registry.database.write() as connection:
            claim = update(monitors).where(free).values(refit_owner=self.owner, refit_seen_at=now)
            return bool(connection.execute(claim).rowcount)

    def _keep_claim(self) -> None:
        """Record that this process still fits; blocks."""
        with self.registry.database.write() as connection:
            connection.execute(update(monitors).where(self._is_mine).values(refit_seen_at=seconds_now()))

    async def _answer(self, answer: Callable[[MonitorFold], LoopDecision]) -> None:
        """Tell the loop the result of a fit, unless it waits for none any more."""

        def work(fold: MonitorFold, connection: Connection) -> None:
            release = update(monitors).where(self._is_mine).values(refit_owner=None, refit_seen_at=None)
            if connection.execute(release).rowcount and fold.loop.phase is Phase.FITTING:
                self.monitor.events.add(connection, [answer(fold)])

        await self.registry.run(self.monitor.change, work)


def _fitted(fold: MonitorFold, version: int | None, outcome: RefitOutcome) -> LoopDecision:
    return fold.loop.fitted(
        fold.loop.champion if version is None else version,
        name=outcome.name,
        nll=outcome.nll,
        champion_nll=outcome.champion_nll,
        compared=outcome.compared,
    )
