"""What the formulas of maps need of NumPy; `tensor_ops` has the same names for torch."""

from functools import reduce
from typing import Any

import numpy as np
from numpy import amax, clip, cos, exp, full_like, log, nan_to_num, sin, stack, tanh, where

__all__ = [
    "amax", "centred", "clip", "constant", "cos", "exp", "full_like", "gather", "largest", "log",
    "log_sigmoid", "log_softmax", "mean", "nan_to_num", "norm", "row_max", "row_sum", "search_rows",
    "sigmoid", "sin", "softmax", "stack", "tanh", "where", "with_uniform",
]  # fmt: skip

Array = np.ndarray[Any, Any]

FEW_COLUMNS, MANY_ROWS = 8, 256
"""Rows so short and so many are added up column by column, ten times as fast as NumPy adds up each row."""


def constant(values: Array) -> Array:
    """Give the values as they are: arrays have no history."""
    return values


def row_max(rows: Array) -> Array:
    """Largest entry of each row of (N, K), (N, 1)."""
    if rows.shape[1] >= FEW_COLUMNS or len(rows) < MANY_ROWS:
        return np.asarray(rows.max(axis=1, keepdims=True))
    largest: Array = reduce(np.maximum, rows.T)
    return largest[:, None]


def row_sum(rows: Array) -> Array:
    """Sum of each row of (N, K) floats, (N, 1), to the last bit that of NumPy."""
    if rows.shape[1] >= FEW_COLUMNS or len(rows) < MANY_ROWS:
        return np.asarray(rows.sum(axis=1, keepdims=True))
    total: Array = reduce(np.add, rows.T)
    return total[:, None]


def log_softmax(logits: Array) -> Array:
    """Log of the softmax of each row."""
    centred: Array = logits - row_max(logits)
    centred -= np.log(row_sum(np.exp(centred)))
    return centred


def softmax(logits: Array) -> Array:
    """Softmax of each row of (N, K)."""
    weights: Array = np.exp(logits - row_max(logits))
    weights /= row_sum(weights)
    return weights


def with_uniform(logits: Array, share: float) -> Array:
    """Log of the mixture of the softmax of each row with the uniform distribution, which has a share."""
    mixed: Array = np.log((1.0 - share) * softmax(logits) + share / logits.shape[1])
    return mixed


def sigmoid(values: Array) -> Array:
    """Logistic function, without overflow."""
    small = np.exp(-np.abs(values))
    return np.where(values >= 0.0, 1.0, small) / (1.0 + small)


def log_sigmoid(values: Array) -> Array:
    """Log of the logistic function."""
    return np.minimum(values, 0.0) - np.log1p(np.exp(-np.abs(values)))


def centred(rows: Array) -> Array:
    """Give rows less the mean of their finite entries."""
    finite = np.isfinite(rows)
    if finite.all():
        return rows - mean(rows)
    found: Array = rows - np.where(finite, rows, 0.0).sum(axis=1, keepdims=True) / finite.sum(
        axis=1, keepdims=True
    )
    return found


def mean(rows: Array) -> Array:
    """Mean of each row, (N, 1)."""
    found: Array = row_sum(rows) / rows.shape[1]
    return found


def norm(rows: Array) -> Array:
    """Euclidean norm of each row, (N, 1)."""
    found: Array = np.linalg.norm(rows, axis=1, keepdims=True)
    return found


def largest(rows: Array, count: int) -> Array:
    """Give the largest entries of each row, in descending order."""
    top = np.partition(rows, rows.shape[1] - count, axis=1)[:, rows.shape[1] - count :]
    descending: Array = np.sort(top, axis=1)[:, ::-1]
    return descending


def gather(rows: Array, index: Array) -> Array:
    """Take entries of each row by their indices."""
    taken: Array = np.take_along_axis(rows, index, axis=1)
    return taken


def search_rows(places: Array, values: Array) -> Array:
    """Count, for each value of a row, the ascending places of that row that are not above it."""
    return np.stack([np.searchsorted(p, v, side="right") for p, v in zip(places, values, strict=True)])


def top_columns(rows: Array, count: int = 10) -> tuple[Array, Array]:
    """Give the largest entries of rows (N, K) less the mean of all, (T, N), and where they are (N, T)."""
    count = min(count, rows.shape[1])
    order = np.argpartition(rows, rows.shape[1] - count, axis=1)[:, rows.shape[1] - count :]
    top = np.take_along_axis(rows, order, axis=1)
    within = np.argsort(-top, axis=1, kind="stable")
    top, order = np.take_along_axis(top, within, axis=1), np.take_along_axis(order, within, axis=1)
    return np.ascontiguousarray((top - mean(rows)).T), order


def top_columns_back(by_columns: Array, order: Array, rows: Array) -> Array:
    """Give derivatives in the rows for those in what `top_columns` gives of them."""
    by_rows = np.repeat(-by_columns.sum(axis=0)[:, None] / rows.shape[1], rows.shape[1], axis=1)
    at = np.arange(len(rows))[:, None]
    by_rows[at, order] += by_columns.T
    return by_rows
