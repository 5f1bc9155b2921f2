"""Drift of the inputs without labels: a conformal martingale on the confidence of the predictions.

The p-value of each confidence among those of the validation data and of the traffic so far is uniform while
both are exchangeable; a histogram of past p-values bets against that (Vovk et al., "Testing randomness
online", 2021). It tells that the inputs changed, not that the calibration did.

Which predictions without labels the monitor reads: all of them, unless there are very many for long.

What it learns from them (class frequencies, drift, mean confidence) needs thousands, not hundreds of
thousands a second. The choice depends on places and times in the log alone, so no test becomes invalid, and a
log gives the same choice however it is cut.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from boxcal.calibrators.monitoring.state import Array, StatefulFold
from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.cpu_loops import total_of

CONFIDENCE_BINS = 256
BETTING_BINS = 10
PRIOR_COUNT = 10.0
"""Pseudo-count of each betting bin: early bets are cautious."""

FORGET = 0.9995
ALPHA = 0.01


class DriftTest(StatefulFold):
    """Tests whether confidences are exchangeable with those of the validation data.

    Parameters
    ----------
    reference
        (M,) confidences in [0, 1] of the validation data.
    """

    STATE: ClassVar[tuple[str, ...]] = ("counts", "bets", "progress")

    def __init__(self, reference: Array) -> None:
        self.counts = np.bincount(_bins(reference), minlength=CONFIDENCE_BINS).astype(np.float64)
        self.bets = np.full(BETTING_BINS, PRIOR_COUNT)
        # log sum over start times, prior mass of later starts, count, largest log E
        self.progress = np.array([-math.inf, 1.0, 0.0, 0.0])

    def update(self, confidences: Array) -> Array:
        """Bet on (N,) confidences in the order of the predictions; returns (N,) log E after each."""
        evidence = np.empty(len(confidences))
        _fold(_bins(confidences), self.counts, self.bets, self.progress, evidence)
        return evidence

    @property
    def log_evidence(self) -> float:
        """Log E now."""
        return float(np.logaddexp(self.progress[0], math.log(self.progress[1])))

    @property
    def alarm(self) -> bool:
        """Whether log E has ever reached log(1 / ALPHA)."""
        return bool(self.progress[3] >= -math.log(ALPHA))


def _bins(confidences: Array) -> Array:
    """Bin confidences evenly in the logit, from 1e-3 to 1 - 1e-6: most confidences are close to 1."""
    clipped = np.clip(np.asarray(confidences, dtype=np.float64), 1e-3, 1.0 - 1e-6)
    logits = np.log(clipped / (1.0 - clipped))
    low, high = math.log(1e-3 / (1.0 - 1e-3)), math.log((1.0 - 1e-6) / 1e-6)
    return np.minimum((logits - low) / (high - low) * CONFIDENCE_BINS, CONFIDENCE_BINS - 1).astype(np.int64)


@compiled
def _fold(bins: Array, counts: Array, bets: Array, progress: Array, evidence: Array) -> None:
    # p-value: (confidences in bins below + a random share of those in its bin, itself included) / all.
    # Bet: the share of past p-values in the bin of this one times the number of bins, forgotten slowly.
    # log E: the mixture over start times of `bettors.fold`.
    total = 1.0
    for b in range(counts.shape[0]):
        total += counts[b]
    for n in range(bins.shape[0]):
        below, here = total_of(counts[: bins[n]]), counts[bins[n]] + 1.0
        progress[2] += 1.0
        p_value = (below + uniform(progress[2]) * here) / total
        counts[bins[n]] += 1.0
        total += 1.0
        bet = min(int(p_value * BETTING_BINS), BETTING_BINS - 1)
        weight = 0.0
        for b in range(BETTING_BINS):
            weight += bets[b]
        gain = math.log(bets[bet] / weight * BETTING_BINS)
        for b in range(BETTING_BINS):
            bets[b] = PRIOR_COUNT + FORGET * (bets[b] - PRIOR_COUNT)
        bets[bet] += 1.0
        tail = math.log(2.0) / math.log(2.0 + progress[2])
        progress[0] = gain + np.logaddexp(progress[0], math.log(progress[1] - tail))
        progress[1] = tail
        evidence[n] = np.logaddexp(progress[0], math.log(tail))
        progress[3] = max(progress[3], evidence[n])


@compiled
def uniform(count: float) -> float:
    """Break ties by a number in [0, 1) that depends on the count alone (splitmix64): a replay agrees."""
    z = np.uint64(count) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return float(z >> np.uint64(11)) * 2.0**-53


PER_SECOND = 2000.0
"""So many are read of traffic that lasts."""

RESERVE = 50_000.0
"""So many more are read at once where there were few before; half of it before the first one is left out."""


SET_BACK_SECONDS = 10.0
"""Times of processes and of blocks differ by less; a moment that lies further back is of a clock set back."""


class TrafficSample(StatefulFold):
    """Chooses predictions at random, the fewer the faster they come."""

    STATE: ClassVar[tuple[str, ...]] = ("reserve",)

    def __init__(self) -> None:
        self.reserve = np.array([RESERVE, 0.0])  # what is left of it, at a time in seconds

    def choose(self, seq: Array, moments: Array) -> Array:
        """Return (N,) bool, which predictions to read, by their places in the log (N,) and times (N,)."""
        chosen = np.empty(len(seq), np.bool_)
        _choose(np.ascontiguousarray(seq, np.int64), np.array(moments, np.float64), self.reserve, chosen)
        return chosen


@compiled
def _choose(seq: Array, moments: Array, reserve: Array, chosen: Array) -> None:
    for n in range(seq.shape[0]):
        if moments[n] > reserve[1]:
            reserve[0] = min(RESERVE, reserve[0] + PER_SECOND * (moments[n] - reserve[1]))
            reserve[1] = moments[n]
        elif moments[n] < reserve[1] - SET_BACK_SECONDS:
            reserve[1] = moments[n]  # or nothing would be refilled until the clock is there again
        chosen[n] = 2.0 * reserve[0] > RESERVE * uniform(float(seq[n]))
        if chosen[n]:
            reserve[0] -= 1.0
