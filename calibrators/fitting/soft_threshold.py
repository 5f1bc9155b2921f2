"""The fit of `dpb` to many logits: most of its search is in float32 and on some of the rows.

Its loss has a kink wherever a weighted logit reaches the threshold, and classes whose weighted logits all
stay below it have a gradient of zero. Descents end there; those from points around the best end go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from boxcal.calibrators.fitting.closed_form_gradients import DualBounding
from boxcal.calibrators.fitting.descent import AGREE_WITHIN, Array, Minimum, descend, projected_gradient

MANY = 200_000
"""Logits from which on this search is the quicker one."""
ROWS, ROUGH = 2000, 40
"""Rows on which all starts are compared, and iterations for each of them."""
AROUND, REACH, NARROWING = 8, 0.5, 0.02
"""Descents around the best end, how far the first of them begins from it, and the last, relative to that."""
FULL, SHORT = 100, 25
"""Iterations on all rows from the best start, and from each point around its end."""
LAST = 100
"""Iterations in float64 at the end."""


def fit_shift(
    objective: DualBounding,
    starts: Sequence[Array],
    *,
    seed: int,
    thorough: bool,
    tick: Callable[[float], None],
) -> Minimum:
    """Find weights and a threshold of low validation NLL.

    A search that is not thorough follows fewer starts and makes fewer descents around the best end.
    """
    limits, rng = objective.limits, np.random.default_rng(seed)
    rows = torch.from_numpy(rng.permutation(len(objective.labels))[:ROWS])
    some, every = objective.rows(rows).rough(), objective.rough()
    count, around = (len(starts), AROUND) if thorough else (len(starts) // 2, AROUND // 2)
    steps, used = count + around + 2, 0
    ends = []
    for place, start in enumerate(starts[:count]):
        end, value, calls = descend(some, start, limits, iterations=ROUGH, tolerance=1e-7)
        ends.append((end, value))
        used += calls
        tick((place + 1) / steps)
    best, lowest = min(ends, key=lambda pair: pair[1])
    agreeing = sum(value <= lowest + AGREE_WITHIN for _, value in ends)
    best, lowest, calls = descend(every, best, limits, iterations=FULL, tolerance=1e-8)
    used += calls
    low, high = np.array(limits, dtype=np.float64).T
    for index in range(around):
        step = rng.uniform(-REACH, REACH, len(best)) * NARROWING ** (index / around)
        end, value, calls = descend(
            every, np.clip(best + step, low, high), limits, iterations=SHORT, tolerance=1e-8
        )
        used += calls
        if value < lowest:
            best, lowest = end, value
        tick((count + index + 2) / steps)
    best, lowest, calls = descend(
        objective, best, limits, iterations=LAST, tolerance=1e-14 if thorough else 1e-9
    )
    spread = max(value for _, value in ends) - min(value for _, value in ends)
    return Minimum(
        best, lowest, projected_gradient(objective, best, limits), count, agreeing, used + calls, spread
    )
