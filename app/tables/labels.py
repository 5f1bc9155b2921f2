"""Labels and the names of classes: one meaning of a label, and one order of the classes, in every format."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from boxcal.app.http.problems import InvalidUpload
from boxcal.calibrators.class_columns import clean, with_booleans_named, without_decimals
from boxcal.calibrators.errors import hint
from boxcal.calibrators.scores import EXACT, integer_of, names_are_integers

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

INDEX, NAME = "index", "name"
CLASSES = "classes"
BOOLEANS = {"false": 0, "true": 1}
WHOLE = re.compile(r"-?(0|[1-9]\d*)(\.0*)?", re.ASCII)


@dataclass(frozen=True)
class Declared:
    """What the sender says of a file that its content does not; see `FitFields`."""

    scores: str | None = None  # What the scores are, one of `boxcal.calibrators.scores.KINDS`
    label: str | None = None  # The column of the labels
    group: str | None = None  # The column of the groups
    # The names of the columns of the classes, in the order of their indices
    classes: tuple[str, ...] | None = None
    ignore: tuple[str, ...] = ()  # Columns that are left out
    labels_as: str | None = None  # Whether numbers among the labels are the `index` or the `name` of a class
    class_mix: str | None = None  # How the samples were drawn: `as_traffic` or `resampled`


NOTHING = Declared()


def label_names(texts: Iterable[str]) -> set[str]:
    """Give the labels that texts write: whole numbers without decimals, if all are; `01` is a name."""
    names = {clean(text) for text in texts}
    return set(map(without_decimals, names)) if all(map(WHOLE.fullmatch, names)) else names


def are_indices(classes: Sequence[str]) -> bool:
    """Whether classes have no other names than their indices."""
    return list(classes) == [str(index) for index in range(len(classes))]


def as_indices(
    labels: Array, classes: Sequence[str] | None, first: int = 0, labels_as: str | None = None
) -> Indices:
    """Turn labels (N,) into class indices; their range is not checked here.

    `classes`: the class names; None where they are not known, and labels must be indices.
    """
    labels = with_booleans_named(labels, classes)
    if labels.dtype.kind in "iub":
        if labels.dtype.kind == "u" and (large := labels > np.iinfo(np.int64).max).any():
            row = int(large.argmax())
            raise InvalidUpload(f"labels[{first + row}] is {labels[row]}, which is too large for an index.")
        numbers = labels.astype(np.int64)
    elif labels.dtype.kind == "f" and not _names_a_fraction(labels, classes):
        numbers = _whole(labels, first)
    else:
        texts = labels if labels.dtype.kind in "UOf" else _decoded(labels, first)
        return _of_texts(texts.astype(str), classes, first, labels_as)
    if classes is None or not _is_name(classes, labels_as):
        return numbers
    index_of = {integer_of(name): index for index, name in enumerate(classes)}
    distinct, inverse = np.unique(numbers, return_inverse=True)
    for number in distinct.tolist():
        if number not in index_of:
            row = first + int((numbers == number).argmax())
            raise InvalidUpload(f"labels[{row}] is {number}, {_both_readings(classes, number)}.")
    return np.array([index_of[number] for number in distinct.tolist()], np.int64)[inverse]


def _names_a_fraction(labels: Array, classes: Sequence[str] | None) -> bool:
    """Whether floats write the names of classes that are no integers, such as `1.5`."""
    names = {name for name in map(clean, classes or ()) if integer_of(name) is None}
    return bool(np.isfinite(labels).all()) and not names.isdisjoint(map(str, np.unique(labels)))


def _is_name(classes: Sequence[str], labels_as: str | None) -> bool:
    return names_are_integers(classes) if labels_as is None else labels_as == NAME


def _both_readings(classes: Sequence[str], number: int) -> str:
    other = f"as an index, with labels_as={INDEX}, it would be "
    other += f"the class {classes[number]!r:.50}" if 0 <= number < len(classes) else "out of range, too"
    return f"which is the name of no class ({shown(classes)}); {other}"


def _of_texts(names: Array, classes: Sequence[str] | None, first: int, labels_as: str | None) -> Indices:
    """Find texts among the names; the others are numbers that a text format writes."""
    index_of = {} if classes is None else {clean(name): index for index, name in enumerate(classes)}
    index_of |= {} if classes is None else {name: index for index, name in enumerate(classes)}
    distinct, inverse = np.unique(names, return_inverse=True)
    found = [index_of.get(str(name), index_of.get(clean(str(name)))) for name in distinct]
    if None not in found:
        return np.array(found, np.int64)[inverse]
    numbers = [integer_of(str(name)) for name in distinct]
    if BOOLEANS.keys().isdisjoint(map(str.lower, index_of)):
        numbers = [BOOLEANS.get(str(name).lower(), one) for name, one in zip(distinct, numbers, strict=True)]
    is_mixed = classes is not None and not _is_name(classes, labels_as) and found.count(None) < len(found)
    if None not in numbers and not is_mixed:
        return as_indices(np.array(numbers)[inverse], classes, first, labels_as)
    unknown = [str(name) for name, index in zip(distinct, found, strict=True) if index is None]
    name = next((one for one in unknown if integer_of(one) is None), unknown[0])
    row = int(np.flatnonzero(names == name)[0])
    why = (
        "the class names are not known here: name them in the order of the scores with classes=A,B,C, or in "
        "an array `classes`; or give indices as labels."
    )
    if classes is not None:
        why = f"which is no class of the model{hint(name, classes) or f' ({shown(classes)}).'}"
    raise InvalidUpload(f"labels[{first + row}] is {name!r:.200}, {why}")


def _decoded(labels: Array, first: int) -> Array:
    """Decode labels of bytes."""
    try:
        return np.char.decode(labels, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidUpload(f"labels from {first} on hold bytes that are not UTF-8: {error}.") from error


def _whole(values: Array, first: int) -> Indices:
    """Convert floats that are integers."""
    exact = values.astype(np.float64)  # EXACT is infinite in float16
    wrong = ~(np.isfinite(exact) & (np.abs(exact) < EXACT) & (exact == np.round(exact)))
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidUpload(f"labels[{first + row}] is {values[row]}; class indices are integers.")
    return values.astype(np.int64)


def check_shape(shape: tuple[int, ...]) -> None:
    """Accept labels of the shapes (N,) and (N, 1), and matrices, which `refuse_matrix` then names."""
    if not shape or len(shape) > 2 or shape[1:] == (0,):
        raise InvalidUpload(f"`labels` must have the shape (N,), got {shape}.")


def refuse_matrix(labels: Array) -> None:
    """Refuse labels (N, K): a one-hot encoding, or several labels of a sample at once."""
    if labels.ndim < 2 or labels.shape[1] == 1:
        return
    chosen = np.count_nonzero(labels, axis=1)
    none, several = int((chosen == 0).sum()), int((chosen > 1).sum())
    if not none and not several:
        raise InvalidUpload(
            f"`labels` has the shape {labels.shape}, which looks like a one-hot encoding; send class indices "
            "(N,), such as labels.argmax(axis=1)."
        )
    raise InvalidUpload(
        f"`labels` has the shape {labels.shape}, with several labels at once: {several:,} rows have more "
        f"than one, {none:,} have none. A calibrator here has one true class for each sample; fit each label "
        "as a model of two classes."
    )


def names_of(classes: Array) -> list[str]:
    """Return the names that an array `classes` gives the columns of the scores."""
    if classes.dtype.kind not in "iUS":
        raise InvalidUpload(f"`{CLASSES}` must hold names or integers, got the dtype {classes.dtype}.")
    if classes.ndim != 1:
        raise InvalidUpload(f"`{CLASSES}` must have the shape (K,), got {classes.shape}.")
    try:
        return [
            str(name) for name in (np.char.decode(classes, "utf-8") if classes.dtype.kind == "S" else classes)
        ]
    except UnicodeDecodeError as error:
        raise InvalidUpload(f"`{CLASSES}` holds bytes that are not UTF-8: {error}.") from error


def column_order(known: Sequence[str] | None, own: Sequence[str] | None) -> list[int] | None:
    """Match the classes of a file with those known, by name.

    `known`: of the model or the calibrator; None where they are not known. `own`: of the file, in the order
    of its columns; None where it names none. Returns for each known class the column of the file; None to
    take the columns as they are.
    """
    if own is None or (known is not None and list(known) == list(own)):
        return None
    own = [clean(name) for name in own]
    if len(set(own)) < len(own):
        raise InvalidUpload("`classes` names a class twice.")
    if known is None:
        return None
    known = [clean(name) for name in known]
    position = {name: index for index, name in enumerate(own)}
    if missing := [name for name in known if name not in position]:
        extra = [name for name in own if name not in set(known)]
        said = f"the file has no class {shown(missing)}"
        raise InvalidUpload(
            f"The classes are not those of the model: {said}"
            + (f", but has {shown(extra)}." if extra else ".")
        )
    if len(own) > len(known):
        extra = [name for name in own if name not in set(known)]
        raise InvalidUpload(f"The classes are not those of the model: the file also has {shown(extra)}.")
    return [position[name] for name in known]


def shown(names: Iterable[str]) -> str:
    """List the first five names, and count the others."""
    listed = [f"{name!r:.50}" for name in names]
    return ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
