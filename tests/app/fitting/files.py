"""Uploads of every format, made of the same logits and labels, and a reader of their bytes."""

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from boxcal.app.fitting.worker.check import read_file
from boxcal.app.fitting.worker.validation_set import StoredSet
from boxcal.app.tables.file_part import FilePart
from boxcal.app.tables.labels import NOTHING, Declared
from tests.app.fitting.validation_data import overconfident

K = 10
LIMIT = 10_000_000
LOGITS, LABELS = overconfident(50, K)
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)


def read_bytes(
    data: bytes,
    folder: Path,
    max_bytes: int = LIMIT,
    classes: Sequence[str] | None = tuple("0123456789"),
    declared: Declared = NOTHING,
) -> StoredSet:
    """Read a file that is a part of another one."""
    folder.mkdir(exist_ok=True)
    (folder / "body").write_bytes(b"before" + data + b"after")
    part = FilePart(folder / "body", len(b"before"), len(data))
    return read_file(part, folder, classes=classes, max_bytes=max_bytes, declared=declared)


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
    copy = array.copy()
    copy[place] = value
    return copy


def document(**members: Any) -> bytes:
    return json.dumps(members).encode()


def by_class(dtype: Any = np.float32, *, reverse: bool = False) -> pa.Table:
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


def archive(**members: bytes) -> bytes:
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
