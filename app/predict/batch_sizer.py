"""How large the batcher's batches should be and how long to gather them, from what batches cost."""

from __future__ import annotations

import math

SMOOTHING = 0.2
"""Weight of the newest measurement in every running mean."""
FIXED_SHARE = 0.05
"""A batch is large enough where its fixed cost is at most this share of the whole."""


def of_few_sizes(size: int) -> int:
    """Round down to 1, 2, 3, 4, 6, 8, 12, 16, 24, and so on.

    On a processor, torch's oneDNN compiles and keeps code for every size it meets: with a small MobileNetV3
    and every size up to 48 that is more than a gigabyte, with these sizes a twentieth of it.
    """
    power = 1 << (size.bit_length() - 1)
    return power + power // 2 if size >= power + power // 2 else power


class BatchSizer:
    """Learns that a batch of n samples costs about a + b·n seconds, and what follows from it.

    A larger batch spreads the fixed cost `a` over more samples, but every sample waits for the whole of it.
    So a batch is as large as makes `a` a small share of its cost, unless it would then exceed the target.

    Passes side by side share a processor with everything else, and what a batch costs there besides, mostly
    waits of threads for the interpreter, is not in the measured `a`. So theirs are as large as the target
    allows.

    Parameters
    ----------
    max_batch_size
        Never more samples than this.
    target_seconds
        What one batch may take, unless a single sample takes longer already.
    passes
        How many batches are in the backbone at once.
    """

    def __init__(self, max_batch_size: int, target_seconds: float, passes: int = 1) -> None:
        self._limit = max_batch_size
        self._target = target_seconds
        self.passes = passes
        self._costs: dict[int, tuple[float, float]] = {}
        self._interval: float | None = None
        self.fixed = 0.0
        self.per_sample = 0.0
        self.batch_size = min(2, max_batch_size)

    def measured(self, samples: int, seconds: float) -> None:
        """Learn what one batch cost."""
        bucket = samples.bit_length()
        n, cost = self._costs.get(bucket, (float(samples), seconds))
        # One stall of the machine is no news about the model: a measurement counts at most twice the mean.
        seconds = min(seconds, 2 * cost)
        self._costs[bucket] = (n + SMOOTHING * (samples - n), cost + SMOOTHING * (seconds - cost))
        self._fit()

    def observe_throughput(self, samples: int, seconds: float) -> None:
        """Learn how long the whole service took for these samples while others were waiting."""
        interval = seconds / samples
        self._interval = interval if self._interval is None else self._mean(self._interval, interval)

    def ran_out_of_memory(self, samples: int) -> None:
        """Never again make a batch of so many samples."""
        self._limit = max(1, min(self._limit, samples // 2))
        self.batch_size = min(self.batch_size, self._limit)

    def wait_for(self, samples: int) -> float:
        """Expect so many samples to be worked off in this many seconds; 0 before anything was measured."""
        return samples * (self.per_sample / self.passes if self._interval is None else self._interval)

    def size_of(self, share: int) -> int:
        """How many samples the next batch takes where so many are its share of those that wait."""
        size = min(self.batch_size, share)
        return size if self.passes == 1 else of_few_sizes(size)

    def gather_seconds(self, queued: int, last: int, idle: float) -> float:
        """How long to wait for a fuller batch once `queued` samples are there.

        Not at all where the device was idle: then a wait would only be added to the answer. Where it is busy,
        the clients that the last batch answered are about to come back, and a batch without them costs `a`
        once more. So waiting for `a` seconds is the most that can pay.
        """
        if queued >= min(last, self.batch_size) or idle > self.fixed:
            return 0.0
        return min(self.fixed, self._target / 2)

    def _fit(self) -> None:
        """Least squares of cost on size, each size weighing by its relative error, then the size to use."""
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
        return max(1, min(known, enough, in_time, self._limit))

    @staticmethod
    def _mean(old: float, new: float) -> float:
        return old + SMOOTHING * (new - old)
