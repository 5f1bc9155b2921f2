"""What the formulas of maps need of torch; `array_ops` has the same names for NumPy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, amax, clip, cos, exp, log, nan_to_num, sigmoid, sin, stack, tanh, where
from torch.nn.functional import logsigmoid

__all__ = [
    "amax", "applied", "centred", "clip", "constant", "cos", "exp", "full_like", "gather", "largest",
    "log",
    "log_sigmoid", "log_softmax", "mean", "nan_to_num", "norm", "search_rows", "sigmoid", "sin", "softmax",
    "stack", "tanh", "where",
]  # fmt: skip

full_like = torch.full_like


def constant(values: Tensor) -> Tensor:
    """Give the values without their history."""
    return values.detach()


def log_sigmoid(values: Tensor) -> Tensor:
    """Log of the logistic function."""
    if torch.onnx.is_in_onnx_export():  # it would take the logarithm of a sigmoid, which is 0 below -37
        return clip(values, None, 0.0) - log(1.0 + exp(-values.abs()))
    return logsigmoid(values)


def log_softmax(logits: Tensor) -> Tensor:
    """Log of the softmax of each row."""
    return logits.log_softmax(dim=1)


def softmax(logits: Tensor) -> Tensor:
    """Softmax of each row of (N, K)."""
    return logits.softmax(dim=1)


def with_uniform(logits: Tensor, share: float) -> Tensor:
    """Log of the mixture of the softmax of each row with the uniform distribution, which has a share."""
    return ((1.0 - share) * softmax(logits) + share / logits.shape[1]).log()


def centred(rows: Tensor) -> Tensor:
    """Give rows less the mean of their finite entries."""
    finite = rows.isfinite()
    return rows - where(finite, rows, 0.0).sum(dim=1, keepdim=True) / finite.sum(dim=1, keepdim=True)


def mean(rows: Tensor) -> Tensor:
    """Mean of each row, (N, 1)."""
    return rows.mean(dim=1, keepdim=True)


def norm(rows: Tensor) -> Tensor:
    """Euclidean norm of each row, (N, 1)."""
    found: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    return found


def largest(rows: Tensor, count: int) -> Tensor:
    """Give the largest entries of each row, in descending order."""
    return rows.topk(count, dim=1).values


def gather(rows: Tensor, index: Tensor) -> Tensor:
    """Take entries of each row by their indices."""
    return rows.gather(1, index)


def search_rows(places: Tensor, values: Tensor) -> Tensor:
    """Count, for each value of a row, the ascending places of that row that are not above it."""
    return torch.searchsorted(places, values.contiguous(), right=True)


def applied(formula: Callable[..., Any], parameters: Mapping[str, Any], scores: Tensor) -> Any:
    """Evaluate a formula on a tensor, by which the result can be differentiated."""
    moved = {
        name: torch.from_numpy(np.asarray(value)).to(scores.device) for name, value in parameters.items()
    }
    return formula(sys.modules[__name__], moved, scores)
