"""Decides how large batches are and how long to gather them, from the measured durations of batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

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
