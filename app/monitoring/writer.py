"""Collects predictions and labels on the event loop and stores them together, in a thread of the registry.

A prediction waits for nothing. A request with labels waits for the transaction that stores them. Labels whose
prediction is on its way, perhaps through another replica, are tried again for 5 s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from boxcal.app.http.problems import BoxcalError, QueueFull, RegistryUnavailable
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.records import BLOCK_ROWS, ID, Label, Outcome, PredictionBlock, time_of
from boxcal.app.registry.store import Registry
from boxcal.calibrators.monitoring.stored_logits import HEADER

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry

logger = logging.getLogger("boxcal")

GATHER_SECONDS = 0.02
"""How long labels are collected before a transaction begins."""
KEEP_SECONDS = 1.0
"""How long predictions are collected where no label waits."""
KEEP_BYTES = 16 * 2**20
"""Logits that are stored earlier."""
BLOCK_SECONDS = 2.0
"""How long a block takes predictions while the database does not."""
BLOCK_BYTES = 2**18
"""Of logits: a label reads the whole block of its prediction."""
BLOCKS = 16
"""Blocks of equal size that what is kept would fill: whole ones are deleted."""
BYTES = 2
"""Of a stored number."""
LABELS_PER_TRANSACTION = 2000
MAX_PENDING = 200_000
MAX_PENDING_BYTES = 64 * 2**20
WAIT_SECONDS = 5.0
CLOCKS_SECONDS = 600.0
"""How old an id may seem that is waited for: the clock of the replica that gave it may be behind."""
RETRY_SECONDS = 0.25
PAUSE_SECONDS = 1.0
QUICK_PROBLEMS = 1000
"""Looked through on the event loop; more in a thread."""


@dataclass(frozen=True, slots=True, eq=False)
class _PendingLabels:
    """Labels, and the future of those who wait until they are stored."""

    labels: Sequence[Label]
    stored: asyncio.Future[Outcome]


class FeedbackWriter:
    """Stores predictions and labels; all methods belong to one event loop.

    `on_labels`: called after every transaction that stored labels.
    """

    def __init__(
        self,
        registry: Registry,
        log: FeedbackLog,
        telemetry: Telemetry,
        on_labels: Callable[[], None],
        *,
        num_classes: int,
    ) -> None:
        self._registry = registry
        self._log = log
        self._telemetry = telemetry
        self._on_labels = on_labels
        self._blocks: list[PredictionBlock] = []
        self._open: PredictionBlock | None = None
        self._forgotten = 0
        self._num_classes = num_classes
        self._row_bytes = BYTES * (HEADER + num_classes)
        self._block_rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // self._row_bytes, log.max_rows // BLOCKS))
        self._requests: list[_PendingLabels] = []
        self._pending = 0
        self.attempts = 0
        self._uncertain = False
        self._wake = asyncio.Event()
        self._soon = asyncio.Event()

    def keep(self, version: int, logits: NDArray[np.float64]) -> list[str]:
        """Give ids to predictions, and keep their logits (N, K) until labels arrive."""
        now, most = time.time(), self._block_rows
        if len(logits) <= most:
            return self._block(len(logits), now).add(version, logits, now)
        parts = [logits[start : start + most] for start in range(0, len(logits), most)]
        return [key for part in parts for key in self._block(len(part), now).add(version, part, now)]

    def _block(self, count: int, now: float) -> PredictionBlock:
        """Return a block with room for some predictions."""
        block = self._open
        if block is not None and block.rows + count <= self._block_rows and now < block.began + BLOCK_SECONDS:
            return block
        rows = sum(block.rows for block in self._blocks)
        while self._blocks and rows - self._blocks[0].rows >= self._log.max_rows:
            oldest = self._blocks.pop(0).rows
            self._forgotten, rows = self._forgotten + oldest, rows - oldest
        if rows * self._row_bytes > MAX_PENDING_BYTES:
            self._telemetry.feedback("dropped", count)
            return PredictionBlock(self._num_classes, count)
        if rows * self._row_bytes > KEEP_BYTES:
            self._soon.set()
        self._wake.set()
        block = self._open = PredictionBlock(self._num_classes, self._block_rows)
        self._blocks.append(block)
        return block

    async def label(self, labels: Sequence[Label]) -> Outcome:
        """Store labels; those of predictions made within the last seconds are tried again for a while."""
        total = Outcome()
        for start in range(0, max(1, len(labels)), LABELS_PER_TRANSACTION):
            part = labels[start : start + LABELS_PER_TRANSACTION]
            _add(total, await self._store(part))
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline and (again := await _may_come(total, labels)):
            await asyncio.sleep(RETRY_SECONDS)
            indices = {label.index for label in again}
            total.problems = [problem for problem in total.problems if problem.index not in indices]
            _add(total, await self._store(again))
        total.problems.sort(key=lambda problem: problem.index)
        return total

    async def run(self) -> None:
        """Store what was collected, again and again, until cancelled."""
        while True:
            await self._wake.wait()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), KEEP_SECONDS)
            await asyncio.sleep(GATHER_SECONDS)
            if not await self.store():
                await asyncio.sleep(PAUSE_SECONDS)

    async def store(self) -> bool:
        """Store what was collected; returns whether the database took it."""
        self._wake.clear()
        self._soon.clear()
        blocks, requests, forgotten = self._blocks, self._requests, self._forgotten
        self._blocks, self._open, self._requests, self._forgotten = [], None, [], 0
        if not blocks and not requests:
            return True
        self.attempts += 1
        self._pending -= sum(len(request.labels) for request in requests)
        try:
            outcomes = await self._registry.run(
                self._log.write,
                blocks,
                [request.labels for request in requests],
                may_be_stored=self._uncertain,
                forgotten=forgotten,
            )
        except (Exception, asyncio.CancelledError) as error:
            if not isinstance(error, (BoxcalError, asyncio.CancelledError)) and not self._uncertain:
                logger.exception("Feedback could not be stored; this is tried again.")
            self._blocks = blocks + self._blocks
            self._forgotten += forgotten
            self._uncertain = True  # the connection may have failed after the commit
            self._wake.set()
            refusal = (
                error
                if isinstance(error, BoxcalError)
                else RegistryUnavailable("The feedback was not stored.")
            )
            for request in requests:
                if not request.stored.done():
                    request.stored.set_exception(refusal)
            if isinstance(error, asyncio.CancelledError):
                raise
            return False
        self._uncertain = False
        for request, outcome in zip(requests, outcomes, strict=True):
            if not request.stored.done():
                request.stored.set_result(outcome)
        self._telemetry.feedback("predictions", forgotten + sum(block.rows for block in blocks))
        if requests:
            self._on_labels()
        return True

    async def _store(self, labels: Sequence[Label]) -> Outcome:
        if self._pending + len(labels) > MAX_PENDING:
            raise QueueFull(f"{self._pending:,} labels wait to be stored; the limit is {MAX_PENDING:,}.")
        request = _PendingLabels(labels, asyncio.get_running_loop().create_future())
        self._pending += len(labels)
        self._requests.append(request)
        self._wake.set()
        self._soon.set()
        return await request.stored


def _add(total: Outcome, part: Outcome) -> None:
    total.seq = max(total.seq, part.seq)
    total.accepted += part.accepted
    total.duplicates += part.duplicates
    total.conflicts += part.conflicts
    total.problems += part.problems


async def _may_come(total: Outcome, labels: Sequence[Label]) -> list[Label]:
    """Return the labels whose prediction is unknown and so young that it may still be stored."""
    if len(total.problems) <= QUICK_PROBLEMS:
        return _young(total, labels)
    return await asyncio.to_thread(_young, total, labels)


def _young(total: Outcome, labels: Sequence[Label]) -> list[Label]:
    unknown = {problem.index for problem in total.problems if problem.reason == "unknown"}
    if not unknown:
        return []
    since = time.time() - CLOCKS_SECONDS
    return [
        one for one in labels if one.index in unknown and ID.fullmatch(one.id) and time_of(one.id) > since
    ]
