"""Parses a large JSON document in small pieces, so that no step holds the interpreter for more than some ms.

orjson parses 32 MiB in one call of several hundred milliseconds, during which no other thread runs, the event
loop's included. This module finds the structure of the document and gives orjson pieces of at most 64 KiB.

Python's garbage collector also stops all threads, and looks at every item of every list. So the long lists of
a document are folded: each run of items becomes an array before the next is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from boxcal.app.http.problems import BodyTooLarge, BoxcalError, InvalidParameter, MalformedBody
from boxcal.app.predict.interpreter import release_interpreter

Body = bytes | bytearray

PIECE = 64 * 1024
"""Bytes; about a millisecond of parsing."""
MAX_VALUES = 8_000_000
MAX_STRINGS = 500_000
MAX_CONTAINERS = 250_000
LIMITS = (
    ("values", b",", MAX_VALUES),
    ("quotes", b'"', 2 * MAX_STRINGS),
    ("lists and objects", b"[{", MAX_CONTAINERS),
)
MAX_MEMBERS = 100_000
"""Of one object that is larger than a piece."""
MAX_DEPTH = 16
"""Of lists and objects."""
STRUCTURE = re.compile(rb'["\[\]{}]')
SCALAR = re.compile(rb"[^ \t\r\n,\[\]{}\"]+")
SPACE = re.compile(rb"[ \t\r\n]*")
QUOTE, COMMA, COLON, OPEN_LIST, CLOSE_LIST, OPEN_OBJECT, CLOSE_OBJECT = b'",:[]{}'


@dataclass(frozen=True, slots=True)
class Fold:
    """What becomes of a long list that is a member of the document.

    Attributes
    ----------
    of_run
        Called with a run of items and the position of the first; what it returns is kept. In an item that is
        an object of more than a piece, strings of more than a piece may be `memoryview`s of their UTF-8.
    max_values
        Most numbers or other values of one item.
    """

    of_run: Callable[[list[Any], int], Any]
    max_values: int


@dataclass(frozen=True, slots=True)
class Folded:
    """A long list after its fold.

    Attributes
    ----------
    parts
        What the fold returned for each run of items.
    count
        How many items there were.
    """

    parts: list[Any]
    count: int


def parse(body: Body, folds: Mapping[str, Fold] | None = None) -> Any:
    """Parse a JSON document of any size; blocks, so large documents are parsed in a thread.

    Parameters
    ----------
    folds
        Members of a large document that become `Folded`, if they are lists of more than a piece.

    Raises
    ------
    MalformedBody
        It is not JSON, or nested too deeply.
    BodyTooLarge
        It has more values, lists and objects, or members of one object, than the limits.
    """
    if len(body) <= PIECE:
        return orjson.loads(body)
    _check_counts(body)
    try:
        start = _space(body, 0)
        end = _end(body, start)
        if _space(body, end) != len(body):
            raise _malformed(end)
        if body[start] == OPEN_OBJECT and folds:
            return _object(body, start, end, folds)
        return _value(body, start, end)
    except IndexError:
        raise _malformed(len(body)) from None


def _check_counts(body: Body) -> None:
    for name, marks, limit in LIMITS:
        if (count := _count(body, 0, len(body), marks)) > limit:
            raise BodyTooLarge(f"The JSON body has about {count:,} {name}; the limit is {limit:,}.")


def _count(body: Body, start: int, end: int, marks: bytes) -> int:
    symbols = np.frombuffer(body, np.uint8)[start:end]
    count = 0
    for place in range(0, len(symbols), 16 * PIECE):
        block = symbols[place : place + 16 * PIECE]
        count += sum(int(np.count_nonzero(block == mark)) for mark in marks)
        release_interpreter()
    return count


def _value(body: Body, start: int, end: int) -> Any:
    if _is_long_and_plain(body, start, end):
        return text_of(memoryview(body)[start + 1 : end - 1])
    if end - start <= PIECE or body[start] not in (OPEN_LIST, OPEN_OBJECT):
        return orjson.loads(memoryview(body)[start:end])
    if body[start] == OPEN_OBJECT:
        return _object(body, start, end)
    return _list(body, start, end)


def text_of(view: memoryview) -> str:
    """Decode a long string.

    Raises
    ------
    MalformedBody
        It is not UTF-8.
    """
    try:
        return str(view, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedBody(f"The body is not JSON: a string is not UTF-8: {error.reason}.") from error


def _is_long_and_plain(body: Body, start: int, end: int) -> bool:
    """Whether the value is a string of more than a piece without escapes."""
    return end - start > PIECE and body[start] == QUOTE and body.find(b"\\", start, end) < 0


def _object(
    body: Body,
    start: int,
    end: int,
    folds: Mapping[str, Fold] | None = None,
    *,
    views: bool = False,
) -> dict[str, Any]:
    """Parse an object; with `views`, long strings that are its members stay where they are."""
    members: dict[str, Any] = {}
    position = start
    while position + 1 != end:
        position = _space(body, position + 1)
        name_end = _end(body, position)
        colon = _space(body, name_end)
        if body[position] != QUOTE or body[colon] != COLON:
            raise _malformed(position)
        value_start = _space(body, colon + 1)
        value_end = _end(body, value_start)
        name = orjson.loads(memoryview(body)[position:name_end])
        fold = folds.get(name) if folds else None
        if fold is not None and value_end - value_start > PIECE and body[value_start] == OPEN_LIST:
            members[name] = _folded(body, value_start, value_end, name, fold)
        elif views and _is_long_and_plain(body, value_start, value_end):
            members[name] = memoryview(body)[value_start + 1 : value_end - 1]
        else:
            members[name] = _value(body, value_start, value_end)
        if len(members) > MAX_MEMBERS:
            raise BodyTooLarge(f"An object in the JSON body has more than {MAX_MEMBERS:,} members.")
        position = _space(body, value_end)
        if body[position] != (CLOSE_OBJECT if position + 1 == end else COMMA):
            raise _malformed(position)
    return members


def _list(body: Body, start: int, end: int) -> list[Any]:
    items: list[Any] = []
    for run in _runs(body, start, end):
        items += run
    return items


def _folded(body: Body, start: int, end: int, name: str, fold: Fold) -> Folded:
    parts, count = [], 0
    for run in _runs(body, start, end, name, fold.max_values, views=True):
        parts.append(fold.of_run(run, count))
        count += len(run)
    return Folded(parts, count)


def _runs(
    body: Body,
    start: int,
    end: int,
    name: str = "",
    max_values: int = MAX_VALUES,
    *,
    views: bool = False,
) -> Iterator[list[Any]]:
    """Parse a list: yield runs of its items of about a piece."""
    run: list[Any] = [None]
    count = 0
    for first, last in _groups(body, start, end):
        if last - first <= 2 * PIECE:
            run = orjson.loads(b"[" + body[first:last] + b"]")
        else:
            item = _space(body, first)
            item_end = _end(body, item)
            if _space(body, item_end) != last:
                raise _malformed(item_end)
            if (values := _count(body, item, item_end, b",") + 1) > max_values:
                raise InvalidParameter(f"{name}[{count}] has {values:,} values; the limit is {max_values:,}.")
            if views and body[item] == OPEN_OBJECT:
                run = [_object(body, item, item_end, views=True)]
            else:
                run = [_value(body, item, item_end)]
        if not run and last + 1 != end:
            raise _malformed(first)
        count += len(run)
        yield run
        release_interpreter()
    if count and not run:
        raise _malformed(end)


def _groups(body: Body, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut a list at commas: into runs of items of about a piece, and single items that are larger."""
    first = position = start + 1
    cut = start
    while True:
        found = STRUCTURE.search(body, position, min(position + PIECE, end))
        stop = found.start() if found else min(position + PIECE, end)
        if position - first > PIECE and (comma := body.find(b",", position, stop)) >= 0:
            yield first, comma
            first = position = comma + 1
            continue
        cut = max(cut, body.rfind(b",", position, stop))
        if found and body[stop] in (CLOSE_LIST, CLOSE_OBJECT):
            yield first, stop
            return
        if not found and cut < position and body[position:stop].strip():
            raise _malformed(position)
        position = _end(body, stop) if found else stop
        if position - first > PIECE and cut >= first:
            yield first, cut
            first = cut + 1


