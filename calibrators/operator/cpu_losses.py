"""The CPU engine's loss: the negative log-likelihood of each row in its own box, with all its derivatives."""

import math

import numpy as np

from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.constants import AT_LOWER, AT_UPPER, FREE
from boxcal.calibrators.operator.cpu_loops import box_of, solve_row
from boxcal.calibrators.operator.exact_row import Array

SMALLEST = 1e-300
"""Stands for a probability or a mass of 0, so that losses and derivatives stay finite."""


@compiled
def nll_rows(  # noqa: PLR0917 - compiled loops take arrays by position
    scores: Array,
    labels: Array,
    lower: Array,
    upper: Array,
    losses: Array,
    by_scores: Array,
    by_lower: Array,
    by_upper: Array,
) -> None:
    """Fill the loss of every row, in nats, and its derivatives.

    With s the mass of the classes that no bound holds, q their probabilities, and n_a and n_b the numbers of
    classes at a and b, a free label y has the derivatives q / s - 1{y}, n_a / s and n_b / s.

    Parameters
    ----------
    scores, by_scores : float64 ndarray of shape (N, K)
    labels : int64 ndarray of shape (N,)
    lower, upper : float64 ndarray of shape (N,)
        One feasible box per row, for all its classes.
    losses, by_lower, by_upper : float64 ndarray of shape (N,)
    """
    side, weights = np.empty(scores.shape[1], np.int8), np.empty(0)
    for n in range(scores.shape[0]):
        row, p, y = scores[n], by_scores[n], labels[n]
        box = box_of(lower[n], upper[n], row.shape[0])
        solve_row(row, lower[n], upper[n], box, 1.0, 1e-9, weights, p, side)
        by_lower[n] = by_upper[n] = 0.0
        if side[y] == AT_LOWER:
            losses[n], by_lower[n] = -math.log(lower[n]), -1.0 / lower[n]
            p[:] = 0.0
        elif side[y] == AT_UPPER:
            losses[n], by_upper[n] = -math.log(upper[n]), -1.0 / upper[n]
            p[:] = 0.0
        else:
            mass, below, above, largest = 0.0, 0, 0, y
            for k in range(row.shape[0]):
                below += side[k] == AT_LOWER
                above += side[k] == AT_UPPER
                if side[k] == FREE:
                    mass += p[k]
                    if row[k] > row[largest]:
                        largest = k
            losses[n] = row[largest] - row[y] - math.log(max(p[largest], SMALLEST))
            inverse = 1.0 / max(mass, SMALLEST)
            by_lower[n], by_upper[n] = below * inverse, above * inverse
            for k in range(row.shape[0]):
                p[k] = p[k] * inverse if side[k] == FREE else 0.0
            p[y] -= 1.0
