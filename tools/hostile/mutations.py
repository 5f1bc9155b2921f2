"""Damages valid bodies: anywhere, and where a JSON document or an `.npy` header has its values."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

WORDS = (
    b"\0", b"\xff\xfe", b"NaN", b"-Infinity", b"1e999", b"-0", b"null", b"{", b"}", b"[", b"]", b'"', b",",
    b"\\", b"\\ud800", b"\r\n", b"\r\n\r\n", b"--boundary", b"--boundary--\r\n", b"%00", b"..", b"\x1b[31m",
    b"9" * 400, b"A" * 5000, b"[" * 200, b"PK\x01\x02", b"PAR1", b"IDAT", b"\x93NUMPY", b"\xff\xda",
)  # fmt: skip
NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 0.5, -0.0, 1e308, 5e-324, 2**31, 2**64, 10**400, float("nan"), float("inf"),
    "", "3", "active", "\0", "\ud800", "x" * 3000, [], {}, [[]], [None], {"a": 1}, [0.1] * 11, [[[[[0]]]]],
)  # fmt: skip
HEADERS = (
    "'<f4'", "'>f8'", "'<f2'", "'|b1'", "'<c16'", "'|O'", "'|S0'", "'<U7'", "'<M8[s]'", "'<i8'", "[]",
    "(1, 10)", "(0, 10)", "(-1, 10)", "(10**9, 10)", "()", "(1,)", "(1, 1, 8, 8)", "True", "None", "'", "((",
    "\\",
)  # fmt: skip
"""Values in `.npy` headers."""


def damage(rng: random.Random, body: bytes, other: bytes = b"") -> bytes:
    """Change, remove, insert or repeat bytes at one to five places.

    Parameters
    ----------
    other
        Another body, of which pieces are inserted.
    """
    damaged = bytearray(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        place = rng.randrange(len(damaged) + 1)
        length = rng.choice((1, 1, 2, 4, 16, 300))
        action = rng.randrange(7)
        if action == 0:
            damaged[place : place + length] = rng.randbytes(length)
        elif action == 1:
            del damaged[place : place + length]
        elif action == 2:
            damaged[place:place] = damaged[place : place + length] * rng.choice((1, 2, 50))
        elif action == 3:
            damaged[place:place] = rng.choice(WORDS)
        elif action == 4:
            order = rng.choice("<>")
            damaged[place : place + 4] = struct.pack(f"{order}I", rng.choice(NUMBERS))
        elif action == 5:
            start = rng.randrange(len(other) + 1)
            damaged[place:place] = other[start : start + 40 * length]
        else:
            del damaged[place:]
    return bytes(damaged)


def damage_json(rng: random.Random, body: bytes) -> bytes:
    """Replace, remove, repeat or rename values of a JSON document."""
    document = json.loads(body)
    for _ in range(rng.choice((1, 1, 2, 4))):
        document = _damage_node(rng, document)
    text = json.dumps(document, ensure_ascii=rng.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def _damage_node(rng: random.Random, node: Any) -> Any:
    if not isinstance(node, dict | list) or not node or rng.random() < 0.15:
        return rng.choice(VALUES)
    action = rng.randrange(8)
    if isinstance(node, dict):
        name = rng.choice(list(node))
        changed = {**node, name: _damage_node(rng, node[name])}
        if action == 0:
            del changed[name]
        elif action == 1:
            changed[rng.choice(("", "\0", "x" * 300, name + "s", name.upper()))] = rng.choice(VALUES)
        return changed
    place = rng.randrange(len(node))
    if action == 0:
        return node[:place]
    repeated = [node[place]] * (rng.choice((2, 20)) if action == 1 else 0)
    return [*node[:place], _damage_node(rng, node[place]), *repeated, *node[place + 1 :]]


def damage_npy(rng: random.Random, body: bytes) -> bytes:
    """Replace a value of the header of an `.npy` array; the length of the header stays right, mostly."""
    size = struct.unpack_from("<H", body, 8)[0]
    header = body[10 : 10 + size].decode("latin-1")
    starts = [
        at for mark in ("'descr': ", "'fortran_order': ", "'shape': ") if (at := header.find(mark)) >= 0
    ]
    start = rng.choice(starts)
    value = header.index(":", start) + 2
    end = min(at for mark in (", '", ", }") if (at := header.find(mark, value)) > 0)
    text = (header[:value] + rng.choice(HEADERS) + header[end:]).rstrip() + "\n"
    announced = len(text) if rng.random() < 0.9 else rng.choice(NUMBERS[:6])
    return body[:8] + struct.pack("<H", announced) + text.encode("latin-1") + body[10 + size :]


def mutate(rng: random.Random, kind: str, body: bytes, other: bytes) -> bytes:
    """Damage a body as its content type suggests, or anywhere."""
    of_kind: dict[str, Callable[[random.Random, bytes], bytes]] = {
        "application/json": damage_json,
        "application/x-npy": damage_npy,
    }
    if kind in of_kind and rng.random() < 0.6:
        return of_kind[kind](rng, body)
    return damage(rng, body, other)
