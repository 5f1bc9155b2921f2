"""Checks probabilities and labels, and reduces them to a few numbers per sample, a block of rows at a time.

All metrics except the classwise ones use only these vectors. Probabilities (N, K) are read several times: as
they are kept, or computed from the logits by a softmax, or a temperature and constant bounds, anew each time,
so that no float64 array of all of them exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from boxcal.calibrators.array_ops import row_sum, softmax
from boxcal.calibrators.data import as_array, check_labels, check_weights
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.row_statistics import effective_samples
from boxcal.calibrators.scores import BEYOND
from boxcal.calibrators.threads import over_blocks

if TYPE_CHECKING:  # the sentence of a report is also said where safetensors is not installed
    from boxcal.calibrators.array_calibrator import ArrayCalibrator

Matrix = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ProbabilityRows:
    """Probabilities of the shape (N, K); `at(part)` returns some rows, (n, K) float64."""

    shape: tuple[int, int]
    at: Callable[[slice | Indices], Matrix]


def kept_rows(array: NDArray[Any]) -> ProbabilityRows:
    """Take probabilities that are kept in an array (N, K) of any dtype."""
    return ProbabilityRows(array.shape, lambda part: array[part].astype(np.float64))


def softmax_rows(logits: NDArray[Any]) -> ProbabilityRows:
    """Compute the softmax of logits (N, K), in float64."""
    shape = logits.shape[0], logits.shape[1]
    return ProbabilityRows(shape, lambda part: softmax(logits[part].astype(np.float64)))


def calibrated_rows(calibrator: ArrayCalibrator, logits: NDArray[Any]) -> ProbabilityRows:
    """Compute what a calibrator gives for logits (N, K); `is_plain`, so no row depends on the others."""
    shape = logits.shape[0], logits.shape[1]
    return ProbabilityRows(shape, lambda part: calibrator(logits[part]))


def joined_rows(parts: Sequence[ProbabilityRows], of: Indices, place: Indices) -> ProbabilityRows:
    """Let row n be row `place[n]` of `parts[of[n]]`."""
    num_classes = parts[0].shape[1]

    def at(part: slice | Indices) -> Matrix:
        sources, places = of[part], place[part]
        rows = np.empty((len(sources), num_classes))
        for number in np.unique(sources):
            inside = sources == number
            rows[inside] = parts[number].at(places[inside])
        return rows

    return ProbabilityRows((len(of), num_classes), at)


def some_rows(rows: ProbabilityRows, index: Indices) -> ProbabilityRows:
    """Take some rows of others."""
    return ProbabilityRows((len(index), rows.shape[1]), lambda part: rows.at(index[part]))


def is_plain(calibrator: ArrayCalibrator) -> bool:
    """Whether a calibrator is one temperature and one box, and reads logits."""
    return calibrator.plain is not None


Vector = NDArray[np.float64]
Tell = Callable[[float], None]
"""Called with the fraction done of one step; an exception it raises ends the step."""


def silent(fraction: float) -> None:
    """Ignore the progress."""


ROWS_AT_ONCE = 2048
SUM_TOLERANCE = 1e-2  # the error of a softmax in bfloat16 is almost as large


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The predictions of a classifier and whether they are correct, per sample."""

    confidence: Vector  # float64 (N,), probability of the predicted label
    correct: Vector  # float64 (N,), 1 where the predicted label is the true one, else 0
    # float64 (N,), -log of the true label's probability, in nats; inf where that probability is 0
    nll: Vector
    # float64 (N,), squared distance of the probabilities to the one-hot label, summed over classes
    brier: Vector
    predicted: Indices  # int64 (N,), index of the predicted label
    labels: Indices  # int64 (N,), index of the true label
    probabilities: ProbabilityRows  # The probabilities (N, K), not copied
    groups: Indices | None = None  # int64 (N,) or None, samples of one group are not independent
    weights: Vector | None = None  # float64 (N,) or None, how much each sample counts, of mean 1

    def __len__(self) -> int:
        return len(self.confidence)

    def rows(self, index: Indices) -> Outcomes:
        """Return a subset of the samples."""
        kept: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "probabilities":
                value = some_rows(value, index)
            elif value is not None:
                value = value[index]
            kept[field.name] = value
        if self.weights is not None:
            kept["weights"] = _of_mean_1(kept["weights"])
        return Outcomes(**kept)

    def mean(self, values: Vector) -> float:
        """Return the mean of values (N,) of the samples, with their weights if there are any."""
        return float((values if self.weights is None else values * self.weights).mean())

    def weighted(self, values: Matrix) -> Matrix:
        """Multiply values (N, R) by the weights, if there are any."""
        return values if self.weights is None else values * self.weights[:, None]

    @property
    def residual(self) -> Vector:
        """Confidence minus correctness, (N,); calibration errors measure its conditional mean."""
        return self.confidence - self.correct


