"""Which columns of scores are those of which classes, by name: of files, data frames and models alike."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.scores import integer_of

SCORE = re.compile(r".*(prob|score|logit|decision|odds|confidence).*|p", re.IGNORECASE)
"""What a column of scores of a model of two classes may be called, besides the name of a class."""
MAX_SHOWN = 10


def clean(name: str) -> str:
    """Return a name without space around it, its accents composed (NFC): names that look equal are equal."""
    return unicodedata.normalize("NFC", name).strip()


def without_decimals(text: str) -> str:
    """Write a whole number without decimals; leave any other text as it is."""
    return text if (number := integer_of(text)) is None else str(number)


def with_booleans_named(labels: NDArray[Any], classes: Sequence[str] | None) -> NDArray[Any]:
    """Write booleans as texts where these are the names of both classes; leave other labels as they are."""
    are_names = labels.dtype.kind == "b" and classes is not None and {*classes} == {"False", "True"}
    return labels.astype(str) if are_names else labels


def affixes(columns: Sequence[str], values: Sequence[str]) -> list[tuple[str, str]]:
    """List what may stand around the longest value in the names of columns; nothing at all comes first."""
    if not values:
        return []
    value = max(values, key=len)
    places = ((name, found.span()) for name in columns for found in re.finditer(re.escape(value), name))
    around = {(name[:start], name[end:]) for name, (start, end) in places}
    if value.isdecimal():  # no part of a longer number
        around = {(a, b) for a, b in around if not (a.rstrip("0")[-1:].isdecimal() or b[:1].isdecimal())}
    return sorted(around, key=lambda pair: (len(pair[0]) + len(pair[1]), pair))


def class_columns(columns: Sequence[str], classes: Sequence[str]) -> list[str]:
    """Columns of the classes: their names, alone or with a common start or end, or their indices."""
    indices = list(map(str, range(len(classes))))
    if set(columns) == set(indices) and set(classes) != set(indices):
        return indices
    there = set(columns)
    for start, end in affixes(columns, classes):
        if all(f"{start}{name}{end}" in there for name in classes):
            return [f"{start}{name}{end}" for name in classes]
    return list(classes)


def class_of_score(column: str, classes: Sequence[str]) -> int | None:
    """Return the one of two classes that the only column of scores names; None if it names neither."""
    for index in (1, 0):
        name = re.escape(classes[index])
        if column == classes[index] or re.fullmatch(rf".*[_ .:-]{name}|{name}[_ .:-].*", column):
            return index
    return None


def are_numbered(columns: Sequence[Any]) -> bool:
    """Whether columns have the names that pandas, or polars, gives to columns without names."""
    written, count = list(map(str, columns)), range(len(columns))
    if all(isinstance(name, str) for name in columns):
        return written == [f"column_{index}" for index in count]
    return written == [str(index) for index in count]


def class_order(
    columns: Sequence[Any], classes: Sequence[Any], advice: str = "", fitted: Sequence[str] = ()
) -> list[int] | None:
    """Match the named columns of a data frame with the classes.

    Returns for each class its column; None where the columns have no names, and are those of the classes as
    they are. `advice`: what else the refusal says; `fitted`: the columns of the fit, if they had names.

    Raises
    ------
    InvalidDataError
        The names are not those of the classes.
    """
    if are_numbered(columns):
        return None
    names, known = ([clean(str(name)) for name in given] for given in (columns, classes))
    for writes in (str, without_decimals):
        own = list(map(writes, names))
        wanted = class_columns(own, list(map(writes, known)))
        if sorted(own) == sorted(wanted) and len(set(own)) == len(own):
            position = {name: index for index, name in enumerate(own)}
            return [position[name] for name in wanted]
    order = f"`fit`: {_listed(fitted)}" if fitted else "the classes"
    raise InvalidDataError(
        f"the columns are {_listed(columns)}, and the classes are {_listed(known)}: name each column by its "
        f"class{advice}; or give an array, with the columns in the order of {order}"
    )


def _listed(names: Sequence[Any]) -> str:
    more = f" and {len(names) - MAX_SHOWN:,} more" if len(names) > MAX_SHOWN else ""
    return f"{[str(name)[:50] for name in names[:MAX_SHOWN]]}{more}"
