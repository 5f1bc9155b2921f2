"""Files that cannot be fitted are refused by name, place and value; none makes the reader fail otherwise."""

import asyncio
import io
import json
import struct
import zipfile
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from boxcal.app.fitting.server.upload_validation import receive
from boxcal.app.http.problems import BoxcalError, InvalidUpload, UploadStalled, UploadTooLarge
from tests.app.fitting.files import (
    LABELS,
    LIMIT,
    LOGITS,
    PROBABILITIES,
    K,
    archive,
    arrow,
    bomb,
    by_class,
    changed,
    compressed,
    csv,
    document,
    npy,
    parquet,
    read_bytes,
)
from tests.app.fitting.validation_data import CONTENT_TYPE, npz
from tests.app.raising import raises_problem

GOOD = {"logits": LOGITS, "labels": LABELS}
LISTS = {"logits": LOGITS.tolist(), "labels": LABELS.tolist()}


def arrays(**changes: Any) -> bytes:
    """The good arrays with changes; None leaves an array out."""
    return npz(**{name: array for name, array in (GOOD | changes).items() if array is not None})


class Bomb:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path("/tmp/boxcal-was-unpickled").touch, ()  # noqa: S108


def lying_header() -> bytes:
    """Logits whose header announces twice the numbers that follow."""
    good = npy(LOGITS)
    return archive(logits=good.replace(b"(50, 10)", b"(99, 10)"), labels=npy(np.zeros(99, dtype=np.int64)))


def corrupted() -> bytes:
    data = bytearray(arrays())
    data[data.index(LOGITS.tobytes()) + 5] ^= 1
    return bytes(data)


def duplicated() -> bytes:
    file = io.BytesIO(arrays())
    with zipfile.ZipFile(file, "a") as out, pytest.warns(UserWarning, match="Duplicate name"):
        out.writestr("logits.npy", npy(LOGITS))
    return file.getvalue()


def version_3() -> bytes:
    return archive(logits=b"\x93NUMPY\x03\x00" + npy(LOGITS)[8:], labels=npy(LABELS))


def no_characters() -> Any:
    """Texts with the number of no character; numpy reads them as they are."""
    return changed(LABELS.astype("U1").view(np.uint32), 7, 0x110005).view("U1")