def _end(body: Body, start: int) -> int:
    """Return the position behind the value that begins at `start`."""
    if body[start] == QUOTE:
        return _string_end(body, start)
    if body[start] not in (OPEN_LIST, OPEN_OBJECT):
        found = SCALAR.match(body, start, start + PIECE)
        if found is None:
            raise _malformed(start)
        return found.end()
    depth, position = 0, start
    while True:
        found = STRUCTURE.search(body, position, position + 4 * PIECE)
        if found is None:
            position += 4 * PIECE
            if position >= len(body):
                raise _malformed(len(body))
            continue
        symbol, position = body[found.start()], found.end()
        if symbol == QUOTE:
            position = _string_end(body, found.start())
        else:
            depth += 1 if symbol in (OPEN_LIST, OPEN_OBJECT) else -1
            if depth == 0:
                return position
            if depth > MAX_DEPTH:
                raise MalformedBody(f"The JSON body is nested more than {MAX_DEPTH} levels deep.")


def _string_end(body: Body, start: int) -> int:
    position = start
    while (position := body.find(b'"', position + 1)) >= 0:
        slashes = position
        while body[slashes - 1] == 0x5C:
            slashes -= 1
        if (position - slashes) % 2 == 0:
            return position + 1
    raise _malformed(len(body))


def _space(body: Body, position: int) -> int:
    found = SPACE.match(body, position)
    return found.end() if found else position


def _malformed(position: int) -> BoxcalError:
    return MalformedBody(f"The body is not JSON: unexpected byte or end of data at position {position:,}.")
