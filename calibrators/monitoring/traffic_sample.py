"""Which predictions without labels the monitor reads: all of them, unless there are very many for long.

What it learns from them (class frequencies, drift, mean confidence) needs thousands, not hundreds of
thousands a second. The choice depends on places and times in the log alone, so no test becomes invalid, and a
log gives the same choice however it is cut.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from boxcal.calibrators.monitoring.drift import uniform
from boxcal.calibrators.monitoring.state import Array, StatefulFold
from boxcal.calibrators.operator.compiling import compiled

PER_SECOND = 2000.0
"""So many are read of traffic that lasts."""

RESERVE = 50_000.0
"""So many more are read at once where there were few before; half of it before the first one is left out."""


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
        chosen[n] = 2.0 * reserve[0] > RESERVE * uniform(float(seq[n]))
        if chosen[n]:
            reserve[0] -= 1.0