ARRAYS: dict[str, dict[str, Any]] = {
    r"`logits` holds pickled Python objects \(dtype object\)": {
        "logits": np.array([[Bomb()] * K] * 50, dtype=object)
    },
    r"needs `labels` and either .* it holds `logits`\.": {"labels": None},
    r"it holds `labels`, `scores`\.": {"logits": None, "scores": LOGITS},
    "it holds no arrays": {"logits": None, "labels": None},
    "both `logits` and `probabilities`": {"probabilities": PROBABILITIES},
    "`logits` has 3 columns; the backbone served here has 10 classes": {"logits": LOGITS[:, :3]},
    r"`logits` must have the shape \(N, 10\), got \(500,\)": {"logits": LOGITS.ravel()},
    r"`labels` must have the shape \(N,\), got \(50, 1, 1\)": {"labels": LABELS[:, None, None]},
    r"has a member 'featurs'; did you mean 'features'\? It may have `logits`, ": {"featurs": LOGITS},
    "All samples belong to the group 'a'; a fit is judged on groups that it has not seen": {
        "groups": np.array(["a"] * 50)
    },
    r"group\w*\[7\] is nan; each sample needs a group": {"groups": changed(np.arange(50.0), 7, np.nan)},
    r"`groups` must have the shape \(50,\), got \(3,\)": {"groups": np.arange(3)},
    r"sample_weight\[7\] is -1.0; weights are finite and not negative": {
        "sample_weight": changed(np.ones(50), 7, -1.0)
    },
    "`sample_weight` is above 0 for 0 samples": {"sample_weight": 0 * LABELS},
    r"labels\[7\] is 'nine', which is no class of the model": {
        "labels": changed(LABELS.astype("U4"), 7, "nine")
    },
    r"labels\[7\] is 9223372036854775808, which is too large for an index": {
        "labels": changed(LABELS.astype(np.uint64), 7, 2**63)
    },
    "`labels` holds 0x110005, which is the number of no character": {"labels": no_characters()},
    "`groups` holds 0x110005, which is the number of no character": {"groups": no_characters()},
    "`logits` has 50 rows but `labels` has 49 values": {"labels": LABELS[1:]},
    "has 1 sample; .*at least 20": {"logits": LOGITS[:1], "labels": LABELS[:1]},
    r"labels\[0\] is .*\.5; class indices are integers": {"labels": LABELS + 0.5},
    "`logits` must hold real numbers, got the dtype complex64": {"logits": LOGITS.astype(np.complex64)},
    r"labels\[7\] is 10; class indices go from 0 to 9\.": {"labels": changed(LABELS, 7, 10)},
    r"labels\[2\] is -1; .* \(1 more label out of range\)": {"labels": changed(LABELS, [2, 9], -1)},
    r"logits\[3, 1\] is nan": {"logits": changed(LOGITS, (3, 1), np.nan)},
    "a probability lies between 0 and 1. Send scores of another kind as `logits`": {
        "logits": None,
        "probabilities": LOGITS,
    },
    r"probabilities\[5\] sums to 0\.[0-9]+; the probabilities of a sample sum to 1": {
        "logits": None,
        "probabilities": changed(PROBABILITIES, 5, PROBABILITIES[5] / 2),
    },
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "`groups` must be a list of integers or of texts": LISTS | {"groups": [1, "a"]},
    "member 'label'; did you mean 'labels'": {"logits": LISTS["logits"], "label": LISTS["labels"]},
    "`logits` of the document must be a list": {"logits": 7, "labels": [1]},
    "`labels` must be a list of class indices": LISTS | {"labels": [[[label]] for label in LISTS["labels"]]},
    r"`features` must have the shape \(50, D\), got \(50, 0\)": LISTS | {"features": [[]] * 50},
    r"features\[1\] has 2 numbers, but features\[0\] has 3\.$": LISTS
    | {"features": [[1, 2, 3], *[[1, 2]] * 49]},
    r"logits\[49\] has 2 numbers": LISTS | {"logits": [*LISTS["logits"][:-1], [1, 2]]},
}
COLUMNS: dict[str, dict[str, Any]] = {
    r"group\[3\] is missing": {"group": pa.array([0, 1, 2, None, *range(46)])},
    "one column `label`; it has the columns `logits`": {"label": False},
    "`logits` must hold lists of numbers, got float": {"logits": pa.array(LOGITS[:, 0])},
    "must hold lists of numbers, got list<": {"logits": pa.array([["a"] * K] * 50)},
    r"logits\[1\] is a list of 3": {"logits": pa.array([LOGITS[0], LOGITS[1][:3], *LOGITS[2:]])},
    r"logits\[2\] is missing": {"logits": pa.array([*LOGITS[:2], None, *LOGITS[3:]])},
    r"logits\[0, 1\] is missing": {"logits": pa.array([[1.0, None, *[0.0] * 8]] + [[0.0] * K] * 49)},
    r"label\[3\] is missing": {"label": pa.array([0, 1, 2, None] + [0] * 46)},
}
CSV = csv(by_class())
TABLES: dict[str, bytes] = {
    "'3' is missing": csv(by_class().drop_columns(["3"])),
    "no readable .csv: .*invalid value 'x'": CSV + b",".join([b"x"] * 11) + b"\n",
    r"sample_weight\[3\] is missing": csv(
        by_class().append_column("sample_weight", pa.array([*"111", "", *46 * "2"]))
    ),
    r"group\[3\] is missing": csv(by_class().append_column("group", pa.array([*"abc", "", *46 * "d"]))),
    r"0\[50\] is missing": CSV + b",1,1,1,1,1,1,1,1,1,1\n",
    "no readable .csv: .*Expected 11 columns": CSV + b"1,2\n",
    "more than one column '1'": CSV.replace(b'"2"', b'"1"', 1),
    "has no rows": b"label," + b",".join(b"%d" % n for n in range(10)) + b"\n",
    "`weight` is not read; send the weights of samples as `sample_weight`": csv(
        by_class().append_column("weight", pa.array(LABELS))
    ),
}
RECORDS: dict[str, list[dict[str, Any]]] = {
    r"more than one value of 's\.a'": [{"label": "a", "s.a": -9, "s": {"a": 1.5, "b": -2}}],
    r"too large .*\. Integers have up to 64 bits: write labels and groups .* as texts\.$": [
        {"label": 2**63, "a": 1, "b": 2},
        {"label": -1, "a": 1, "b": 2},
    ],
}
BAD: dict[str, tuple[int, str, Callable[[], bytes]]] = {
    **{f"arrays: {says}": (422, says, partial(arrays, **changes)) for says, changes in ARRAYS.items()},
    **{f"JSON: {says}": (422, says, partial(document, **members)) for says, members in DOCUMENTS.items()},
    **{f"parquet: {says}": (422, says, partial(parquet, **columns)) for says, columns in COLUMNS.items()},
    **{f"CSV: {says}": (422, says, partial(bytes, table)) for says, table in TABLES.items()},
    **{
        f"records: {says}": (422, says, partial(bytes, json.dumps(rows).encode()))
        for says, rows in RECORDS.items()
    },
    "empty": (415, "it is empty", lambda: b""),
    "text": (415, r"it begins with b'hell'", lambda: b"hello, world"),
    "a bare .npy": (415, r"neither .npz nor .parquet", lambda: npy(LOGITS)),
    "truncated archive": (422, "no readable zip archive", lambda: arrays()[:1500]),
    "an entry without a name": (422, "has no name", lambda: arrays().replace(b"labels.npy", b"\0abels.npy")),
    "corrupted": (422, "`logits` .*: Bad CRC-32", corrupted),
    "two of a name": (422, "two arrays of the same name", duplicated),
    "JSON, long lines": (
        400,
        r"Send lines of 64 KiB or more as one list: \[",
        lambda: 2 * (document() + b" " * 70_000 + b"\n"),
    ),
    "JSON, cut off": (400, "is not JSON", lambda: document(logits=LISTS["logits"])[:-9]),
    "arrow, cut off": (422, "no readable .arrow", lambda: arrow()[:-100]),
    "lying header": (422, "announces 3,960 bytes of float32 .* but 2,000 are there", lying_header),
    ".npy of another version": (422, r"format \(3, 0\)", version_3),
    "no .npy": (
        422,
        "`logits` is no readable .npy array",
        lambda: archive(logits=b"what", labels=npy(LABELS)),
    ),
    "zip bomb": (413, "unpack to 23,068,672 bytes; the limit is 10,000,000", lambda: bomb((2**18, K))),
    "truncated parquet": (422, "no readable .parquet", lambda: parquet()[:-50]),
    "parquet bomb": (
        413,
        "unpack to .* bytes; the limit is 10,000,000",
        lambda: parquet(pa.array([[0.0] * K] * 150_000), pa.array(np.zeros(150_000, dtype=np.int64))),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_words(name: str, tmp_path: Path) -> None:
    status, message, make = BAD[name]
    with pytest.raises(BoxcalError, match=message) as caught:
        read_bytes(make(), tmp_path)
    assert caught.value.status == status
    assert not Path("/tmp/boxcal-was-unpickled").exists()  # noqa: S108


def test_a_directory_of_made_up_entries_is_not_even_read(tmp_path: Path) -> None:
    """A million entries of no bytes would take gigabytes of memory to list."""
    entry = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", 20, 20, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"x"
    directory = entry * (17 * 2**20 // len(entry))
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, len(directory), 0, 0)
    too_large = r"directory of the archive has 17,[0-9,]+ bytes; the limit is 16,777,216"
    with raises_problem(UploadTooLarge, match=too_large):
        read_bytes(directory + end, tmp_path)
    # The 64-bit form keeps the size elsewhere; the last record may then say anything.
    elsewhere = struct.pack("<4sLQL", b"PK\x06\x07", 0, len(directory), 1)
    small = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(entry), 0, 0)
    with pytest.raises(InvalidUpload, match="64-bit form"):
        read_bytes(directory + elsewhere + small, tmp_path)


def test_an_archive_cannot_hide_its_size(tmp_path: Path) -> None:
    """A directory that understates what a member unpacks to does not get more bytes out of it."""
    data = bytearray(bomb((2**17, K)))
    true_size = struct.pack("<I", 2**17 * K * 8 + 128)
    assert data.count(true_size) >= 1
    lie = bytes(data).replace(true_size, struct.pack("<I", 928))
    with pytest.raises(BoxcalError, match=r"`logits`.*Bad CRC-32"):
        read_bytes(lie, tmp_path)


def test_every_single_flipped_byte_is_refused_or_harmless(tmp_path: Path) -> None:
    """No damage to a file makes the reader fail in another way than by refusing it."""
    rng = np.random.default_rng(1)
    kinds = (compressed(logits=LOGITS, labels=LABELS), parquet(), arrow(compression="zstd"), csv(by_class()))
    for kind in kinds:
        for trial in range(150):
            data = bytearray(kind)
            data[rng.integers(len(data))] = rng.integers(256)
            with suppress(BoxcalError):
                logits, labels = read_bytes(bytes(data), tmp_path / f"{len(kind)}-{trial}").arrays()
                assert np.isfinite(logits).all()
                assert ((labels >= 0) & (labels < K)).all()


def test_an_upload_that_stalls_loses_its_slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("boxcal.app.fitting.server.upload_validation.RATE_SECONDS", 0.05)

    async def stalls() -> AsyncGenerator[bytes, None]:
        yield b"--x\r\nContent-Disposition: form-data; name=file; filename=v.npz\r\n\r\nPK"
        await asyncio.Event().wait()

    receives = receive({"content-type": CONTENT_TYPE}, stalls(), tmp_path / "body", LIMIT)
    with raises_problem(UploadStalled, match=r"brought 68 bytes in 0\.05 s, after 0; the minimum is 163,840"):
        asyncio.run(receives)
