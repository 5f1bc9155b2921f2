"""Bodies of `/predict` and `/calibrate` that cost far more than their size."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson
from PIL import Image

MIB = 2**20


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int) -> bytes:
    """A black PNG with one bit for each pixel."""
    packer = zlib.compressobj(9)
    row, data = bytes(1 + (width + 7) // 8), b""
    for _ in range(height):
        data += packer.compress(row)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", data + packer.flush())
        + chunk(b"IEND", b"")
    )


def npy(values: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def progressive_jpeg(scans: int) -> bytes:
    """A progressive JPEG whose last scan is repeated."""
    stream = io.BytesIO()
    Image.new("L", (64, 64)).save(stream, "JPEG", progressive=True)
    data = stream.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + data[-2:]


def json_bodies() -> Iterator[tuple[str, str, bytes, set[int]]]:
    """Nearly the largest JSON that is read, the path it is posted to and the statuses it may have."""
    count = 4 * MIB - 100
    options = b",".join(b'"k%d":1' % n for n in range(count // 12))
    yield "unknown options", "/calibrate", b'{"logits":[[0]],"options":{%b}}' % options, {413, 422}
    few = b",".join(b'"k%d":1' % n for n in range(90_000))
    yield "some unknown options", "/calibrate", b'{"logits":[[0]],"options":{%b}}' % few, {422}
    inputs = b",".join([b'{"tensor": [0.25]}'] * (count // 24))
    yield "inputs", "/predict", b'{"inputs":[%b]}' % inputs, {413, 422}
    some = b",".join([b'{"tensor": [0.25]}'] * 50_000)
    yield "some inputs", "/predict", b'{"inputs":[%b]}' % some, {413, 422}
    row = orjson.dumps([0.123456789] * 10)
    yield "logits", "/calibrate", b'{"logits":[%b]}' % b",".join([row] * 28_000), {200}
    yield "one row", "/calibrate", b'{"logits":[[%b]]}' % b",".join([b"0.125"] * (count // 6)), {413, 422}
    labels = b",".join(b'"label %d": 0.5' % n for n in range(30_000))
    yield "labels", "/calibrate", b'{"logits":[[0]],"options":{"bounds":{"upper":{%b}}}}' % labels, {422}
    yield "one image", "/predict", b'{"inputs":[{"image":"%b"}]}' % (b"A" * count), {422}
    yield "nested", "/predict", b'{"inputs":%b%b}' % (b"[" * MIB, b"]" * MIB), {400, 413}
