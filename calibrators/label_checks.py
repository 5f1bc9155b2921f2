"""Whether labels belong to their logits: statistics for the checks of validation data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

MOST_ROWS = 10_000
"""Largest number of rows on which the share of unrelated labels is estimated."""


def mean_confidence(logits: NDArray[Any]) -> float:
    """Mean of the largest softmax probability."""
    total = 0.0
    for part in np.array_split(logits, -(-logits.size // 2_000_000)):
        rows = part.astype(np.float64)
        total += float((1 / np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)).sum())
    return total / len(logits)


def looks_random(logits: NDArray[Any], labels: Labels) -> bool:
    """Whether the true class is in the lower half of its row at least half as often as a random class.

    With fewer than 4 classes the halves say too little, and it counts as random.
    """
    num_classes = logits.shape[1]
    if num_classes < 4:
        return True
    half = num_classes // 2
    own = logits[np.arange(len(labels)), labels]
    parts = np.array_split(logits, -(-logits.size // 2_000_000))
    middle = np.concatenate([np.partition(rows, half, axis=1)[:, half] for rows in parts])
    return bool((own < middle).mean() >= half / num_classes / 2)


def unrelated_share(logits: NDArray[Any], labels: Labels) -> tuple[float, float]:
    """Estimate the share of labels that are drawn uniformly at random, independently of the logits.

    The maximum-likelihood estimate of e in the mixture (1 - e) softmax(g / T) + e / K, jointly with T, over
    the K classes that occur among the labels. Rows whose true class is at a minimum that classes share are
    excluded: a forest's zeros, or clipped values.

    Returns
    -------
    The estimate, and its significance in standard errors: the root of twice the gain in log-likelihood.
    """
    from scipy.optimize import brentq, minimize_scalar  # noqa: PLC0415 - only fits need scipy

    present, truth = np.unique(labels, return_inverse=True)
    uniform = 1 / len(present)
    step = -(-len(logits) // MOST_ROWS)
    scores, truth = logits[::step].astype(np.float64), truth[::step]
    if len(present) < logits.shape[1]:
        scores = scores[:, present]
    own, least = scores[np.arange(len(scores)), truth], scores.min(axis=1)
    kept = (own > least) | ((scores == least[:, None]).sum(axis=1) == 1)
    if len(present) < 3 or not kept.any():
        return 0.0, 0.0
    top = scores[kept].max(axis=1)
    scores, own = scores[kept] - top[:, None], own[kept] - top

    def probabilities(log_inverse: float) -> Floats:
        inverse = math.exp(log_inverse)
        own_share: Floats = np.exp(inverse * own) / np.exp(inverse * scores).sum(axis=1)
        return np.maximum(own_share, 1e-300)

    def share(own_share: Floats) -> float:
        def slope(e: float) -> float:
            return float(((uniform - own_share) / ((1 - e) * own_share + e * uniform)).mean())

        if slope(0.0) <= 0:
            return 0.0
        return 1.0 if slope(1.0) >= 0 else float(brentq(slope, 0.0, 1.0, xtol=1e-6))

    def loss(own_share: Floats, e: float) -> float:
        return -float(np.log((1 - e) * own_share + e * uniform).mean())

    def mixed(log_inverse: float) -> float:
        own_share = probabilities(log_inverse)
        return loss(own_share, share(own_share))

    plain, both = (
        minimize_scalar(one, bounds=(-5.0, 5.0), method="bounded", options={"xatol": 1e-3})
        for one in (lambda log_inverse: loss(probabilities(log_inverse), 0.0), mixed)
    )
    gain = 2 * len(own) * (plain.fun - both.fun)
    return share(probabilities(both.x)), math.sqrt(max(0.0, gain))
