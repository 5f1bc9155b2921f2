"""The threads that run batches through the backbone: the batcher's side that is not on the event loop.

There is one thread ("lane") for each pass that the backbone can run side by side. Lanes take waiting samples
in order and leave their share to free lanes. While requests wait, a lane takes the next batch at once, and
another thread finishes the previous one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from queue import Queue
from typing import Generic, cast

import numpy as np

from boxcal.app.http.problems import BackboneFailed
from boxcal.app.predict.batch_sizer import BatchSizer
from boxcal.app.predict.device import Turns
from boxcal.app.predict.entries import (
    Context,
    Entry,
    Outcomes,
    Part,
    Pass,
    Result,
    Samples,
    Scores,
    decoded,
)

logger = logging.getLogger("boxcal")


@dataclass(eq=False)
class Lanes(Generic[Context, Result]):
    """The queue of waiting samples and the threads that empty it.

    `deliver`: called in a thread with the batch, the outcome of each part, and the seconds that `finish`
    took. `on_failure`: called in a thread that ends with an error. `failure`: the exception that ended a
    thread; None while all threads run.
    """

    forward: Callable[[Samples, bool], Scores]
    finish: Callable[[Scores, Sequence[Part[Context, Result]]], Sequence[Result | Exception]]
    _: KW_ONLY
    batch_sizer: BatchSizer
    on_thread: Callable[[], None]
    turns: Turns | None
    deliver: Callable[[Pass[Context, Result], Outcomes[Context, Result], float], object]
    on_failure: Callable[[], object]

    def __post_init__(self) -> None:
        self.failure: BaseException | None = None
        self.device_seconds = 0.0
        self._queue: deque[Entry[Context, Result]] = deque()
        if self.turns is not None:
            self.turns.has_work = lambda: bool(self._queue)
        self._waiting = 0
        self._closing = False
        self._changed = threading.Condition()
        self._passes = self.batch_sizer.passes
        self._running = 0
        # Bounded, so that `batch_sizer` learns the rate of the slower side.
        self._finishing: Queue[Pass[Context, Result] | None] = Queue(maxsize=self.batch_sizer.passes)
        self._last = 0
        self._throughput_since: float | None = None
        self._lanes = [self._thread(self._drive, f"backbone-{n}") for n in range(self.batch_sizer.passes)]
        self._finisher = self._thread(self._finish_passes, "finisher")
        for thread in (*self._lanes, self._finisher):
            thread.start()

    def put(self, entry: Entry[Context, Result]) -> None:
        """Queue the samples of one request."""
        with self._changed:
            self._queue.append(entry)
            self._waiting += len(entry.samples)
            self._changed.notify()

    def close(self) -> None:
        """Finish waiting requests, then stop the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self.failure is not None:
            return  # the other threads may wait for the one that has ended; all are daemons
        for lane in self._lanes:
            lane.join()
        self._finishing.put(None)
        self._finisher.join()

    def _thread(self, work: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=self._supervise, args=(work,), name=name, daemon=True)

    def _supervise(self, work: Callable[[], None]) -> None:
        """Run a thread, and report it if it ends with an error."""
        try:
            self.on_thread()
            work()
        except BaseException as error:
            logger.critical("a thread of the batcher has ended; the service cannot predict", exc_info=error)
            self.failure = error
            with suppress(RuntimeError):  # the event loop is closed
                self.on_failure()

    def _drive(self) -> None:
        while True:
            parts, alone = self._next()
            if not parts:
                return
            entered, more = time.perf_counter(), False
            try:
                parts, unreadable = decoded(parts)
                began = time.perf_counter()
                logits, scored, failed = self._score(parts, alone)
                seconds = time.perf_counter() - began
                more = bool(self._queue)
            finally:
                if self.turns is not None:
                    self.turns.leave(time.perf_counter() - entered, is_coming=more)
            with self._changed:
                self._running -= 1
                self.device_seconds += seconds
            size = parts[-1].stop if parts else 0
            passed = Pass(size, began, seconds, logits, scored, [*failed, *unreadable])
            if more:
                if self.turns is not None and self._finishing.full():
                    self.turns.forgo()
                self._finishing.put(passed)
            else:  # a change of threads would only delay the response
                self._finish_pass(passed)
            del parts, logits, scored, failed, unreadable, passed

    def _next(self) -> tuple[list[Part[Context, Result]], bool]:
        """Wait for samples, and return a batch of them and whether no other pass runs.

        An empty batch means that the batcher is closing.
        """
        with self._changed:
            self._note_throughput()
        while self._wait():
            alone = self.turns is None or self.turns.enter()
            with self._changed:
                share = max(1, math.ceil(self._waiting / (self._passes - self._running)))
                if parts := self._take(self.batch_sizer.size_of(share)):
                    self._last = parts[-1].stop
                    self._running += 1
                    if self._queue:
                        self._changed.notify()
                    return parts, alone and self._running == 1 and (self._passes == 1 or not self._queue)
            if self.turns is not None:  # what waited has expired, or another lane has taken it
                self.turns.leave(0.0)
        return [], False

    def _wait(self) -> bool:
        """Wait for samples, a while longer if more are about to come; returns False once none will."""
        with self._changed:
            asleep = time.perf_counter()
            while not self._queue and not self._closing:
                self._throughput_since = None
                self._changed.wait()
            if self._queue and self._passes == 1:
                self._gather(time.perf_counter() - asleep)
            return bool(self._queue)

    def _note_throughput(self) -> None:
        """Measure the rate of the whole service while samples are always waiting."""
        now = time.perf_counter()
        if self._last and self._throughput_since is not None:
            self.batch_sizer.observe_throughput(
                self._last, now - self._throughput_since, compare=self.turns is None
            )
        self._throughput_since = now if self._queue else None

    def _gather(self, idle: float) -> None:
        until = time.perf_counter() + self.batch_sizer.gather_seconds(self._waiting, self._last, idle)
        while self._waiting < min(self._last, self.batch_sizer.batch_size) and not self._closing:
            left = until - time.perf_counter()
            if left <= 0:
                return
            self._changed.wait(left)

    def _take(self, size: int) -> list[Part[Context, Result]]:
        parts: list[Part[Context, Result]] = []
        filled = 0
        again: list[Entry[Context, Result]] = []
        while self._queue and filled < size:
            entry = self._queue.popleft()
            left = len(entry.samples) - entry.taken
            if entry.future.done() or time.monotonic() >= entry.deadline:
                self._waiting -= left
                continue
            count = min(left, size - filled)
            parts.append(Part(entry, entry.taken, filled, filled + count))
            entry.taken += count
            filled += count
            self._waiting -= count
            if count < left:
                again.append(entry)
        # The rest of a large request goes to the end of the queue: others need not wait for all of it.
        self._queue.extend(again)
        return parts

    def _score(
        self, parts: list[Part[Context, Result]], alone: bool
    ) -> tuple[Scores, list[Part[Context, Result]], list[tuple[Part[Context, Result], Exception]]]:
        """Run the backbone; parts whose samples it fails on fail without the others."""
        if not parts:
            return np.zeros((0, 0), np.float32), [], []
        pieces = [cast("Samples", p.entry.samples)[p.offset : p.offset + p.stop - p.start] for p in parts]
        runs = self._runs(pieces[0] if len(pieces) == 1 else np.concatenate(pieces), alone)
        if len(runs) == 1 and isinstance(runs[0], np.ndarray):
            return runs[0], parts, []
        scored: list[Part[Context, Result]] = []
        failed: list[tuple[Part[Context, Result], Exception]] = []
        logits: list[Scores] = []
        rows: list[Scores | Exception] = []
        for run in runs:
            rows.extend(run if isinstance(run, np.ndarray) else [run])
        for part in parts:
            outcomes = rows[part.start : part.stop]
            error = next((row for row in outcomes if isinstance(row, Exception)), None)
            if error is not None:
                failed.append((part, error))
                continue
            scored.append(replace(part, start=len(logits), stop=len(logits) + len(outcomes)))
            logits.extend(row for row in outcomes if isinstance(row, np.ndarray))
        # Runs differ in width if a request for features came between them; nobody reads the padding.
        rows_left = np.zeros((len(logits), max(map(len, logits), default=0)), np.float32)
        for target, row in zip(rows_left, logits, strict=True):
            target[: len(row)] = row
        return rows_left, scored, failed

    def _runs(self, samples: Samples, alone: bool) -> list[Scores | Exception]:
        """Score samples; a batch that fails is split in halves until the samples that fail are found."""
        began = time.perf_counter()
        try:
            logits = self.forward(samples, alone)
        except Exception as error:
            if _is_out_of_memory(error):
                with self._changed:
                    self.batch_sizer.ran_out_of_memory(len(samples))
                logger.warning("out of memory with a batch of %d samples", len(samples))
            elif _is_permanent(error):
                raise
            if len(samples) == 1:
                logger.exception("the backbone failed on a sample")
                return [BackboneFailed("The backbone failed on this input; see the server log.")]
        else:
            if self._passes == 1 or not alone:  # a pass that has every core measures something else
                with self._changed:
                    self.batch_sizer.measured(len(samples), time.perf_counter() - began)
            return [logits]
        half = len(samples) // 2
        return [*self._runs(samples[:half], alone), *self._runs(samples[half:], alone)]

    def _finish_passes(self) -> None:
        while (passed := self._finishing.get()) is not None:
            self._finish_pass(passed)
            del passed  # otherwise the batch stays in memory while the thread waits

    def _finish_pass(self, passed: Pass[Context, Result]) -> None:
        began = time.perf_counter()
        results: Sequence[Result | Exception] = []
        try:
            results = self.finish(passed.logits, passed.scored) if passed.scored else []
        except Exception as error:
            if _is_permanent(error):
                raise
            logger.exception("a batch of %d samples could not be finished", passed.size)
            results = [error] * len(passed.scored)
        outcomes = [*zip(passed.scored, results, strict=True), *passed.failed]
        seconds = time.perf_counter() - began
        with suppress(RuntimeError):  # the event loop is closed
            self.deliver(passed, outcomes, seconds)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a device has no memory left; torch has an exception for it, onnxruntime only a message."""
    return type(error).__name__ == "OutOfMemoryError" or "Failed to allocate memory" in str(error)


def _is_permanent(error: Exception) -> bool:
    """Whether the device fails every pass from now on: a CUDA context does not recover from its errors."""
    return "CUDA error" in str(error)
