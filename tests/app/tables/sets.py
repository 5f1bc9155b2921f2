"""One validation set in every format, and what reading it gives."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import scipy.special

from boxcal.app.fitting.worker.validation_set import StoredSet
from boxcal.app.tables.labels import NOTHING, Declared
from tests.app.fitting.files import read_bytes
from tests.app.fitting.validation_data import npz

Array = np.ndarray[Any, Any]
ROWS = 60


@dataclass(frozen=True)
class Given:
    """Scores (N, K), the names of their columns, and labels, as indices of the columns."""

    scores: Array
    names: Sequence[str]
    labels: Array

    def named_labels(self) -> Array:
        return np.array(self.names)[self.labels]


def given(names: Sequence[str], rows: int = ROWS, seed: int = 0) -> Given:
    """Logits of a model that is right in most rows; every class is some row's label."""
    rng = np.random.default_rng(seed)
    labels = np.resize(np.arange(len(names)), rows)
    scores = rng.normal(size=(rows, len(names)))
    scores[np.arange(rows), labels] += 2.0
    return Given(scores, names, labels)


def frame(one: Given, labels: Any = None, **more: Any) -> pd.DataFrame:
    table = pd.DataFrame(one.scores, columns=list(one.names))
    return table.assign(label=one.named_labels() if labels is None else labels, **more)


def arrow(table: pd.DataFrame, new: Callable[..., Any] = pa.ipc.new_file) -> bytes:
    out = io.BytesIO()
    whole = pa.Table.from_pandas(table, preserve_index=False)
    with new(out, whole.schema) as file:
        file.write_table(whole)
    return out.getvalue()


TABLES: dict[str, Callable[[pd.DataFrame], bytes]] = {
    "csv": lambda table: table.to_csv(index=False).encode(),
    "csv of pandas with its index": lambda table: table.to_csv().encode(),
    "csv with semicolons and CRLF": lambda table: table.to_csv(
        index=False, sep=";", lineterminator="\r\n"
    ).encode(),
    "csv with bars": lambda table: table.to_csv(index=False, sep="|").encode(),
    "csv with commas at the end": lambda table: table.to_csv(index=False).replace("\n", ",\n").encode(),
    "csv with a byte order mark": lambda table: table.to_csv(index=False).encode("utf-8-sig"),
    "lines with a byte order mark": lambda table: b"\xef\xbb\xbf" + TABLES["lines"](table),
    "csv.gz": lambda table: gzip.compress(table.to_csv(index=False).encode()),
    "records": lambda table: table.to_json(orient="records", double_precision=15).encode(),
    "lines": lambda table: table.to_json(orient="records", double_precision=15, lines=True).encode(),
    "parquet": lambda table: bytes(table.to_parquet()),
    "arrow": arrow,
    "arrow stream": partial(arrow, new=pa.ipc.new_stream),
}


def arrays_of(one: Given, labels: Any = None, name: str = "logits") -> dict[str, bytes]:
    """The set as arrays that name their classes."""
    labels = one.named_labels() if labels is None else np.asarray(labels)
    members = {name: one.scores, "labels": labels, "classes": np.array(one.names)}
    document = {key: value.tolist() for key, value in members.items()}
    return {"npz": npz(**members), "json": json.dumps(document).encode()}


def read(data: bytes, folder: Path, classes: Any = None, declared: Declared = NOTHING) -> StoredSet:
    return read_bytes(data, folder, classes=classes, declared=declared)


def softmax(logits: Array) -> Array:
    return np.asarray(scipy.special.softmax(logits, axis=1))
