"""Checks validation data and converts them to float64 and int64, as the first step of every fit.

Folds of a validation set; the copies of a row, and the rows of a group, are always in the same fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.array_ops import mean, row_max
from boxcal.calibrators.class_columns import with_booleans_named
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.label_checks import class_offsets
from boxcal.calibrators.row_statistics import RowStatistics, Sketch, effective_samples
from boxcal.calibrators.scores import integer_of, names_are_integers
from boxcal.calibrators.threads import block_rows, over_blocks

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
Backbone = Callable[[Any], Any]
"""From a tensor of torch to another one."""

FEWEST_SAMPLES = 2

ClassMix = Literal["as_traffic", "resampled"]
"""How the samples were drawn: in the proportions of the requests, or by class."""


@dataclass(frozen=True)
class ValidationSet:
    """Checked validation data.

    Attributes
    ----------
    logits : ndarray
        (N, K) float32 or float64. Large sets are worked on in blocks of rows, each converted to float64.
    labels : ndarray
        (N,) int64.
    features : ndarray or None
        (N, D) float64: input of the last layer of the backbone.
    head : tuple of ndarray or None
        Weight (K, D) and bias (K,) of that layer, float64.
    inputs : ndarray or None
        (N, ...) float32: input of the backbone.
    backbone : callable or None
        From a tensor of inputs to one of logits (N, K), differentiable in the inputs.
    groups : ndarray or None
        (N,) int64: samples of one number are not independent, and share a fold.
    weights : ndarray or None
        (N,) float64, above 0, of mean 1: how much each sample counts.
    classes : sequence of str or None
        Names of the K classes, by which warnings call them.
    class_mix : str or None
        `as_traffic` where classes are said to be as frequent as among requests; `resampled` where samples
        were drawn by class, and have weights for it.
    """

    logits: NDArray[Any]
    labels: Indices
    features: Floats | None = None
    head: tuple[Floats, Floats] | None = None
    inputs: NDArray[np.float32] | None = None
    backbone: Backbone | None = None
    groups: Indices | None = None
    weights: Floats | None = None
    classes: Sequence[str] | None = None
    class_mix: ClassMix | None = None

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def effective(self) -> float:
        """The effective number of samples: N, or (sum of weights)^2 / (sum of their squares) (Kish 1965)."""
        return len(self) if self.weights is None else effective_samples(self.weights)

    @property
    def num_classes(self) -> int:
        return int(self.logits.shape[1])

    def name_of(self, index: int) -> str:
        """Return the name of a class in quotes, or its index where it has no other name."""
        name = str(index) if self.classes is None else self.classes[index]
        return name if name == str(index) else f"{name!r:.50}"

    @cached_property
    def scores(self) -> Floats:
        """The logits (N, K) less the mean of their row, in float64: what maps of logits read."""
        wide = np.empty(self.logits.shape)

        def work(rows: slice) -> None:
            part = self.logits[rows].astype(np.float64)
            np.subtract(part, mean(part), out=wide[rows])

        for _ in over_blocks(work, len(self), block_rows(self.num_classes)):
            pass
        return wide

    @cached_property
    def shows_errors(self) -> bool:
        """Whether some predicted label is wrong."""
        return bool((self.logits.argmax(axis=1) != self.labels).any())

    @cached_property
    def facts(self) -> RowStatistics:
        """What the checks of the data ask of every row."""
        return RowStatistics.of(self.logits, self.labels)

    @cached_property
    def units(self) -> Indices | None:
        """One number (N,) for all rows of a group, and for all copies; None if all rows are independent."""
        copies = np.unique(self.facts.copies, return_inverse=True)[1].astype(np.int64)
        first = int(copies.max()) + 1
        if self.groups is None:
            return None if first == len(self) else copies
        from scipy.sparse import coo_array  # noqa: PLC0415 - only fits need it
        from scipy.sparse.csgraph import connected_components  # noqa: PLC0415

        size = first + int(self.groups.max()) + 1
        edges = coo_array((np.ones(len(copies)), (copies, first + self.groups)), shape=(size, size))
        parts = connected_components(edges, directed=False)[1]
        return np.unique(parts[copies], return_inverse=True)[1].astype(np.int64)

    @cached_property
    def sketch(self) -> Sketch:
        """Hashes of some rows, by which a later fit tells that it is given the same data."""
        if self.logits.dtype == np.float32:
            return Sketch.of_hashes(self.facts.hashes)
        return Sketch.of(self.logits)

    @cached_property
    def scale(self) -> float:
        """Mean distance of the largest logit to the mean of its row; 1 where all logits are equal."""

        def work(rows: slice) -> Floats:
            part = self.logits[rows].astype(np.float64)
            distances: Floats = row_max(part) - mean(part)
            return distances[:, 0]

        distances = np.concatenate(list(over_blocks(work, len(self), block_rows(self.num_classes))))
        return float((distances if self.weights is None else distances * self.weights).mean()) or 1.0

    def with_logits(self, logits: NDArray[Any]) -> ValidationSet:
        """Return the same samples, in the same folds, with other logits (N, K)."""
        other = replace(self, logits=logits)
        vars(other)["units"] = self.units
        return other

    def rows(self, index: NDArray[Any]) -> ValidationSet:
        """Return a subset of the samples."""
        return replace(
            self,
            logits=self.logits[index],
            labels=self.labels[index],
            features=None if self.features is None else self.features[index],
            inputs=None if self.inputs is None else self.inputs[index],
            groups=None if self.groups is None else self.groups[index],
            weights=None if self.weights is None else _of_mean_1(self.weights[index]),
        )


def as_array(values: Any, name: str) -> NDArray[Any]:
    """Return a tensor, array or nested list as a NumPy array of numbers."""
    if hasattr(values, "detach"):  # a tensor of torch
        values = values.detach().cpu()
        if str(values.dtype) == "torch.bfloat16":
            values = values.float()
        values = values.numpy()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidDataError(f"{name} is not a rectangular array: {error}") from error
    if array.dtype.kind == "O" and hasattr(values, "to_numpy"):  # numbers of pandas that may be missing
        with suppress(TypeError, ValueError):
            array = values.to_numpy(dtype=np.float64, na_value=np.nan)
    if array.dtype.kind not in "fiub":
        raise InvalidDataError(f"{name} must hold numbers, not {array.dtype}")
    if np.ma.is_masked(values):
        raise InvalidDataError(f"{name} has masked values: leave these rows out")
    return array


def check_logits(logits: Any) -> NDArray[Any]:
    """Check that logits are a finite (N, K) matrix with K of at least 2; return them as float32 or float64.

    Raises
    ------
    InvalidDataError
        If a value is invalid; the message names the first row, column and value.
    """
    array = as_array(logits, "logits")
    if array.ndim != 2:
        advice = "; log-odds s of the second of two classes are np.stack([0 * s, s], axis=1)"
        raise InvalidDataError(
            f"logits must have shape (N, K), not {array.shape}{advice if array.ndim == 1 else ''}"
        )
    if array.shape[1] < 2:
        raise InvalidDataError(f"logits must have at least 2 classes, not K = {array.shape[1]}")
    rows = block_rows(array.shape[1])
    parts = (array[first : first + rows] for first in range(0, len(array), rows))
    infinite = sum(part.size - int(np.count_nonzero(np.isfinite(part))) for part in parts)
    if infinite:
        row, column = (int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise InvalidDataError(
            f"logits must be finite; row {row}, class {column} is {float(array[row, column])}"
            f" ({infinite} such values in all)"
        )
    kept = np.float32 if array.dtype in (np.float16, np.float32) else np.float64
    return np.ascontiguousarray(array, dtype=kept)


def named_columns(scores: Any) -> list[str] | None:
    """Return the names of the columns of a DataFrame; None for other scores."""
    columns = getattr(scores, "columns", None)
    if columns is None:
        return None
    names = [str(name) for name in columns]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidDataError(f"the logits have more than one column {twice!r:.100}")
    return names


def label_indices(labels: Any, classes: list[str]) -> Any:
    """Turn labels that name classes into their indices: texts, and numbers or booleans that name all classes.

    Other labels are left as they are. Integers that are the indices of their classes name nothing.

    Raises
    ------
    InvalidDataError
        Naming the label that is no class.
    """
    found = with_booleans_named(np.asarray(labels), classes)
    if found.dtype.kind == "O" and all(type(label) is int for label in found.tolist()):  # `Int64` of pandas
        found = found.astype(np.int64)
    written: Callable[[Any], Any] = str
    if found.dtype.kind not in "OU":
        is_whole = found.dtype.kind in "iub" or (found.dtype.kind == "f" and (found == np.floor(found)).all())
        if not is_whole or not names_are_integers(classes):
            return found
        found, written = found.astype(np.int64), lambda name: integer_of(str(name))
    index = {written(name): position for position, name in enumerate(classes)}
    for row, name in enumerate(found.tolist()):
        if written(name) not in index:
            raise InvalidDataError(f"labels[{row}] is {name!r:.100}, which names no column of the logits")
    return np.array([index[written(name)] for name in found.tolist()])


def check_labels(labels: Any, num_samples: int, num_classes: int) -> Indices:
    """Check that labels are N class indices below K; return them as int64.

    Raises
    ------
    InvalidDataError
        If a label is invalid; the message names the first row and value.
    """
    try:
        array = as_array(labels, "labels")
    except InvalidDataError as error:
        raise InvalidDataError(
            f"{error}: class indices, 0 to {num_classes - 1}; `fit` takes names with a DataFrame of logits,"
            " whose columns they name"
        ) from error
    if array.ndim != 1:
        is_one_hot = array.shape == (num_samples, num_classes)
        advice = "; of a one-hot encoding take `argmax(axis=1)`" if is_one_hot else ""
        raise InvalidDataError(f"labels must have shape (N,), not {array.shape}{advice}")
    if len(array) != num_samples:
        raise InvalidDataError(f"there are {num_samples} rows of logits but {len(array)} labels")
    whole = np.isfinite(array) & (array == np.floor(array)) if array.dtype.kind == "f" else True
    good = whole & (array >= 0) & (array < num_classes)
    if not np.all(good):
        row = int(np.argmin(good))
        raise InvalidDataError(
            f"labels must be class indices 0 to {num_classes - 1}; row {row} is {array[row].item()}"
            + ("; they go from 1: subtract 1" if (array.min(), array.max()) == (1, num_classes) else "")
        )
    return array.astype(np.int64)


def check_validation_set(
    logits: Any,
    labels: Any,
    *,
    features: Any = None,
    head: Any = None,
    inputs: Any = None,
    backbone: Backbone | None = None,
    groups: Any = None,
    sample_weight: Any = None,
    classes: Sequence[str] | None = None,
    class_mix: ClassMix | None = None,
) -> ValidationSet:
    """Check a validation set: finite logits (N, K), N and K of at least 2, N labels below K, and the rest.

    Samples of weight 0 are left out, and equal weights are none. Samples drawn by class get weights.

    Raises
    ------
    InvalidDataError
        If the data are invalid; the message names the row, shape or value.
    """
    checked = check_logits(logits)
    num_samples, num_classes = checked.shape
    if num_samples < FEWEST_SAMPLES:
        raise InvalidDataError(f"a fit needs at least {FEWEST_SAMPLES} samples, not N = {num_samples}")
    indices = check_labels(labels, num_samples, num_classes)
    own_features = None if features is None else _finite(features, "features", (num_samples, None))
    own_head = None
    if head is not None:
        weight, bias = head
        width = None if own_features is None else own_features.shape[1]
        own_head = (
            _finite(weight, "the head's weight", (num_classes, width)),
            _finite(bias, "the head's bias", (num_classes,)),
        )
    own_inputs = None
    if inputs is not None:
        own_inputs = np.ascontiguousarray(as_array(inputs, "inputs"), dtype=np.float32)
        if len(own_inputs) != num_samples:
            raise InvalidDataError(f"there are {num_samples} rows of logits but {len(own_inputs)} inputs")
    own_groups = None if groups is None else check_groups(groups, num_samples)
    if class_mix not in (None, *get_args(ClassMix)):
        raise InvalidDataError(f"class_mix must be `as_traffic` or `resampled`, not {class_mix!r:.100}")
    data = ValidationSet(
        checked,
        indices,
        own_features,
        own_head,
        own_inputs,
        backbone,
        own_groups,
        classes=classes,
        class_mix=class_mix,
    )
    weights = None if sample_weight is None else check_weights(sample_weight, num_samples)
    if class_mix == "resampled":
        if weights is not None:
            raise InvalidDataError(WEIGHED_TWICE)
        weights = _resampled_weights(data)
    return data if weights is None else _weighted(data, weights)


def check_weights(weights: Any, num_samples: int) -> Floats:
    """Check the weights of N samples: finite, not negative, and not all 0; return them as float64.

    Raises
    ------
    InvalidDataError
        Naming the row and the value.
    """
    array = as_array(weights, "sample_weight")
    if array.shape != (num_samples,):
        raise InvalidDataError(f"sample_weight must have shape ({num_samples},), not {array.shape}")
    good = np.isfinite(array) & (array >= 0)
    if not good.all():
        row = int(good.argmin())
        raise InvalidDataError(
            f"sample_weight must be finite and not negative; row {row} is {array[row].item()}"
        )
    if not array.any():
        raise InvalidDataError("sample_weight must not be zero for every sample")
    return array.astype(np.float64)


WEIGHED_TWICE = (
    "samples have either `sample_weight` or class_mix=resampled, which makes weights of its own: with weights"
    " that give classes the proportions of the requests, class_mix=as_traffic"
)


def _resampled_weights(data: ValidationSet) -> Floats:
    """Weigh samples that were drawn by class (N,), so that classes are as frequent as the logits expect."""
    offsets = class_offsets(data.logits, data.labels)
    if offsets is None:
        raise InvalidDataError(
            "class_mix=resampled takes the class frequencies from the logits, of which these samples show too"
            " little: give each sample as `sample_weight` its class's share of the requests over its share of"
            " the samples"
        )
    weights: Floats = np.exp(offsets.min() - offsets)[data.labels]
    return weights


def _weighted(data: ValidationSet, weights: Floats) -> ValidationSet:
    """Leave out samples of weight 0, and give the others their weights unless these are equal."""
    weights = weights / weights.max()  # the smallest of weights that differ much become 0
    used = weights > 0
    if not used.all():
        count = int(used.sum())
        if count < FEWEST_SAMPLES:
            raise InvalidDataError(f"a fit needs at least {FEWEST_SAMPLES} samples of weight above 0")
        data, weights = data.rows(used), weights[used]
    if (weights == weights[0]).all():
        return data
    return replace(data, weights=_of_mean_1(weights))


def _of_mean_1(weights: Floats) -> Floats:
    scaled = weights / weights.max()  # whose sum is finite
    mean_1: Floats = scaled / scaled.mean()
    return mean_1


def check_groups(groups: Any, num_samples: int) -> Indices:
    """Turn the groups of N samples, numbers or texts, into int64 (N,).

    Raises
    ------
    InvalidDataError
        There is not one for each sample, or a single one for all.
    """
    array = groups.numpy() if hasattr(groups, "detach") else np.asarray(groups)
    if array.dtype.kind == "O":  # a column of pandas
        array = _texts(array)
    if array.shape != (num_samples,):
        raise InvalidDataError(f"groups must have shape ({num_samples},), not {array.shape}")
    if array.dtype.kind not in "iufUSbM":
        raise InvalidDataError(f"groups must be numbers or texts, not {array.dtype}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidDataError(f"groups must be finite; row {int(np.isfinite(array).argmin())} is not")
    names, numbers = np.unique(array, return_inverse=True)
    if len(names) < 2:
        raise InvalidDataError(
            f"all samples belong to the group {names[0].item()!r}; a fit is judged on groups it has not seen"
        )
    return numbers.astype(np.int64)


def _texts(groups: NDArray[Any]) -> NDArray[Any]:
    """Turn objects into texts; what is neither a text nor a whole number is named."""
    for row, one in enumerate(groups.reshape(-1)):
        if not isinstance(one, str | int | np.integer):
            raise InvalidDataError(f"groups must be numbers or texts; row {row} is {one!r}")
    return groups.astype(np.str_)


def _finite(values: Any, name: str, shape: tuple[int | None, ...]) -> Floats:
    """Check that an array is finite and of a shape, in which None stands for any size."""
    array = as_array(values, name)
    fits = array.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, array.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("D" if size is None else str(size) for size in shape)
        raise InvalidDataError(f"{name} must have shape ({wanted}), not {array.shape}")
    finite = np.isfinite(array)
    if not finite.all():
        where = tuple(int(i) for i in np.argwhere(~finite)[0])
        raise InvalidDataError(f"{name} must be finite; the entry at {where} is {float(array[where])}")
    return np.ascontiguousarray(array, dtype=np.float64)


FOLDS = 5
"""Of the cross-validations of a fit."""


def fold_masks(data: ValidationSet, folds: int, seed: int) -> list[NDArray[np.bool_]]:
    """Assign the samples to folds at random, and give a mask (N,) of each.

    Copies of a row, and rows of a group, share a fold, so that no fit is judged on a row that it has seen;
    where fewer than `folds` rows or groups differ, there are fewer folds. Classes are not spread evenly:
    held-out samples would then have just the class frequencies of the others, which favours methods that fit
    class frequencies by about (K - 1) / N nats.
    """
    group = np.arange(len(data)) if data.units is None else data.units
    rng = np.random.default_rng(seed)
    fold_of = rng.permutation(np.arange(int(group.max()) + 1) % folds)[group]
    masks = [fold_of == fold for fold in range(folds)]
    if not group.any():
        raise InvalidDataError(
            f"all {len(data):,} rows are copies of one; a fit is judged on rows that it has not seen"
        )
    return [mask for mask in masks if mask.any() and not mask.all()]
