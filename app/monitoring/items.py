"""Reads the items of `POST /feedback`; an invalid item never stops the others."""

from __future__ import annotations

import hashlib
import reprlib
import sys
from typing import Any

import numpy as np

from boxcal.app.http.problems import InvalidParameter
from boxcal.app.monitoring.records import ItemProblem, Label
from boxcal.app.predict.options import Labels
from boxcal.app.settings import limits
from boxcal.app.tables.labels import integer_of
from boxcal.calibrators.monitoring.stored_logits import pack

HINTED = 100
"""Problems whose unknown label is compared with all that are known, which takes milliseconds."""
LONGEST_SOURCE = 64
LONGEST_KEY = 200
LARGEST = sys.float_info.max  # compared with integers exactly, however many digits they have
MEMBERS = {"id", "label", "propensity", "source", "logits", "key"}


class _Malformed(Exception):
    """What is wrong with one item."""


class ItemReader:
    """Reads items, all at once or some at a time: `found` are the labels, `problems` what is wrong."""

    def __init__(self, labels: Labels) -> None:
        self._labels = labels
        self._count = 0
        self.found: list[Label] = []
        self.problems: list[ItemProblem] = []

    def add(self, items: Any) -> None:
        """Read the next items, or the member `items` of a JSON body."""
        if not isinstance(items, list) or not items:
            raise InvalidParameter("items must be a list of at least one object.")
        if self._count + len(items) > limits.MAX_LABELS:
            raise InvalidParameter(
                f"The request has more than {limits.MAX_LABELS:,} items, which is the limit."
            )
        for index, item in enumerate(items, self._count):
            try:
                self.found.append(_item(index, item, self._labels, hints=len(self.problems) < HINTED))
            except _Malformed as error:
                sent = item.get("id") if isinstance(item, dict) else None
                shown = sent[:64] if isinstance(sent, str) else None
                self.problems.append(ItemProblem(index, shown, "malformed", f"items[{index}]: {error}"))
        self._count += len(items)


def _item(index: int, item: Any, labels: Labels, *, hints: bool) -> Label:
    if not isinstance(item, dict):
        raise _Malformed(f"{reprlib.repr(item)} is no object")
    if unknown := item.keys() - MEMBERS:
        raise _Malformed(
            f"there is no member {min(unknown)!r:.100}; an item takes {', '.join(sorted(MEMBERS))}"
        )
    if ("id" in item) == ("key" in item) or ("logits" in item) != ("key" in item):
        raise _Malformed("it needs either `id`, or `logits` and `key`")
    label = _label(item.get("label"), labels, hints=hints)
    propensity, source = item.get("propensity"), item.get("source")
    if propensity is not None and not (
        isinstance(propensity, int | float) and not isinstance(propensity, bool) and 0 < propensity <= 1
    ):
        raise _Malformed(f"propensity is {propensity!r:.100}; it is a probability above 0")
    if source is not None and not _is_text(source, LONGEST_SOURCE):
        raise _Malformed(
            f"source is {source!r:.100}; it is printable text of up to {LONGEST_SOURCE} characters"
        )
    if "id" in item:
        if not isinstance(item["id"], str):
            raise _Malformed(f"id is {item['id']!r:.100}; it is text")
        return Label(index, item["id"], label, propensity, source)
    if not _is_text(item["key"], LONGEST_KEY):
        raise _Malformed(
            f"key is {item['key']!r:.100}; it is printable text of up to {LONGEST_KEY} characters"
        )
    digest = "key-" + hashlib.sha256(item["key"].encode()).hexdigest()[:32]
    return Label(index, digest, label, propensity, source, _logits(item["logits"], len(labels)))


def _label(value: Any, labels: Labels, *, hints: bool) -> int:
    if isinstance(value, str) and value in labels.index:
        return labels.index[value]
    number = integer_of(value) if isinstance(value, str) else value
    if number is None and isinstance(value, str):
        hint = labels.hint(value) if hints else ""
        raise _Malformed(f"label is {value!r:.100}, a class the model does not have{hint}")
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if type(number) is int and number in labels.by_number:
        return labels.by_number[number]
    which = (
        "the name of a class" if labels.named_by_integers else "the name of a class, or an index from 0 to"
    )
    shown = "" if labels.named_by_integers else f" {len(labels) - 1}"
    raise _Malformed(f"label is {value!r:.100}; it is {which}{shown}")


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()


def _logits(values: Any, num_classes: int) -> bytes:
    if not isinstance(values, list) or len(values) != num_classes:
        raise _Malformed(f"logits must be a list of {num_classes} numbers")
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
            raise _Malformed(f"logits[{position}] is {value!r:.100}; logits are finite numbers")
    return pack(np.array([values], np.float64)).tobytes()
