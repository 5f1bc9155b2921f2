"""Batches: how large they are, and the threads ("lanes") that run them through the backbone.

There is one lane for each pass that the backbone can run side by side. Lanes take waiting samples in order
and leave their share to free lanes. While requests wait, a lane takes the next batch at once, and another
thread finishes the previous one. The measured durations of batches decide how large the next ones are, and
how long a lane waits for more samples.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from queue import Queue
from typing import Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from boxcal.app.http.problems import BackboneFailed
from boxcal.app.predict.device import Turns

SMOOTHING = 0.2
"""Weight of the newest measurement in every running mean."""
FIXED_SHARE = 0.05
"""A batch is large enough if its fixed cost is at most this share of the whole."""
LARGEST_STEP = 2.0
"""One measurement counts at most this many times the mean: one stall says nothing about the next batch."""
HALF_LIFE_SECONDS = 5.0
"""Without new measurements, what throughput lies below the passes' own is forgotten by half in this time."""

TRIALS = 50
"""Batches of one size, with more samples waiting, by which it is compared with half of it.

Their durations differ by half: the event loop takes the core whenever requests arrive.
"""
LARGEST_STALL = 5.0
"""One of them counts at most this many times their mean."""
WORTHWHILE = 0.97
"""A size is kept if the service takes at most this share of the time per sample that half of it takes."""
REPEAT_SECONDS = 30.0
"""After this time, a size that was not worthwhile is tried again."""


def of_few_sizes(size: int) -> int:
    """Round down to 1, 2, 3, 4, 6, 8, 12, 16, 24, and so on.

    On a processor, torch's oneDNN compiles and keeps code for every size it meets: with a small MobileNetV3
    and every size up to 48 that is more than a gigabyte, with these sizes a twentieth of it.
    """
    power = 1 << (size.bit_length() - 1)
    return power + power // 2 if size >= power + power // 2 else power