def outcomes(
    probabilities: ArrayLike | ProbabilityRows,
    labels: ArrayLike,
    predicted: Any = None,
    groups: Indices | None = None,
    tell: Tell = silent,
    *,
    weights: Any = None,
) -> Outcomes:
    """Reduce probabilities (N, K) and labels (N,) to `Outcomes`.

    `predicted`: predicted labels (N,). If an upper bound makes classes equal, the label is the class with the
    larger calibrated logit, which only the caller knows. By default the first of the largest probabilities.
    `groups`: numbers (N,) of groups, whose samples are not independent. `tell`: called with the fraction
    done. `weights`: how much each sample counts (N,); above 0.
    """
    source = _rows(probabilities)
    count, num_classes = source.shape
    truth = check_labels(labels, count, num_classes)
    chosen = None if predicted is None else check_labels(predicted, count, num_classes)

    def work(part: slice) -> tuple[Indices, Vector, Vector, Vector]:
        rows = source.at(part)
        _check_rows(rows, part.start)
        picked = rows.argmax(axis=1) if chosen is None else chosen[part]
        each = np.arange(len(rows))
        at_label = rows[each, truth[part]]
        return picked, rows[each, picked], at_label, np.einsum("nk,nk->n", rows, rows) - 2 * at_label + 1

    parts = []
    for part in over_blocks(work, count, ROWS_AT_ONCE):
        parts.append(part)
        tell(min(1.0, len(parts) * ROWS_AT_ONCE / count))
    label, confidence, at_label, brier = (np.concatenate(column) for column in zip(*parts, strict=True))
    with np.errstate(divide="ignore"):
        nll = -np.log(at_label)
    return Outcomes(
        confidence=confidence,
        correct=(label == truth).astype(np.float64),
        nll=nll + 0.0,  # -log(1) is -0.0
        brier=np.maximum(brier, 0.0),
        predicted=label,
        labels=truth,
        probabilities=source,
        groups=groups,
        weights=None if weights is None else _of_mean_1(np.asarray(weights, dtype=np.float64)),
    )


def with_weights(scored: Outcomes, weights: Any) -> Outcomes:
    """Give the samples weights (N,); those of weight 0 are left out, and equal weights are none."""
    checked = check_weights(weights, len(scored))
    used = np.flatnonzero(checked)
    if len(used) < len(checked):
        scored, checked = scored.rows(used), checked[used]
    if (checked == checked[0]).all():
        return scored
    return replace(scored, weights=_of_mean_1(checked))


def _of_mean_1(weights: Vector) -> Vector:
    scaled: Vector = weights / weights.mean()
    return scaled


def _rows(probabilities: Any) -> ProbabilityRows:
    """Take an (N, K) matrix, or what computes its rows."""
    if isinstance(probabilities, ProbabilityRows):
        return probabilities
    array = as_array(probabilities, "probabilities")
    if array.ndim == 2 and not len(array):
        raise InvalidDataError("probabilities holds no row")
    if array.ndim != 2 or array.shape[1] < 2:
        advice = "; one probability p of the second of two classes is np.stack([1 - p, p], axis=1)"
        raise InvalidDataError(
            f"probabilities must have shape (N, K) with K of at least 2, not {array.shape}"
            f"{advice if array.ndim == 1 else ''}"
        )
    low, high = array.min(), array.max()
    if (low < 0 or high > 1) and low >= -BEYOND and high <= 1 + BEYOND:
        array = np.clip(array, 0.0, 1.0)
    return kept_rows(array)


def _check_rows(rows: Matrix, start: int) -> None:
    """Refuse rows that are no distributions, such as logits; the first has the number `start`."""
    outside = ~((rows >= 0) & (rows <= 1))
    if outside.any():
        row, column = (int(i) for i in np.argwhere(outside)[0])
        raise InvalidDataError(
            f"probabilities must lie in [0, 1]; row {start + row}, class {column} is {rows[row, column]}"
            " (logits need a softmax first)"
        )
    sums = row_sum(rows)[:, 0]
    wrong = np.abs(sums - 1) > SUM_TOLERANCE
    if wrong.any():
        row = int(np.argmax(wrong))
        raise InvalidDataError(f"probabilities must sum to 1; row {start + row} sums to {sums[row]}")


def effective_count(values: Vector, weights: Vector | None, groups: Indices | None) -> float:
    """Return how many independent samples would give the mean of values its variance (Kish 1965).

    Never more than the weights leave; the number of groups where the values are all the same.
    """
    count = float(len(values)) if weights is None else effective_samples(weights)
    if groups is None and weights is None:
        return count
    surplus = values - np.average(values, weights=weights)
    parts = surplus if weights is None else surplus * weights
    sums = parts
    if groups is not None:  # of some samples, whose numbers may leave gaps
        sums = np.bincount(np.unique(groups, return_inverse=True)[1], parts).astype(np.float64)
    total = float((sums**2).sum())
    if total == 0.0:
        return min(count, float(len(sums)))
    return min(count, float(np.average(surplus**2, weights=weights)) * len(values) ** 2 / total)
