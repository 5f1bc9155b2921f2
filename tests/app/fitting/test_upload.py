"""Uploads become checked validation sets; what cannot be fitted is refused by name, place and value."""

import asyncio
import io
import json
import pickle
import struct
import zipfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from boxcal.app.errors import BoxcalError, MalformedBody
from boxcal.app.fitting.check import read_file
from boxcal.app.fitting.errors import InvalidUpload, UnknownUploadFormat
from boxcal.app.fitting.form import FilePart
from boxcal.app.fitting.validation_set import MIN_SAMPLES, ValidationSet
from boxcal.app.uploads.errors import UploadStalled, UploadTooLarge
from boxcal.app.uploads.upload import receive
from tests.app.fitting.validation_data import CONTENT_TYPE, npz, overconfident

K = 10
LIMIT = 10_000_000
LOGITS, LABELS = overconfident(50, K)
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)


def read_bytes(
    data: bytes, folder: Path, max_bytes: int = LIMIT, classes: Sequence[str] = "0123456789"
) -> ValidationSet:
    """Read a file that is a part of another one."""
    (folder / "body").write_bytes(b"before" + data + b"after")
    part = FilePart(folder / "body", len(b"before"), len(data))
    return read_file(part, folder, classes=classes, max_bytes=max_bytes)


def parquet(logits: Any = None, label: Any = None, **columns: Any) -> bytes:
    """A `.parquet` of the good columns, or of others in their place."""
    table = {
        "logits": pa.array(list(LOGITS)) if logits is None else logits,
        "label": pa.array(LABELS) if label is None else label,
        **columns,
    }
    file = io.BytesIO()
    pq.write_table(pa.table({name: column for name, column in table.items() if column is not False}), file)
    return file.getvalue()


def changed(array: np.ndarray[Any, Any], place: Any, value: Any) -> np.ndarray[Any, Any]:
    """A copy with one value changed."""
    copy = array.copy()
    copy[place] = value
    return copy


GOOD: dict[str, Callable[[], bytes]] = {
    "float32": lambda: npz(logits=LOGITS, labels=LABELS),
    "float64": lambda: npz(logits=LOGITS.astype(np.float64), labels=LABELS),
    "float16": lambda: npz(logits=LOGITS.astype(np.float16), labels=LABELS),
    "big endian": lambda: npz(logits=LOGITS.astype(">f4"), labels=LABELS.astype(">i2")),
    "column order": lambda: npz(logits=np.asfortranarray(LOGITS), labels=LABELS),
    "small labels": lambda: npz(logits=LOGITS, labels=LABELS.astype(np.uint8)),
    "float labels": lambda: npz(logits=LOGITS, labels=LABELS.astype(float)),
    "labels (N, 1)": lambda: npz(logits=LOGITS, labels=LABELS[:, None]),
    "names": lambda: npz(logits=LOGITS, labels=LABELS.astype(str)),
    "JSON": lambda: document(logits=LOGITS.tolist(), labels=LABELS.tolist()),
    "JSON, names": lambda: document(logits=LOGITS.tolist(), labels=LABELS.astype(str).tolist()),
    "JSON, (N, 1)": lambda: document(logits=LOGITS.tolist(), labels=LABELS[:, None].astype(float).tolist()),
    "arrow": lambda: arrow(stream=False),
    "arrow, stream": lambda: arrow(stream=True),
    "arrow, compressed": lambda: arrow(compression="zstd"),
    "arrow, by class": lambda: arrow(by_class()),
    "CSV": lambda: csv(by_class()),
    "CSV, other order and delimiter": lambda: csv(by_class(reverse=True), delimiter=";"),
    "CSV, Windows": lambda: csv(by_class()).replace(b"\n", b"\r\n"),
    "CSV, list column": lambda: csv(written_lists()),
    "parquet, by class": lambda: written(by_class()),
    "parquet, float16 by class": lambda: written(by_class(np.float16)),
    "parquet, float label": lambda: parquet(label=pa.array(LABELS * 1.0)),
    "parquet, names": lambda: parquet(label=pa.array(LABELS.astype(str))),
    "parquet, categories": lambda: parquet(label=pa.array(LABELS.astype(str)).dictionary_encode()),
    "compressed": lambda: compressed(logits=LOGITS, labels=LABELS),
    "parquet": parquet,
    "parquet, fixed lists": lambda: parquet(
        pa.FixedSizeListArray.from_arrays(pa.array(LOGITS.ravel()), K), pa.array(LABELS, pa.uint8())
    ),
    "parquet, other columns beside": lambda: parquet(names=pa.array(["a"] * 50)),
}


