"""Files that cannot be fitted are refused by name, place and value."""

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from boxcal.app.http.problems import BoxcalError
from tests.app.fitting.files import (
    LABELS,
    LOGITS,
    PROBABILITIES,
    K,
    archive,
    arrow,
    bomb,
    by_class,
    changed,
    csv,
    document,
    npy,
    parquet,
    read_bytes,
)
from tests.app.fitting.validation_data import npz


def pickled() -> bytes:
    """An archive whose array runs code when it is unpickled."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path("/tmp/boxcal-was-unpickled").touch, ()  # noqa: S108

    return npz(logits=np.array([[Bomb()] * K] * 50, dtype=object), labels=LABELS)


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
    "a bare .npy": (415, r"neither .npz nor .parquet", lambda: npy(LOGITS)),
    "pickled array": (422, r"`logits` holds pickled Python objects \(dtype object\)", pickled),
    "truncated archive": (422, "no readable zip archive", lambda: MANY[: len(MANY) // 2]),
    "an entry without a name": (422, "has no name", lambda: MANY.replace(b"labels.npy", b"\0abels.npy")),
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
        r"has a member 'featurs'; did you mean 'features'\?",
        lambda: npz(logits=LOGITS, labels=LABELS, featurs=LOGITS),
    ),
    "one group": (
        422,
        "All samples belong to the group 'a'; a fit is judged on groups that it has not seen",
        lambda: npz(logits=LOGITS, labels=LABELS, groups=np.array(["a"] * len(LABELS))),
    ),
    "groups of another length": (
        422,
        r"`groups` must have the shape \(50,\), got \(3,\)",
        lambda: npz(logits=LOGITS, labels=LABELS, groups=np.arange(3)),
    ),
    "groups of several kinds": (
        422,
        "`groups` must be a list of integers or of texts",
        lambda: document(logits=LOGITS.tolist(), labels=LABELS.tolist(), groups=[1, "a"]),
    ),
    "a group that is missing": (
        422,
        r"group\[3\] is missing",
        lambda: parquet(group=pa.array([0, 1, 2, None, *range(46)])),
    ),
    "weights": (
        422,
        r"sample_weight\[7\] is -1.0; weights are finite and not negative",
        lambda: npz(
            logits=LOGITS, labels=LABELS, sample_weight=np.where(np.arange(len(LABELS)) == 7, -1.0, 1.0)
        ),
    ),
    "weights that are all 0": (
        422,
        "`sample_weight` is above 0 for 0 samples",
        lambda: npz(logits=LOGITS, labels=LABELS, sample_weight=0 * LABELS),
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
    "JSON, no list": (422, "`logits` of the document must be a list", lambda: document(logits=7, labels=[1])),
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
        "`weight` is not read; send the weights of samples as `sample_weight`",
        lambda: csv(by_class().append_column("weight", pa.array(LABELS))),
    ),
    "arrow, cut off": (422, "no readable .arrow", lambda: arrow()[:-100]),
    "other N": (
        422,
        "`logits` has 50 rows but `labels` has 49 values",
        lambda: npz(logits=LOGITS, labels=LABELS[1:]),
    ),
    "one sample": (
        422,
        "has 1 sample; .*at least 20",
        lambda: npz(logits=LOGITS[:1], labels=LABELS[:1]),
    ),
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