class BatchSizer:
    """Estimates that a batch of n samples takes a + b·n seconds, and chooses sizes by it.

    A larger batch spreads the fixed cost `a` over more samples, but every sample waits for the whole batch.
    So a batch is so large that `a` is a small share of its cost, if that meets the target.

    Caches and changes of thread cost more or less with the size, which `a` does not show. So where passes run
    one at a time, a size is doubled once samples always wait, and kept if the whole service takes less.

    Passes side by side share the processor with other threads, and their waits for the interpreter are not
    part of the measured `a`. So their batches are as large as the target allows.

    `clock`: seconds, never decreasing.
    """

    def __init__(
        self,
        max_batch_size: int,
        target_seconds: float,
        passes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = max_batch_size
        self._target = target_seconds
        self.passes = passes
        self._costs: dict[int, tuple[float, float]] = {}
        self._clock = clock
        self._interval: float | None = None
        self._observed = 0.0
        self._tried: dict[int, tuple[int, float, float]] = {}
        self.fixed = 0.0
        self.per_sample = 0.0
        self.batch_size = min(2, max_batch_size)

    def measured(self, samples: int, seconds: float) -> None:
        """Record the duration of one batch."""
        bucket = samples.bit_length()
        n, cost = self._costs.get(bucket, (float(samples), seconds))
        seconds = min(seconds, LARGEST_STEP * cost)
        self._costs[bucket] = (n + SMOOTHING * (samples - n), cost + SMOOTHING * (seconds - cost))
        self._fit()

    def observe_throughput(self, samples: int, seconds: float, *, compare: bool = True) -> None:
        """Record how long the whole service took for a batch while others were waiting."""
        known = self._seconds_per_sample()
        interval = seconds / samples
        if known > 0:
            interval = min(interval, LARGEST_STEP * known)
            interval = known + SMOOTHING * (interval - known)
        now = self._clock()
        self._interval, self._observed = interval, now
        # Nothing is compared before a pass was measured: all samples so far may have been unreadable.
        if not compare or self.passes > 1 or samples != self.batch_size or not self._costs:
            return
        count, mean, when = self._tried.get(samples, (0, 0.0, now))
        if not count or now - when >= REPEAT_SECONDS:
            count, mean = 0, seconds / samples
        count += 1
        interval = min(seconds / samples, LARGEST_STALL * mean)
        mean += (interval - mean) / min(count, TRIALS)
        self._tried[samples] = count, mean, now
        self.batch_size = self._best_size()

    def _seconds_per_sample(self) -> float:
        """Return the smoothed interval between samples; it decays to what the passes alone would take."""
        passes_alone = (self.fixed / self.batch_size + self.per_sample) / self.passes
        if self._interval is None:
            return passes_alone
        remaining = math.exp2((self._observed - self._clock()) / HALF_LIFE_SECONDS)
        return passes_alone + remaining * max(self._interval - passes_alone, 0.0)

    def ran_out_of_memory(self, samples: int) -> None:
        """Limit all later batches to half as many samples."""
        self._limit = max(1, min(self._limit, samples // 2))
        self.batch_size = min(self.batch_size, self._limit)

    def wait_for(self, samples: int) -> float:
        """Estimate the seconds that so many samples take; 0 before anything was measured."""
        return samples * self._seconds_per_sample()

    def size_of(self, share: int) -> int:
        """Return the size of the next batch, given its share of the waiting samples."""
        size = min(self.batch_size, share)
        return size if self.passes == 1 else of_few_sizes(size)

    def gather_seconds(self, queued: int, last: int, idle: float) -> float:
        """Return how long to wait for a fuller batch once `queued` samples are there.

        0 if the device was idle: a wait would only delay the response. If it is busy, the clients of the last
        batch are about to send their next requests, and a batch without them costs `a` once more. So at most
        `a` seconds are worth waiting.
        """
        if queued >= min(last, self.batch_size) or idle > self.fixed:
            return 0.0
        return min(self.fixed, self._target / 2)

    def _fit(self) -> None:
        """Fit cost to size by least squares, weighted by relative error, and choose the batch size."""
        sizes = [(n, cost, 1 / cost**2) for n, cost in self._costs.values() if cost > 0]
        if len(sizes) < 2:
            n, cost, _ = sizes[0] if sizes else (1.0, 0.0, 0.0)
            self.fixed, self.per_sample = 0.0, cost / n
        else:
            total = math.fsum(w for _, _, w in sizes)
            mean_n = math.fsum(w * n for n, _, w in sizes) / total
            mean_cost = math.fsum(w * c for _, c, w in sizes) / total
            spread = math.fsum(w * (n - mean_n) ** 2 for n, _, w in sizes)
            slope = math.fsum(w * (n - mean_n) * (c - mean_cost) for n, c, w in sizes) / spread
            self.per_sample = min(max(slope, 0.0), mean_cost / mean_n)
            self.fixed = mean_cost - self.per_sample * mean_n
        self.batch_size = self._best_size()

    def _best_size(self) -> int:
        # Nothing is known about sizes far above those measured, so the size doubles at most.
        known = 2 * max(int(n) for n, _ in self._costs.values())
        enough = self._limit
        if self.passes == 1 and len(self._costs) > 1 and self.per_sample > 0:
            enough = math.ceil(self.fixed * (1 - FIXED_SHARE) / (FIXED_SHARE * self.per_sample))
        in_time = self._limit
        if self.per_sample > 0:
            in_time = math.floor((self._target - self.fixed) / self.per_sample)
        largest = max(1, min(in_time, self._limit))
        size = max(1, min(known, enough, largest))
        while 2 * size <= largest and self._is_known(size):
            if self._is_known(2 * size) and self._tried[2 * size][1] > WORTHWHILE * self._tried[size][1]:
                break
            size *= 2
        return size

    def _is_known(self, size: int) -> bool:
        """Whether a size was tried often enough, and not too long ago if it is above the present one."""
        count, _, when = self._tried.get(size, (0, 0.0, 0.0))
        return count >= TRIALS and (size <= self.batch_size or self._clock() - when < REPEAT_SECONDS)


Context = TypeVar("Context")
Result = TypeVar("Result")
Samples = NDArray[np.float32]
Scores = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PendingImage:
    """One sample that a lane decodes just before its pass: a change of thread less."""

    decode: Callable[[], Samples]  # Returns it as (1, *shape), or raises what is wrong with it

    def __len__(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Finished(Generic[Result]):
    """The results of one request, one for each batch that held some of its samples, in their order."""

    results: list[Result]
    decode: float  # Seconds of decoding in a lane, of waiting, in the backbone, and in what follows it
    queue: float
    forward: float
    finish: float


@dataclass(eq=False, slots=True)
class Entry(Generic[Context, Result]):
    """The samples of one request, waiting or in progress.

    The future is done if the request has failed, expired or been cancelled; its samples are then skipped.
    """

    samples: Samples | PendingImage
    context: Context
    deadline: float
    future: asyncio.Future[Finished[Result]]
    entered: float
    taken: int = 0
    parts: list[tuple[int, int, Result]] = field(default_factory=list)
    stages: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0, 0.0])


@dataclass(frozen=True, slots=True)
class Part(Generic[Context, Result]):
    """Samples of one request in one batch: rows `start` to `stop` of that batch."""

    entry: Entry[Context, Result]
    offset: int
    start: int
    stop: int

    @property
    def context(self) -> Context:
        """What the request asked for."""
        return self.entry.context


@dataclass(frozen=True, slots=True, eq=False)
class Pass(Generic[Context, Result]):
    """The output of the backbone for one batch."""

    size: int  # Samples of the batch
    began: float  # When it entered the backbone, by `time.perf_counter`, and for how long
    seconds: float
    logits: Scores  # Of the samples of `scored`
    # The parts to finish, and those that the backbone failed on, each with its error
    scored: Sequence[Part[Context, Result]]
    failed: Sequence[tuple[Part[Context, Result], Exception]]


Outcomes = Sequence[tuple[Part[Context, Result], Result | Exception]]


def decoded(
    parts: list[Part[Context, Result]],
) -> tuple[list[Part[Context, Result]], list[tuple[Part[Context, Result], Exception]]]:
    """Decode what is not decoded yet; returns the parts to score, and those that cannot be read."""
    if not any(isinstance(part.entry.samples, PendingImage) for part in parts):
        return parts, []
    readable: list[Part[Context, Result]] = []
    unreadable: list[tuple[Part[Context, Result], Exception]] = []
    stop = 0
    for part in parts:
        entry, began = part.entry, time.perf_counter()
        if entry.future.done():
            continue
        try:
            if isinstance(entry.samples, PendingImage):
                entry.samples = entry.samples.decode()
                entry.stages[0] = time.perf_counter() - began
        except Exception as error:
            unreadable.append((part, error))
            continue
        start, stop = stop, stop + part.stop - part.start
        readable.append(replace(part, start=start, stop=stop))
    return readable, unreadable


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