def document(**members: Any) -> bytes:
    return json.dumps(members).encode()


def by_class(dtype: Any = np.float32, *, reverse: bool = False) -> pa.Table:
    """One column for each class, and the label."""
    columns = {str(index): LOGITS[:, index].astype(dtype) for index in range(K)}
    if reverse:
        columns = dict(reversed(columns.items()))
    return pa.table({**columns, "label": LABELS})


def written_lists() -> pa.Table:
    return pa.table({"logits": [json.dumps(row) for row in LOGITS.tolist()], "label": LABELS})


def written(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pq.write_table(table, file)
    return file.getvalue()


def csv(table: pa.Table, delimiter: str = ",") -> bytes:
    file = io.BytesIO()
    pacsv.write_csv(table, file, pacsv.WriteOptions(delimiter=delimiter))
    return file.getvalue()


def arrow(table: pa.Table | None = None, *, stream: bool = False, compression: str | None = None) -> bytes:
    table = pa.table({"logits": list(LOGITS), "label": LABELS}) if table is None else table
    file = io.BytesIO()
    write = pa.ipc.new_stream if stream else pa.ipc.new_file
    with write(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as out:
        out.write_table(table, max_chunksize=17)
    return file.getvalue()


def compressed(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize("name", GOOD)
def test_good_files_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    data = read_bytes(GOOD[name](), tmp_path)
    logits, labels = data.arrays()
    assert data.samples == 50
    assert logits.dtype in (np.float32, np.float64)
    np.testing.assert_allclose(logits, LOGITS, rtol=1e-3 if "float16" in name else 1e-7)
    np.testing.assert_array_equal(labels, LABELS)
    assert {path.name for path in tmp_path.iterdir()} == {"body", "logits.npy", "labels.npy"}


def test_probabilities_become_their_logarithms(tmp_path: Path) -> None:
    probabilities = changed(PROBABILITIES, 0, np.eye(K)[0])
    logits, _ = read_bytes(npz(probabilities=probabilities, labels=LABELS), tmp_path).arrays()
    np.testing.assert_allclose(np.exp(logits), probabilities, rtol=1e-6, atol=1e-37)
    assert np.isfinite(logits).all()


def test_sums_within_a_hundredth_are_divided_out_with_a_warning(tmp_path: Path) -> None:
    off = PROBABILITIES * np.where(np.arange(50) < 5, 0.992, 1)[:, None]
    data = read_bytes(npz(probabilities=off, labels=LABELS), tmp_path)
    np.testing.assert_allclose(np.exp(data.arrays()[0]).sum(axis=1), 1, atol=1e-5)
    assert data.notes == [
        {
            "code": "probabilities_scaled",
            "severity": "warning",
            "message": "the probabilities of 5 samples sum to 1 only within 0.01; they were divided by their "
            "sums",
            "rows": 5,
        }
    ]


def test_columns_named_by_class_hold_what_is_said(tmp_path: Path) -> None:
    columns = {str(index): PROBABILITIES[:, index] for index in range(K)}
    (tmp_path / "body").write_bytes(csv(pa.table({**columns, "label": LABELS})))
    part = FilePart(tmp_path / "body", 0, (tmp_path / "body").stat().st_size)
    data = read_file(part, tmp_path, classes="0123456789", max_bytes=LIMIT, scores="probabilities")
    np.testing.assert_allclose(np.exp(data.arrays()[0]), PROBABILITIES, rtol=1e-5)


def test_without_a_model_columns_name_the_classes(tmp_path: Path) -> None:
    names = [f"class {index}" for index in range(K)]
    table = by_class().rename_columns([*names, "label"])
    table = table.set_column(K, "label", pa.array([names[label] for label in LABELS]))
    (tmp_path / "body").write_bytes(csv(table))
    part = FilePart(tmp_path / "body", 0, (tmp_path / "body").stat().st_size)
    np.testing.assert_array_equal(
        read_file(part, tmp_path, classes=None, max_bytes=LIMIT).arrays()[1], LABELS
    )


def test_many_blocks_of_rows_are_read_like_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(700, 2000))
    labels = rng.integers(0, 2000, 700)
    data = read_bytes(
        npz(logits=wide, labels=labels), tmp_path, 20_000_000, [str(label) for label in range(2000)]
    )
    np.testing.assert_array_equal(data.arrays()[0], wide)


def pickled() -> bytes:
    """An archive whose array runs code when it is unpickled."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path("/tmp/boxcal-was-unpickled").touch, ()  # noqa: S108

    return npz(logits=np.array([[Bomb()] * K] * 50, dtype=object), labels=LABELS)


def archive(**members: bytes) -> bytes:
    """A zip archive of `.npy` members of any content."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        for name, content in members.items():
            out.writestr(f"{name}.npy", content)
    return file.getvalue()


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def bomb(shape: tuple[int, ...]) -> bytes:
    """An archive of a few kilobytes whose logits unpack to the shape in float64."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as out:
        with out.open("logits.npy", "w") as member:
            member.write(header.getvalue())
            for _ in range(shape[0] * shape[1] * 8 // 2**20):
                member.write(bytes(2**20))
        out.writestr("labels.npy", npy(np.zeros(shape[0], dtype=np.int64)))
    return file.getvalue()


def lying_header() -> bytes:
    """Logits whose header announces twice the numbers that follow."""
    good = npy(LOGITS)
    return archive(logits=good.replace(b"(50, 10)", b"(99, 10)"), labels=npy(np.zeros(99, dtype=np.int64)))


def corrupted() -> bytes:
    """One bit of the logits flipped on the way."""
    data = bytearray(npz(logits=LOGITS, labels=LABELS))
    data[data.index(LOGITS.tobytes()) + 5] ^= 1
    return bytes(data)


def duplicated() -> bytes:
    file = io.BytesIO(npz(logits=LOGITS, labels=LABELS))
    with zipfile.ZipFile(file, "a") as out, pytest.warns(UserWarning, match="Duplicate name"):
        out.writestr("logits.npy", npy(LOGITS))
    return file.getvalue()


def truncated_parquet() -> bytes:
    return parquet()[:-50]


def version_3() -> bytes:
    return archive(logits=b"\x93NUMPY\x03\x00" + npy(LOGITS)[8:], labels=npy(LABELS))


MANY = npz(logits=LOGITS, labels=LABELS)
BAD: dict[str, tuple[int, str, Callable[[], bytes]]] = {
    "empty": (415, "it is empty", lambda: b""),
    "text": (415, r"it begins with b'hell'", lambda: b"hello, world"),
    "a bare pickle": (415, r"neither .npz nor .parquet", lambda: pickle.dumps(LOGITS)),
    "a bare .npy": (415, r"neither .npz nor .parquet", lambda: npy(LOGITS)),
    "pickled array": (422, r"`logits` holds pickled Python objects \(dtype object\)", pickled),
    "truncated archive": (422, "no readable zip archive", lambda: MANY[: len(MANY) // 2]),
    "archive's head alone": (422, "no readable zip archive", lambda: MANY[:4]),
    "corrupted": (422, "`logits` .*: Bad CRC-32", corrupted),
    "two of a name": (422, "two arrays of the same name", duplicated),
    "missing labels": (422, r"needs `labels` and either .* it holds `logits`\.", lambda: npz(logits=LOGITS)),
    "missing logits": (422, r"it holds `labels`, `scores`\.", lambda: npz(scores=LOGITS, labels=LABELS)),
    "no arrays": (422, "it holds no arrays", npz),
    "both kinds": (
        422,
        "both `logits` and `probabilities`",
        lambda: npz(logits=LOGITS, probabilities=PROBABILITIES, labels=LABELS),
    ),
    "other K": (
        422,
        "`logits` has 3 columns; the backbone served here has 10 classes",
        lambda: npz(logits=LOGITS[:, :3], labels=LABELS),
    ),
    "one dimension": (
        422,
        r"`logits` must have the shape \(N, 10\), got \(500,\)",
        lambda: npz(logits=LOGITS.ravel(), labels=LABELS),
    ),
    "one-hot labels": (
        422,
        r"`labels` has the shape \(50, 10\), which looks like a one-hot encoding; .*argmax",
        lambda: npz(logits=LOGITS, labels=np.eye(K, dtype=int)[LABELS]),
    ),
    "labels of three dimensions": (
        422,
        r"`labels` must have the shape \(N,\), got \(50, 1, 1\)",
        lambda: npz(logits=LOGITS, labels=LABELS[:, None, None]),
    ),
    "unknown array": (
        422,
        r"holds the array 'featurs', which nothing reads; did you mean 'features'\?",
        lambda: npz(logits=LOGITS, labels=LABELS, featurs=LOGITS),
    ),
    "weights": (
        422,
        "`sample_weight` is not supported: all samples have the same weight",
        lambda: npz(logits=LOGITS, labels=LABELS, sample_weight=LABELS),
    ),
    "unknown name": (
        422,
        r"labels\[7\] is 'nine', which is no class of the model",
        lambda: npz(logits=LOGITS, labels=changed(LABELS.astype("U4"), 7, "nine")),
    ),
    "JSON, unknown member": (
        422,
        "member 'label'; did you mean 'labels'",
        lambda: document(logits=LOGITS.tolist(), label=LABELS.tolist()),
    ),
    "JSON, one-hot": (
        422,
        "one-hot",
        lambda: document(logits=LOGITS.tolist(), labels=np.eye(K)[LABELS].tolist()),
    ),
    "JSON, no list": (422, "must be lists", lambda: document(logits=7, labels=[1])),
    "JSON, ragged": (
        422,
        r"logits\[49\] has 2 numbers",
        lambda: document(logits=[*LOGITS[:-1].tolist(), [1, 2]], labels=LABELS.tolist()),
    ),
    "JSON, cut off": (400, "is not JSON", lambda: document(logits=LOGITS.tolist())[:-9]),
    "CSV, other class": (
        422,
        "The column 'l0' is no class of the model",
        lambda: csv(by_class().rename_columns(["l0", *map(str, range(1, K)), "label"])),
    ),
    "CSV, class missing": (422, "'3' is missing", lambda: csv(by_class().drop_columns(["3"]))),
    "CSV, words": (
        422,
        "no readable .csv: .*invalid value 'x'",
        lambda: csv(by_class()) + b",".join([b"x"] * 11) + b"\n",
    ),
    "CSV, missing number": (
        422,
        r"0\[50\] is missing",
        lambda: csv(by_class()) + b",1,1,1,1,1,1,1,1,1,1\n",
    ),
    "CSV, short row": (422, "no readable .csv: .*Expected 11 columns", lambda: csv(by_class()) + b"1,2\n"),
    "CSV, repeated column": (
        422,
        "more than one column '1'",
        lambda: csv(by_class()).replace(b'"2"', b'"1"', 1),
    ),
    "CSV, no rows": (
        422,
        "has no rows",
        lambda: b"label,0,1\n".replace(b"0,1", b",".join(b"%d" % n for n in range(10))),
    ),
    "CSV, weights": (
        422,
        "`weight` is not supported",
        lambda: csv(by_class().append_column("weight", pa.array(LABELS))),
    ),
    "arrow, cut off": (422, "no readable .arrow", lambda: arrow()[:-100]),
    "arrow, list of another length": (
        422,
        r"logits\[30\] is a list of 2",
        lambda: arrow(pa.table({"logits": [*LOGITS[:30].tolist(), [1.0, 2.0]], "label": LABELS[:31]})),
    ),
    "other N": (
        422,
        "`logits` has 50 rows but `labels` has 49 values",
        lambda: npz(logits=LOGITS, labels=LABELS[1:]),
    ),
    "one sample": (
        422,
        f"has 1 samples.*at least {MIN_SAMPLES}",
        lambda: npz(logits=LOGITS[:1], labels=LABELS[:1]),
    ),
    "no sample": (422, "has 0 samples", lambda: npz(logits=LOGITS[:0], labels=LABELS[:0])),
    "fractional labels": (
        422,
        r"labels\[0\] is .*\.5; class indices are integers",
        lambda: npz(logits=LOGITS, labels=LABELS + 0.5),
    ),
    "complex logits": (
        422,
        "`logits` must hold real numbers, got the dtype complex64",
        lambda: npz(logits=LOGITS.astype(np.complex64), labels=LABELS),
    ),
    "words": (
        422,
        "`logits` must hold real numbers, got the dtype <U32",
        lambda: npz(logits=LOGITS.astype(str), labels=LABELS),
    ),
    "label too large": (
        422,
        r"labels\[7\] is 10; class indices go from 0 to 9\.",
        lambda: npz(logits=LOGITS, labels=changed(LABELS, 7, 10)),
    ),
    "labels negative": (
        422,
        r"labels\[2\] is -1; .* \(1 more label out of range\)",
        lambda: npz(logits=LOGITS, labels=changed(LABELS, [2, 9], -1)),
    ),
    "NaN": (
        422,
        r"logits\[3, 1\] is nan",
        lambda: npz(logits=changed(LOGITS, (3, 1), np.nan), labels=LABELS),
    ),
    "+inf": (
        422,
        r"logits\[49, 0\] is inf",
        lambda: npz(logits=changed(LOGITS, (49, 0), np.inf), labels=LABELS),
    ),
    "-inf": (
        422,
        r"logits\[0, 3\] is -inf",
        lambda: npz(logits=changed(LOGITS, (0, 3), -np.inf), labels=LABELS),
    ),
    "logits as probabilities": (
        422,
        "a probability lies between 0 and 1. Send scores of another kind as `logits`",
        lambda: npz(probabilities=LOGITS, labels=LABELS),
    ),
    "sums": (
        422,
        r"probabilities\[5\] sums to 0\.[0-9]+; the probabilities of a sample sum to 1",
        lambda: npz(probabilities=changed(PROBABILITIES, 5, PROBABILITIES[5] / 2), labels=LABELS),
    ),
    "lying header": (422, "announces 3,960 bytes of float32 .* but 2,000 are there", lying_header),
    ".npy of another version": (422, r"format \(3, 0\)", version_3),
    "no .npy": (
        422,
        "`logits` is no readable .npy array",
        lambda: archive(logits=b"what", labels=npy(LABELS)),
    ),
    "zip bomb": (413, "unpack to 23,068,672 bytes; the limit is 10,000,000", lambda: bomb((2**18, K))),
    "truncated parquet": (422, "no readable .parquet", truncated_parquet),
    "parquet without label": (
        422,
        "one column `label`; it has the columns `logits`",
        lambda: parquet(label=False),
    ),
    "parquet of numbers": (
        422,
        "`logits` must hold lists of floats, got float",
        lambda: parquet(pa.array(LOGITS[:, 0])),
    ),
    "parquet of words": (
        422,
        "must hold lists of floats, got list<",
        lambda: parquet(pa.array([["a"] * K] * 50)),
    ),
    "parquet, fractional label": (
        422,
        "class indices are integers",
        lambda: parquet(label=pa.array(LABELS + 0.5)),
    ),
    "parquet, ragged": (
        422,
        r"logits\[1\] is a list of 3",
        lambda: parquet(pa.array([LOGITS[0], LOGITS[1][:3], *LOGITS[2:]])),
    ),
    "parquet, missing row": (
        422,
        r"logits\[2\] is missing",
        lambda: parquet(pa.array([*LOGITS[:2], None, *LOGITS[3:]])),
    ),
    "parquet, missing number": (
        422,
        r"logits\[0, 1\] is missing",
        lambda: parquet(pa.array([[1.0, None, *[0.0] * 8]] + [[0.0] * K] * 49)),
    ),
    "parquet, missing label": (
        422,
        r"label\[3\] is missing",
        lambda: parquet(label=pa.array([0, 1, 2, None] + [0] * 46)),
    ),
    "parquet, NaN": (
        422,
        r"logits\[4, 2\] is nan",
        lambda: parquet(pa.array(list(changed(LOGITS, (4, 2), np.nan)))),
    ),
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
    with pytest.raises(UploadTooLarge, match=too_large):
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
            folder = tmp_path / f"{len(kind)}-{trial}"
            folder.mkdir()
            with suppress(UploadTooLarge, UnknownUploadFormat, InvalidUpload, MalformedBody):
                logits, labels = read_bytes(bytes(data), folder).arrays()
                assert np.isfinite(logits).all()
                assert ((labels >= 0) & (labels < K)).all()


def test_an_upload_that_stalls_loses_its_slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("boxcal.app.uploads.upload.RATE_SECONDS", 0.05)

    async def stalls() -> AsyncGenerator[bytes, None]:
        yield b"--x\r\nContent-Disposition: form-data; name=file; filename=v.npz\r\n\r\nPK"
        await asyncio.Event().wait()

    async def receives() -> None:
        await receive({"content-type": CONTENT_TYPE}, stalls(), tmp_path / "body", LIMIT)

    with pytest.raises(UploadStalled, match=r"brought 68 bytes in 0\.05 s, after 0; the minimum is 163,840"):
        asyncio.run(receives())
