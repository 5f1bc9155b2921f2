"""Reads the items of `POST /feedback`, from JSON or CSV; an invalid item never stops the others."""

from __future__ import annotations

import csv
import hashlib
import io
import math
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from boxcal.app.errors import InvalidParameter, MalformedBody
from boxcal.app.monitoring.records import LARGEST, Label, Problem
from boxcal.app.predict.options import Labels

MAX_ITEMS = 50_000
LONGEST_SOURCE = 64
LONGEST_KEY = 200
MEMBERS = {"id", "label", "propensity", "source", "logits", "key"}
COLUMNS = ("id", "label", "propensity", "source")

Read = tuple[list[Label], list[Problem]]


class _Malformed(Exception):
    """What is wrong with one item."""


def read_items(items: Any, labels: Labels) -> Read:
    """Read the member `items` of a JSON body: the labels, and what is wrong with the others.

    Raises
    ------
    InvalidParameter
        It is no list, is empty, or has more than `MAX_ITEMS` items.
    """
    if not isinstance(items, list) or not items:
        raise InvalidParameter("items must be a list of at least one object.")
    _check_count(len(items))
    found: list[Label] = []
    problems: list[Problem] = []
    for index, item in enumerate(items):
        try:
            found.append(_item(index, item, labels))
        except _Malformed as error:
            sent = item.get("id") if isinstance(item, dict) else None
            shown = sent[:64] if isinstance(sent, str) else None
            problems.append(Problem(index, shown, "malformed", f"items[{index}]: {error}"))
    return found, problems


def read_csv(body: bytes, labels: Labels) -> Read:
    """Read a CSV file whose first line names the columns `id`, `label` and perhaps `propensity`, `source`.

    A label is the name of a class or, where no class has that name, an index.

    Raises
    ------
    MalformedBody, InvalidParameter
        It is not UTF-8 or has other columns; it has no row, or more than `MAX_ITEMS`.
    """
    try:
        rows = csv.reader(io.StringIO(body.decode("utf-8-sig")), strict=True)
        header = next(rows, [])
        if not {"id", "label"} <= set(header) or not set(header) <= set(COLUMNS):
            raise MalformedBody(
                f"The first line of the CSV has the columns {header!r:.200}; it needs id and label, and may "
                "have propensity and source."
            )
        items: list[Any] = []
        for row in rows:
            _check_count(len(items) + 1)
            items.append(_from_row(header, row, labels) if row else None)
    except (UnicodeDecodeError, csv.Error) as error:
        raise MalformedBody(f"The body is not CSV: {error}.") from error
    return read_items([item for item in items if item is not None], labels)


def _check_count(count: int) -> None:
    if count > MAX_ITEMS:
        raise InvalidParameter(f"The request has more than {MAX_ITEMS:,} items, which is the limit.")


def _from_row(header: Sequence[str], row: Sequence[str], labels: Labels) -> Any:
    if len(row) != len(header):
        return row
    item: dict[str, Any] = {name: value for name, value in zip(header, row, strict=True) if value}
    label, propensity = item.get("label", ""), item.get("propensity")
    if label not in labels.index and label.isdecimal():
        item["label"] = int(label)
    if propensity is not None:
        try:
            item["propensity"] = float(propensity)
        except ValueError:
            return item
    return item


def _item(index: int, item: Any, labels: Labels) -> Label:
    if not isinstance(item, dict):
        raise _Malformed(f"{reprlib.repr(item)} is no object")
    if unknown := item.keys() - MEMBERS:
        raise _Malformed(
            f"there is no member {min(unknown)!r:.100}; an item takes {', '.join(sorted(MEMBERS))}"
        )
    if ("id" in item) == ("key" in item) or ("logits" in item) != ("key" in item):
        raise _Malformed("it needs either `id`, or `logits` and `key`")
    label = _label(item.get("label"), labels)
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
    own = "key-" + hashlib.sha256(item["key"].encode()).hexdigest()[:32]
    return Label(index, own, label, propensity, source, _logits(item["logits"], len(labels)))


def _label(value: Any, labels: Labels) -> int:
    if isinstance(value, str):
        if value not in labels.index:
            close = labels.similar(value)
            hint = f"; did you mean {close!r}?" if close else ""
            raise _Malformed(f"label is {value!r:.100}, a class the model does not have{hint}")
        return labels.index[value]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < len(labels):
        raise _Malformed(
            f"label is {value!r:.100}; it is the name of a class, or an index from 0 to {len(labels) - 1}"
        )
    return value


def _is_text(value: Any, longest: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= longest and value.isprintable()


def _logits(values: Any, num_classes: int) -> bytes:
    if not isinstance(values, list) or len(values) != num_classes:
        raise _Malformed(f"logits must be a list of {num_classes} numbers")
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Malformed(f"logits[{position}] is {value!r:.100}; logits are finite numbers")
    row = np.array([min(LARGEST, max(-LARGEST, value)) for value in values], np.float16)
    return row.tobytes()
