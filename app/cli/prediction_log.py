"""Reads a log of predictions for `boxcal monitor`: `.npz`, Parquet or CSV, labelled where labels arrived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boxcal.app.cli.failures import UsageError
from boxcal.app.cli.tables import csv_rows, json_numbers, parquet_file

Array = np.ndarray[Any, Any]

UNLABELLED = -1
SMALLEST = 1e-30
"""Probabilities below it count as it, so that they have a logarithm."""

Columns = Mapping[str, Any]


@dataclass(frozen=True)
class PredictionLog:
    """Predictions in the order in which they were made.

    Attributes
    ----------
    logits
        (N, K) float64.
    labels
        (N,) int64; `UNLABELLED` where no label is known.
    times
        (N,) float64, or None where the file has none.
    """

    logits: Array
    labels: Array
    times: Array | None


def read(path: Path) -> PredictionLog:
    """Read a log and sort it by time, where there is one.

    Raises
    ------
    UsageError
        Naming the column, row or value that is wrong.
    """
    readers: dict[str, Callable[[Path], Columns]] = {
        ".npz": _npz, ".parquet": _parquet, ".pq": _parquet, ".csv": _csv
    }  # fmt: skip
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path} is no .npz, .parquet or .csv file")
    return _checked(path, reader(path))


def _npz(path: Path) -> Columns:
    try:
        with np.load(path, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} cannot be read as .npz: {error}") from error
    return {("label" if name == "labels" else name): value for name, value in found.items()}


def _parquet(path: Path) -> Columns:
    with parquet_file(path) as opened:
        table = opened.read()
    columns = {name: table[name].to_pylist() for name in table.column_names}
    return {("label" if name == "labels" else name): value for name, value in columns.items()}


def _csv(path: Path) -> Columns:
    with csv_rows(path) as reader:
        rows = list(reader)
    if not rows:
        raise UsageError(f"{path} has no rows")
    columns: dict[str, list[Any]] = {name: [row[name] for row in rows] for name in rows[0] if name}
    for name in ("logits", "probabilities"):
        if name in columns:
            columns[name] = [json_numbers(path, place, cell) for place, cell in enumerate(columns[name])]
    return columns


def _checked(path: Path, columns: Columns) -> PredictionLog:
    scores = [name for name in ("logits", "probabilities") if name in columns]
    if len(scores) != 1 or "label" not in columns:
        raise UsageError(
            f"{path} has the columns {', '.join(columns) or 'none'}; it needs label, and logits or"
            " probabilities"
        )
    rows = _rows(path, scores[0], columns[scores[0]])
    if scores[0] == "probabilities":
        if (rows < 0.0).any() or not np.allclose(rows.sum(1), 1.0, atol=1e-3):
            wrong = np.flatnonzero((rows < 0.0).any(1) | ~np.isclose(rows.sum(1), 1.0, atol=1e-3))[0]
            raise UsageError(f"{path}, row {wrong}: the probabilities sum to {rows[wrong].sum():g}")
        rows = np.log(np.maximum(rows, SMALLEST))
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
