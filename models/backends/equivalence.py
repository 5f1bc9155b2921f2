"""Compare the logits of a rewritten network with those of the original, on one random batch."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("boxcal")
TOLERANCE = 1e-4  # of the largest logit
SEED = 0


def random_batch(count: int, input_shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Draw standard normal inputs, float32 (count, *input_shape); the same ones each time."""
    return np.random.default_rng(SEED).standard_normal((count, *input_shape), dtype=np.float32)


def same_logits(name: str, original: Any, rewritten: Any, eps: float = 0.0) -> bool:
    """Compare logits (N, K) of both, and log a warning where they differ."""
    original, rewritten = np.asarray(original), np.asarray(rewritten)
    scale = np.abs(original).max()
    difference = float(np.abs(rewritten - original).max() / scale) if scale > 0 else float(rewritten.any())
    if difference <= (limit := max(TOLERANCE, 8 * eps)):
        return True
    logger.warning(
        "%s is served as it is: rewritten to compute less, its logits differ by %.2g of the largest, "
        "more than %.2g.",
        name, difference, limit,
    )  # fmt: skip
    return False
