"""The weights of a stack: those under which labels are likely that no component has seen.

With q_im the probability that method m gives to the label of sample i, by a fit that has not seen it, the
weights maximise `sum_i n_i log sum_m w_m q_im + c log w_best` on the simplex: EM for the proportions of a
mixture, with a pull of c samples towards the method of the lowest loss. c is chosen, and weights are judged,
on the folds that did not take part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PULLS = (0.0, 1.0, 4.0, 16.0)
"""Samples that pull towards the best method; which of them is cross-validated."""
PASSES, STILL = 300, 1e-5
"""Of EM at most, and the change of every weight at which it ends."""
WORTH = 1e-4
"""Nats that the components left out may cost together."""
SMALLEST = 1e-300

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StackWeights:
    """Weights of M methods from all samples, (M,), and without each of F folds, (F, M)."""

    all_rows: Floats
    by_fold: Floats
    pull: float
    losses: Floats  # (N,), of the mixture by the weights of the fold's own, in nats


def stack_weights(losses: Floats, fold_of: NDArray[Any], counts: Floats, most: int) -> StackWeights:
    """Give the weights of a stack, of at most so many components.

    `losses`: (N, M), of M methods on samples that they have not seen, in nats. `fold_of`: (N,), from 0.
    `counts`: (N,), how much each sample counts.
    """
    folds = int(fold_of.max()) + 1
    likelihoods = np.maximum(np.exp(-losses), SMALLEST)
    # A problem for each fold, without its rows, and a last one with all.
    taking = np.append(fold_of[:, None] != np.arange(folds), np.ones((len(losses), 1), bool), axis=1)
    taken = taking * counts[:, None]
    best = (taken.T @ losses).argmin(axis=1)
    towards = np.eye(losses.shape[1])[best].T
    found = [_em(likelihoods, taken, pull * towards, np.ones_like(towards)) for pull in PULLS]
    scores = np.array([_fold_losses(likelihoods, one[:, :folds], fold_of, counts) for one in found])
    chosen = np.append(
        (scores.sum(axis=1, keepdims=True) - scores).argmin(axis=0), scores.sum(axis=1).argmin()
    )
    weights = np.stack([found[index][:, place] for place, index in enumerate(chosen)], axis=1)
    weights = _pruned(likelihoods, taken, np.array(PULLS)[chosen] * towards, weights, most)
    return StackWeights(
        weights[:, folds],
        weights[:, :folds].T,
        PULLS[chosen[folds]],
        -np.log((likelihoods * weights[:, fold_of].T).sum(axis=1)),
    )


def _em(likelihoods: Floats, counts: Floats, pulls: Floats, weights: Floats) -> Floats:
    """Maximise over the weights (M, P) of P problems at once, from those given; a weight of 0 stays."""
    weights = weights / weights.sum(axis=0)
    totals = counts.sum(axis=0) + pulls.sum(axis=0)
    for _ in range(PASSES):
        shares = counts / np.maximum(likelihoods @ weights, SMALLEST)
        moved = (weights * (likelihoods.T @ shares) + pulls) / totals
        change = np.abs(moved - weights).max()
        weights = moved
        if change < STILL:
            break
    found: Floats = weights / weights.sum(axis=0)
    return found


def _fold_losses(likelihoods: Floats, weights: Floats, fold_of: NDArray[Any], counts: Floats) -> Floats:
    """Sum, for each fold, the losses under the weights (M, F) that were found without it."""
    own = (likelihoods * weights[:, fold_of].T).sum(axis=1)
    losses = counts * -np.log(np.maximum(own, SMALLEST))
    return np.bincount(fold_of, weights=losses).astype(np.float64)


def _pruned(likelihoods: Floats, counts: Floats, pulls: Floats, weights: Floats, most: int) -> Floats:
    """Leave out the smallest weights while this costs little, and where there are more than `most`."""

    def mean_losses(weights: Floats) -> Any:
        logs = -np.log(np.maximum(likelihoods @ weights, SMALLEST))
        return (counts * logs).sum(axis=0) / counts.sum(axis=0)

    start, going = mean_losses(weights), np.ones(weights.shape[1], bool)
    places = np.arange(weights.shape[1])
    for _ in range(len(weights) - 1):
        left = (weights > 0).sum(axis=0)
        smallest = np.where(weights > 0, weights, np.inf).argmin(axis=0)
        tried, pulled = weights.copy(), pulls.copy()
        tried[smallest, places] = np.where(going & (left > 1), 0.0, tried[smallest, places])
        pulled[tried == 0.0] = 0.0
        tried = _em(likelihoods, counts, pulled, tried)
        going &= (left > 1) & ((left > most) | (mean_losses(tried) < start + WORTH))
        if not going.any():
            break
        weights, pulls = np.where(going, tried, weights), np.where(going, pulled, pulls)
    return weights
