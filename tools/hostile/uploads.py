"""Uploads made to break the check of `/fit`, each with the status and the reason it must be refused with."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.app.fitting.files import LABELS, LOGITS, K, archive, changed, compressed, npy, parquet
from tests.app.fitting.test_images import archive as archive_of_images
from tests.app.fitting.validation_data import CONTENT_TYPE, form, multipart, npz

ZEROS = 5_000_000


def varint(number: int, length: int = 0) -> bytes:
    """Encode a non-negative number as Thrift does, in at least `length` bytes."""
    rest, encoded = 2 * number, list[int]()
    while rest or len(encoded) < max(1, length):
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded[-1] &= 0x7F
    return bytes(encoded)


def announcing(rows: int) -> bytes:
    """A good `.parquet` of 50 rows whose footer announces others."""
    good = parquet()
    footer = len(good) - 8 - int.from_bytes(good[-8:-4], "little")
    for place in range(footer, len(good) - 8):
        changed_file = good[:place] + varint(rows) + good[place + 1 :]
        if good[place : place + 1] == varint(50) and _rows(changed_file) == rows:
            return changed_file
    raise AssertionError("the number of rows is not in the footer")


def _rows(data: bytes) -> int:
    try:
        return int(pq.read_metadata(io.BytesIO(data)).num_rows)
    except OSError:
        return -1


def long_lists(announced: int | None = None) -> bytes:
    """A `.parquet` of some kilobytes with 30 lists of together 5 million zeros, or announcing fewer."""
    ends = np.concatenate([np.arange(30) * K, [ZEROS]]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.zeros(ZEROS, dtype=np.float32)))
    file = io.BytesIO()
    table = pa.table({"logits": lists, "label": pa.array(np.zeros(30, dtype=np.int64))})
    pq.write_table(table, file, compression="zstd", write_statistics=False)
    data = file.getvalue()
    if announced is None:
        return data
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    true_count = varint(ZEROS)
    assert true_count in data[footer:]
    return data[:footer] + data[footer:].replace(true_count, varint(announced, len(true_count)))


def with_header(text: str) -> bytes:
    """An archive whose logits have a `.npy` header of this text."""
    header = text.encode().ljust(118) + b"\n"
    logits = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + LOGITS.tobytes()
    return archive(logits=logits, labels=npy(LABELS))


def described(descr: str, shape: str = "(50, 10)") -> bytes:
    return with_header(f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}")


def overlapping() -> bytes:
    """An archive whose second entry begins where the first does."""
    data = bytearray(npz(logits=LOGITS, labels=LABELS))
    second = data.rindex(b"PK\x01\x02")
    data[second + 42 : second + 46] = bytes(4)
    return bytes(data)


def zip_with(name: str) -> bytes:
    """An archive of digits with one more entry of this name."""
    file = io.BytesIO(archive_of_images())
    with zipfile.ZipFile(file, "a") as out:
        out.writestr(zipfile.ZipInfo(name), b"\x89PNG\r\n\x1a\n")
    return file.getvalue()


def with_features(features: Any) -> bytes:
    return npz(logits=LOGITS, labels=LABELS, features=features)


def empty_lists() -> bytes:
    return b'{"labels": [0], "logits": [' + b"[]," * 1_200_000 + b"[]]}"


def many_columns() -> bytes:
    return b"label," + b",".join(b"%d" % number for number in range(200_000))


def arrow_of_zeros() -> bytes:
    """An Arrow file of some kilobytes whose lists have together 100 million zeros."""
    ends = np.concatenate([np.arange(30) * K, [20 * ZEROS]]).astype(np.int32)
    lists = pa.ListArray.from_arrays(pa.array(ends), pa.array(np.zeros(20 * ZEROS, dtype=np.float32)))
    table = pa.table({"logits": lists, "label": pa.array(np.zeros(30, dtype=np.int64))})
    file = io.BytesIO()
    with pa.ipc.new_file(file, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)
    return file.getvalue()


HUGE = np.full((50, K), np.longdouble("1e4000"))
HOSTILE: dict[str, tuple[int, str, Callable[[], bytes]]] = {
    "more rows announced": (422, "60 rows, but there are 50", lambda: announcing(60)),
    "fewer rows announced": (422, "30 rows, but there are 50", lambda: announcing(30)),
    "lists of zeros": (422, "a list of 4999710; it must have 10", long_lists),
    "lists of zeros, hidden": (422, "", lambda: long_lists(300)),
    "column name, not UTF-8": (
        422, "", lambda: parquet(xxxx=pa.array([0] * 50)).replace(b"xxxx", b"\xff\xfe\xff\xfe"),
    ),
    "int8 zeros": (
        413, "unpack to 4,312,000 bytes; the limit is 4,000,000",
        lambda: compressed(logits=np.zeros((49_000, 10), np.int8), labels=np.zeros(49_000, np.int8)),
    ),
    "overlapping entries": (422, "before byte .*, where the entry before it ends", overlapping),
    "front cut off": (415, "", lambda: npz(logits=LOGITS, labels=LABELS)[100:]),
    "front of images cut off": (415, "", lambda: archive_of_images()[100:]),
    "entry .": (422, "'.'", lambda: zip_with(".")),
    "entry ..": (422, "'..' lies outside the archive", lambda: zip_with("..")),
    "entry above": (422, "'../0/x.png' lies outside the archive", lambda: zip_with("../0/x.png")),
    "entry at the root": (422, "'/0/x.png' lies outside the archive", lambda: zip_with("/0/x.png")),
    "entry of NUL": (422, "", lambda: zip_with("\0")),
    "header, unfinished": (422, "`logits` is no readable .npy array", lambda: with_header("{'descr': (")),
    "header, empty": (422, "`logits` is no readable .npy array", lambda: with_header("")),
    "header, indented": (422, "`logits` is no readable .npy array", lambda: with_header("  {\n 1")),
    "header, nested": (422, "`logits` is no readable .npy array", lambda: with_header("(" * 5000)),
    "descr, empty list": (422, "`logits`", lambda: described("[]")),
    "descr, empty tuple": (422, "`logits`", lambda: described("()")),
    "descr, S0": (422, "`logits` must hold real numbers, got the dtype", lambda: described("'|S0'")),
    "descr, V0": (422, "`logits` must hold real numbers, got the dtype", lambda: described("'|V0'")),
    "descr, U0": (422, "`logits` must hold real numbers, got the dtype", lambda: described("'<U0'")),
    "shape, negative": (422, "`logits`", lambda: described("'<f4'", "(-50, 10)")),
    "shape, huge": (422, "`logits` announces", lambda: described("'<f4'", f"({10**30}, 10)")),
    "shape, huge and empty": (422, "`logits`", lambda: described("'<f4'", f"({10**30}, 0)")),
    "shape, no tuple": (422, "`logits`", lambda: described("'<f4'", "500")),
    "features, empty": (422, "`features` must have the shape", lambda: with_features(np.zeros((50, 0)))),
    "features, none": (422, "`features` must have the shape", lambda: with_features(np.zeros(0))),
    "features, words": (422, "`features` must hold real numbers", lambda: with_features(np.full(50, "a"))),
    "features, infinite": (
        422, r"features\[3, 1\] is inf", lambda: with_features(changed(LOGITS, (3, 1), np.inf)),
    ),
    "arrow of zeros": (422, "more memory than", arrow_of_zeros),
    "JSON of lists": (422, "1200001 rows but `labels` has 1", empty_lists),
    "CSV of one line": (422, "is no class of the model", lambda: b"label," + b"1" * 3_000_000),
    "CSV of columns": (422, "columns; the limit is", many_columns),
    "longdouble": (
        422, r"logits\[0, 0\] is 1e\+4000; every value must be finite in float64",
        lambda: npz(logits=HUGE, labels=LABELS),
    ),
}  # fmt: skip


FORMS: dict[str, tuple[str, bytes]] = {
    "nothing": (CONTENT_TYPE, b""),
    "no boundary": ("multipart/form-data", form(b"x")),
    "empty boundary": ("multipart/form-data; boundary=", form(b"x")),
    "other boundary": ("multipart/form-data; boundary=other", form(b"x")),
    "boundary alone": (CONTENT_TYPE, b"--boundary"),
    "unfinished": (CONTENT_TYPE, form(b"x")[:-12]),
    "no header": (CONTENT_TYPE, b"--boundary\r\n\r\nx\r\n--boundary--\r\n"),
    "endless header": (CONTENT_TYPE, b"--boundary\r\n" + b"a: b\r\n" * 10_000),
    "no name": (CONTENT_TYPE, multipart(("filename=x", b"x"))),
    "coded name": (CONTENT_TYPE, multipart(("name*=utf-16''%ff; filename*=x''%", b"x"))),
    "NUL": (CONTENT_TYPE, multipart(('name="fi\0le"; filename="\0"', b"\0"))),
    "many parts": (CONTENT_TYPE, multipart(*[(f'name="{turn}"', b"x") for turn in range(2000)])),
    "bytes in a field": (
        CONTENT_TYPE, multipart(('name="method"', b"\xff\xfe"), ('name="file"; filename="v"', b"x")),
    ),
}  # fmt: skip
