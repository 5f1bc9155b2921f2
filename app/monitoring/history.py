"""The evidence of both tests over the labels, thinned out: what a chart of the monitor shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

FIRST_STEP = 50
MOST_POINTS = 128
"""With so many points, the step is doubled and every other point is dropped."""


class EvidenceHistory:
    """Log E of the strict and of the material test after every `step` labels since the test began.

    Parameters
    ----------
    points
        (N, 3): the number of labels, and log E of both tests.
    step
        Labels from one point to the next.
    """

    def __init__(self, points: NDArray[np.float64] | None = None, step: int = FIRST_STEP) -> None:
        self.points: list[tuple[float, ...]] = (
            [] if points is None else [tuple(one) for one in points.tolist()]
        )
        self.step = step

    def parts(self, labels: int, count: int) -> Iterator[slice]:
        """Cut so many labels, which follow `count` others, where a point is due; call `note` after each part.

        So the points do not depend on how the log is cut.
        """
        first = 0
        while first < labels:
            last = min(labels, first + self.step - count % self.step)
            yield slice(first, last)
            count += last - first
            first = last

    def note(self, count: int, log_evidence: tuple[float, float]) -> None:
        """Add a point if one is due after `count` labels."""
        if count % self.step:
            return
        self.points.append((count, *log_evidence))
        if len(self.points) >= MOST_POINTS:
            self.step *= 2
            self.points = [point for point in self.points if not point[0] % self.step]

    def document(self) -> dict[str, Any]:
        """Describe it as a JSON document."""
        return {
            "labels": [int(point[0]) for point in self.points],
            "strict": [_shown(point[1]) for point in self.points],
            "material": [_shown(point[2]) for point in self.points],
        }

    def array(self) -> NDArray[np.float64]:
        """Return the points (N, 3)."""
        return np.array(self.points, np.float64).reshape(-1, 3)


def _shown(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
