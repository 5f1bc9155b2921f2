"""Parses a large JSON document in small pieces, so that no step holds the interpreter for more than some ms.

orjson parses 32 MiB in one call of several hundred milliseconds, during which no other thread runs, the event
loop's included. This module finds the structure of the document and gives orjson pieces of at most 64 KiB.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from boxcal.app.errors import BodyTooLarge, MalformedBody

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


def parse(body: bytes) -> Any:
    """Parse a JSON document of any size; blocks, so large documents are parsed in a thread.

    Raises
    ------
    MalformedBody
        It is not JSON, or nested too deeply.
    BodyTooLarge
        It has more values, lists and objects, or members of one object, than the limits.
    """
    if len(body) <= PIECE:
        return orjson.loads(body)
    symbols = np.frombuffer(body, np.uint8)
    for name, marks, limit in LIMITS:
        count = sum(int(np.count_nonzero(symbols == mark)) for mark in marks)
        if count > limit:
            raise BodyTooLarge(f"The JSON body has about {count:,} {name}; the limit is {limit:,}.")
    try:
        start = _space(body, 0)
        end = _end(body, start)
        if _space(body, end) != len(body):
            raise _malformed(end)
        return _value(body, start, end)
    except IndexError:
        raise _malformed(len(body)) from None


def release(document: Any) -> None:
    """Free a parsed document in steps, because Python frees a large list in one."""
    if isinstance(document, dict):
        for value in document.values():
            release(value)
    elif isinstance(document, list):
        if document and isinstance(document[0], dict | list):
            for item in document:
                release(item)
        while document:
            del document[-PIECE:]


def _value(body: bytes, start: int, end: int) -> Any:
    if end - start > PIECE and body[start] == QUOTE and b"\\" not in (text := body[start + 1 : end - 1]):
        return text.decode()
    if end - start <= PIECE or body[start] not in (OPEN_LIST, OPEN_OBJECT):
        return orjson.loads(memoryview(body)[start:end])
    if body[start] == OPEN_OBJECT:
        return _object(body, start, end)
    return _list(body, start, end)


def _object(body: bytes, start: int, end: int) -> dict[str, Any]:
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
        members[name] = _value(body, value_start, value_end)
        if len(members) > MAX_MEMBERS:
            raise BodyTooLarge(f"An object in the JSON body has more than {MAX_MEMBERS:,} members.")
        position = _space(body, value_end)
        if body[position] != (CLOSE_OBJECT if position + 1 == end else COMMA):
            raise _malformed(position)
    return members


def _list(body: bytes, start: int, end: int) -> list[Any]:
    items: list[Any] = []
    group: list[Any] = [None]
    for first, last in _groups(body, start, end):
        if last - first <= 2 * PIECE:
            group = orjson.loads(b"[%b]" % body[first:last])
        else:
            item = _space(body, first)
            item_end = _end(body, item)
            if _space(body, item_end) != last:
                raise _malformed(item_end)
            group = [_value(body, item, item_end)]
        if not group and last + 1 != end:
            raise _malformed(first)
        items += group
    if items and not group:
        raise _malformed(end)
    return items


def _groups(body: bytes, start: int, end: int) -> Iterator[tuple[int, int]]:
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


def _end(body: bytes, start: int) -> int:
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
        found = STRUCTURE.search(body, position, position + 16 * PIECE)
        if found is None:
            position += 16 * PIECE
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


def _string_end(body: bytes, start: int) -> int:
    position = start
    while (position := body.find(b'"', position + 1)) >= 0:
        slashes = position
        while body[slashes - 1] == 0x5C:
            slashes -= 1
        if (position - slashes) % 2 == 0:
            return position + 1
    raise _malformed(len(body))


def _space(body: bytes, position: int) -> int:
    found = SPACE.match(body, position)
    return found.end() if found else position


def _malformed(position: int) -> MalformedBody:
    return MalformedBody(f"The body is not JSON: unexpected byte or end of data at position {position:,}.")
