"""Checks probabilities and labels, and reduces them to a few numbers per sample.

All metrics except the classwise ones use only these vectors, so the evaluation of 50,000 samples with 1,000
classes requires no second copy of the probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from boxcal.calibrators.data import as_array, check_labels
from boxcal.calibrators.errors import InvalidDataError

Vector = NDArray[np.float64]
Indices = NDArray[np.int64]

ROWS_AT_ONCE = 2048
SUM_TOLERANCE = 1e-2  # the error of a softmax in bfloat16 is almost as large


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The predictions of a classifier and whether they are correct, per sample.

    Attributes
    ----------
    confidence : float64 (N,)
        Probability of the predicted label.
    correct : float64 (N,)
        1 where the predicted label is the true one, else 0.
    nll : float64 (N,)
        -log of the true label's probability, in nats; inf where that probability is 0.
    brier : float64 (N,)
        Squared distance of the probabilities to the one-hot label, summed over classes.
    predicted : int64 (N,)
        Index of the predicted label.
    labels : int64 (N,)
        Index of the true label.
    probabilities : (N, K)
        The probabilities in their original dtype, not copied.
    groups : int64 (N,) or None
        Samples of one group are not independent.
    """

    confidence: Vector
    correct: Vector
    nll: Vector
    brier: Vector
    predicted: Indices
    labels: Indices
    probabilities: NDArray[Any]
    groups: Indices | None = None

    def __len__(self) -> int:
        return len(self.confidence)

    def rows(self, index: Indices) -> Outcomes:
        """Return a subset of the samples."""
        kept: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            kept[field.name] = None if value is None else value[index]
        return Outcomes(**kept)

    @property
    def residual(self) -> Vector:
        """Confidence minus correctness, (N,); calibration errors measure its conditional mean."""
        return self.confidence - self.correct


def check_probabilities(probabilities: Any) -> NDArray[Any]:
    """Check that probabilities are an (N, K) matrix whose rows are distributions.

    Raises
    ------
    InvalidDataError
        If a row is not a distribution, for example if logits are given; the message names the first.
    """
    array = as_array(probabilities, "probabilities")
    if array.ndim != 2 or array.shape[0] < 1 or array.shape[1] < 2:
        raise InvalidDataError(
            f"probabilities must have shape (N, K) with K of at least 2, not {array.shape}"
        )
    for start in range(0, len(array), ROWS_AT_ONCE):
        rows = array[start : start + ROWS_AT_ONCE].astype(np.float64)
        outside = ~((rows >= 0) & (rows <= 1))
        if outside.any():
            row, column = (int(i) for i in np.argwhere(outside)[0])
            raise InvalidDataError(
                f"probabilities must lie in [0, 1]; row {start + row}, class {column} is {rows[row, column]}"
                " (logits need a softmax first)"
            )
        sums = rows.sum(axis=1)
        wrong = np.abs(sums - 1) > SUM_TOLERANCE
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InvalidDataError(f"probabilities must sum to 1; row {start + row} sums to {sums[row]}")
    return array


def outcomes(
    probabilities: ArrayLike | Tensor,
    labels: ArrayLike | Tensor,
    predicted: Any = None,
    groups: Tensor | None = None,
) -> Outcomes:
    """Reduce probabilities (N, K) and labels (N,) to `Outcomes`.

    Parameters
    ----------
    probabilities
        Rows that sum to 1.
    labels
        Class indices below K.
    predicted
        Predicted labels (N,). If an upper bound makes classes equal, the label is the class with the larger
        calibrated logit, which only the caller knows. By default the first of the largest probabilities.
    groups
        Numbers (N,) of groups, whose samples are not independent.

    Raises
    ------
    InvalidDataError
        If a row, class or sum is invalid; the message names the first.
    """
    array = check_probabilities(probabilities)
    count, num_classes = array.shape
    truth = check_labels(labels, count, num_classes).numpy()
    if predicted is None:
        chosen = array.argmax(axis=1).astype(np.int64)
    else:
        chosen = check_labels(predicted, count, num_classes).numpy()
    brier = np.empty(count)
    true_probability = np.empty(count)
    for start in range(0, count, ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        rows = array[part].astype(np.float64)
        of_label = rows[np.arange(len(rows)), truth[part]]
        true_probability[part] = of_label
        brier[part] = np.einsum("nk,nk->n", rows, rows) - 2 * of_label + 1
    with np.errstate(divide="ignore"):
        nll = -np.log(true_probability)
    return Outcomes(
        confidence=array[np.arange(count), chosen].astype(np.float64),
        correct=(chosen == truth).astype(np.float64),
        nll=nll + 0.0,  # -log(1) is -0.0
        brier=np.maximum(brier, 0.0),
        predicted=chosen,
        labels=truth,
        probabilities=array,
        groups=None if groups is None else groups.numpy(),
    )
