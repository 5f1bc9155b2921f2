"""Reads a log of predictions for `boxcal monitor`: `.npz` or a table, labelled where labels arrived."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from boxcal.app.cli.failures import UsageError, naming
from boxcal.app.http.problems import InvalidUpload
from boxcal.app.tables.columns import SCORES
from boxcal.app.tables.formats import BATCH_ROWS, START_BYTES, open_table, readable, table_kind
from boxcal.app.tables.values import lists_of
from boxcal.calibrators.scores import as_logits

Array = np.ndarray[Any, Any]

UNLABELLED = -1
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class PredictionLog:
    """Predictions in the order in which they were made."""

    logits: Array  # (N, K) float64
    labels: Array  # (N,) int64; `UNLABELLED` where no label is known
    times: Array | None  # (N,) float64, or None where the file has none


def read(path: Path) -> PredictionLog:
    """Read a log and sort it by time, where there is one."""
    with path.open("rb") as file:
        kind = "npz" if file.peek(2)[:2] == b"PK" else table_kind(file.peek(START_BYTES)[:START_BYTES])
        if kind is None:
            raise UsageError(f"{path} is no .npz, .parquet, .arrow or .csv file")
        with naming(path):
            return _checked(path, _npz(file) if kind == "npz" else _table(file, kind))


def _npz(file: IO[bytes]) -> Columns:
    try:
        with np.load(file, allow_pickle=False) as archive:
            return {("label" if name == "labels" else name): archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidUpload(f"The file is no readable .npz: {error}.") from error


def _table(file: IO[bytes], kind: str) -> Columns:
    with readable(kind):
        table = open_table(file, kind)
        names = [name for name in table.names if name in (*SCORES, "label", "labels", "time")]
        found: dict[str, list[Any]] = {name: [] for name in names}
        count = 0
        for batch in table.batches(names, (), BATCH_ROWS):
            for name in names:
                column = batch.column(name)
                found[name].extend(lists_of(column, name, count) if name in SCORES else column.to_pylist())
            count += len(batch)
    if not count:
        raise InvalidUpload("The table has no rows.")
    return {("label" if name == "labels" else name): value for name, value in found.items()}


def _checked(path: Path, columns: Columns) -> PredictionLog:
    scores = [name for name in SCORES if name in columns]
    if len(scores) != 1 or "label" not in columns:
        raise UsageError(
            f"{path} has the columns {', '.join(columns) or 'none'}; it needs label, and logits or"
            " probabilities"
        )
    rows = _rows(path, scores[0], columns[scores[0]])
    rows, _ = as_logits(rows, scores[0])
    labels = _numbers(path, "label", columns["label"], UNLABELLED)
    wrong_labels = np.flatnonzero(
        (labels != np.floor(labels)) | (labels < UNLABELLED) | (labels >= rows.shape[1])
    )
    if len(wrong_labels):
        place = wrong_labels[0]
        raise UsageError(
            f"{path}, row {place}: label {labels[place]:g} is not one of {rows.shape[1]} classes"
        )
    times = _numbers(path, "time", columns["time"], np.nan) if "time" in columns else None
    if len(labels) != len(rows) or (times is not None and len(times) != len(rows)):
        raise UsageError(f"{path} has {len(rows):,} rows of {scores[0]}, but {len(labels):,} labels")
    if times is None:
        return PredictionLog(rows, labels.astype(np.int64), None)
    if np.isnan(times).any():
        raise UsageError(f"{path}, row {np.flatnonzero(np.isnan(times))[0]}: the time is missing")
    order = np.argsort(times, kind="stable")
    return PredictionLog(rows[order], labels[order].astype(np.int64), times[order])


def _rows(path: Path, name: str, values: Any) -> Array:
    try:
        rows = np.array(values if isinstance(values, np.ndarray) else list(values), dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"{path}: the rows of {name} are not numbers of one length") from None
    if rows.ndim != 2 or rows.shape[1] < 2 or not len(rows):
        raise UsageError(f"{path}: {name} has shape {rows.shape}, not (N, K)")
    if not np.isfinite(rows).all():
        raise UsageError(f"{path}, row {np.argwhere(~np.isfinite(rows))[0, 0]}: {name} are not finite")
    return rows


def _numbers(path: Path, name: str, values: Any, missing: float) -> Array:
    """Read a column of numbers or, of times, of dates in ISO 8601; empty cells are missing."""
    array = np.asarray(values)
    if array.dtype.kind in "iuf":
        found = array.astype(np.float64)
        return np.where(np.isnan(found), missing, found)
    if array.dtype.kind == "M":
        return array.astype("datetime64[us]").astype(np.float64) / 1e6
    numbers = np.empty(len(array))
    for place, cell in enumerate(values):
        try:
            numbers[place] = missing if cell is None or cell == "" else float(cell)
        except (TypeError, ValueError):
            if name != "time":
                raise UsageError(f"{path}, row {place}: {name} {cell!r} is no number") from None
            numbers[place] = _date(path, place, cell)
    return numbers


def _date(path: Path, place: int, cell: Any) -> float:
    try:
        return float(np.datetime64(cell, "us").astype(np.int64)) / 1e6
    except ValueError:
        raise UsageError(f"{path}, row {place}: time {cell!r} is no number and no date of ISO 8601") from None
