"""`boxcal monitor`: replays a log of predictions and labels through the monitor of the service.

Reads a log of predictions for `boxcal monitor`: `.npz` or a table, labelled where labels arrived.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from boxcal.app.cli.output import (
    UsageError,
    escape,
    messages,
    naming,
    plain_table,
    progress_bar,
    screen,
    write_json,
)
from boxcal.app.http.problems import InvalidUpload
from boxcal.app.monitoring.fold import ActiveVersion, MonitorFold, document_of
from boxcal.app.monitoring.records import NONE, entries
from boxcal.app.tables.columns import SCORES
from boxcal.app.tables.kinds import START_BYTES, check_tables_package, table_kind
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.monitoring.candidates import candidates, mean_nll
from boxcal.calibrators.monitoring.decisions import DecisionKind, LoopDecision
from boxcal.calibrators.monitoring.figure import Trace, draw
from boxcal.calibrators.monitoring.refit_loop import INTERVAL
from boxcal.calibrators.monitoring.stored_logits import pack
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
    check_tables_package()
    from boxcal.app.tables.formats import BATCH_ROWS, open_table, readable  # noqa: PLC0415 - arrays need neither
    from boxcal.app.tables.values import lists_of  # noqa: PLC0415 - as above

    with readable(kind):
        table = open_table(file, kind)
        names = [name for name in table.names if name in (*SCORES, "label", "labels", "time")]
        if not set(names) & set(SCORES):
            shown = ", ".join(f"`{name:.50}`" for name in table.names[:20])
            raise InvalidUpload(
                f"The table has the columns {shown}; it needs `logits` or `probabilities`, a list a row."
            )
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
    for place, cell in enumerate(values.tolist() if isinstance(values, np.ndarray) else values):
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


MARKED = {DecisionKind.ALARM: "strict alarm", DecisionKind.ACTIVATED: "activation"}
UNLABELLED_AT_ONCE = 1000
DECISION_WIDTH = 10


def run(
    file: Path,
    *,
    calibrator: Path | None,
    validation: Path | None,
    refit: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay, save the plot, and show the numbers."""
    if plot is not None and plot.suffix.lower() not in {".svg", ".png"}:
        raise UsageError(f"{plot} is no .svg or .png file")
    log = read(file)
    replay = Replay(
        _calibrator(calibrator, log),
        None if validation is None else _validation(validation, log),
        refit=refit,
    )
    with progress_bar("replaying") as advance:
        replay.run(log, advance)
    if plot is not None:
        if not replay.trace.labels:
            raise UsageError(f"{file} has no labels to plot")
        plot.write_bytes(draw(replay.trace, "svg" if plot.suffix.lower() == ".svg" else "png"))
        messages.print(f"saved {escape(str(plot))}", soft_wrap=True)
    document = replay.document(len(log.labels))
    if as_json:
        write_json(document)
    else:
        _show(document)


class Replay:
    """The monitor of the service, fed with a log, that fits and activates at once where it may."""

    def __init__(self, calibrator: ArrayCalibrator, validation: PredictionLog | None, *, refit: bool) -> None:
        prior, gap = None, 0.0
        if validation is not None:
            known = validation.labels != UNLABELLED
            labels = validation.labels[known]
            rows = calibrator(validation.logits[known])
            prior = rows.mean(0)
            gap = float((rows.argmax(1) == labels).mean() - rows.max(1).mean())
        self.versions = {0: (calibrator, prior)}
        self.gap, self.refit = gap, refit
        self.fold = MonitorFold(calibrator.num_classes, self._calibrate, self._active(0), refits=refit)
        self.decisions: list[LoopDecision] = []
        self.trace = Trace()

    def run(self, log: PredictionLog, advance: Any) -> None:
        """Fold the log, at most `INTERVAL` labels at a time."""
        labelled = np.flatnonzero(log.labels != UNLABELLED)
        logits, labels = log.logits[labelled], log.labels[labelled]
        first = 0
        while first < len(log.labels):
            last = self._next(log, labelled, first)
            decided = self.fold.fold(_entries(log, first, last))
            seen = self.fold.loop.seen
            self._trace(log, first, last)
            if self.refit:
                decided += self._answer(logits, labels)
            self.decisions += decided
            self.trace.marks += [(seen, MARKED[one.kind]) for one in decided if one.kind in MARKED]
            first = last
            advance(first / len(log.labels), "")

    def _next(self, log: PredictionLog, labelled: Array, first: int) -> int:
        """Give the end of a piece: the row after the label at which the loop decides next."""
        seen = self.fold.loop.seen
        place = seen + INTERVAL - seen % INTERVAL - 1
        end = int(labelled[place]) + 1 if place < len(labelled) else len(log.labels)
        return min(end, first + UNLABELLED_AT_ONCE)

    def _answer(self, logits: Array, labels: Array) -> list[LoopDecision]:
        loop, decided = self.fold.loop, []
        if request := loop.request:
            champion, prior = self.versions[request.champion]
            rows = slice(request.first, request.last)
            earlier = {version: self.versions[version] for version in loop.earlier_versions}
            found = candidates(champion, logits[rows], labels[rows], prior, earlier=earlier)
            best = found[0]
            version = max(self.versions) + 1 if best.version is None else best.version
            self.versions[version] = best.calibrator, best.class_prior
            nll = mean_nll(champion, logits[rows], labels[rows])
            decided.append(
                loop.fitted(version, name=best.name, nll=best.score, champion_nll=nll, compared=len(found))
            )
        if proposal := loop.proposal:
            decided.append(self.fold.activated(self._active(proposal.version)))
        return decided

    def _active(self, version: int) -> ActiveVersion:
        calibrator, prior = self.versions[version]
        return ActiveVersion(version, calibrator.method, version, prior, self.gap, reads_logits=True)

    def _calibrate(self, version: int, logits: Array) -> Array:
        rows: Array = self.versions[version][0](logits)
        return rows

    def _trace(self, log: PredictionLog, first: int, last: int) -> None:
        labels = log.labels[first:last]
        known = labels != UNLABELLED
        if not known.any():
            return
        rows = self._calibrate(self.fold.active.version, log.logits[first:last][known])
        self.trace.confidence.append(rows.max(1))
        self.trace.right.append(rows.argmax(1) == labels[known])
        strict, material = self.fold.loop.test.log_evidence
        self.trace.labels.append(self.fold.loop.seen)
        self.trace.strict.append(strict)
        self.trace.material.append(material)

    def document(self, predictions: int) -> dict[str, Any]:
        """Give the numbers as the service does, and the decisions."""
        size = self.fold.num_classes
        decisions = [
            {"kind": one.kind.value, "at": one.at, "sentence": one.sentence, "evidence": dict(one.evidence)}
            for one in self.decisions
        ]
        document = document_of(self.fold, [str(k) for k in range(size)])
        return {"predictions": predictions, **document, "decisions": decisions}


def _calibrator(path: Path | None, log: PredictionLog) -> ArrayCalibrator:
    size = log.logits.shape[1]
    if path is None:
        return ArrayCalibrator.uncalibrated(size)
    loaded = ArrayCalibrator.from_bytes(path.read_bytes())
    if loaded.reads != "logits" or loaded.num_classes != size:
        raise UsageError(
            f"{path} reads {loaded.reads} of {loaded.num_classes} classes, but the log has logits of {size}"
        )
    return loaded


def _validation(path: Path, log: PredictionLog) -> PredictionLog:
    found, size = read(path), log.logits.shape[1]
    if found.logits.shape[1] != size:
        raise UsageError(f"{path} has {found.logits.shape[1]} classes, but the log has {size}")
    if (found.labels == UNLABELLED).all():
        raise UsageError(f"{path} has no labels")
    return found


def _entries(log: PredictionLog, first: int, last: int) -> Array:
    labels = log.labels[first:last]
    return entries(
        np.arange(first, last) + 1,
        np.full(last - first, NONE),
        np.arange(first, last) if log.times is None else log.times[first:last],
        pack(log.logits[first:last]),
        labels=np.where(labels == UNLABELLED, NONE, labels),
    )


def _show(document: dict[str, Any]) -> None:
    calibrator = document["calibrator"]
    screen.print(
        f"{document['predictions']:,} predictions; calibrator {escape(calibrator['method'])} was tested on"
        f" {document['labels']:,} labels",
        soft_wrap=True,
    )
    table = plain_table("test", "alarm", "log₁₀ E", "largest", "alarm from")
    for name, found in document["alarms"].items():
        numbers = (found["log_evidence"], found["largest_log_evidence"], found["threshold"])
        table.add_row(name, "yes" if found["alarm"] else "no", *(f"{n / np.log(10):.2f}" for n in numbers))
    screen.print(table)
    metrics = document["metrics"]
    if document["labels"]:
        table = plain_table("metric", "value", "")
        table.add_row(
            "NLL", f"{metrics['nll']:.4f}", f"{metrics['nll_low']:.4f} to {metrics['nll_high']:.4f}"
        )
        table.add_row("error rate", f"{metrics['error_rate']:.4f}", "")
        table.add_row("Brier score", f"{metrics['brier']:.4f}", "")
        table.add_row("ECE", f"{metrics['ece']:.4f}", f"if calibrated {metrics['ece_if_calibrated']:.4f}")
        accuracy = document["expected_accuracy"]
        interval = "" if accuracy["low"] is None else f"{accuracy['low']:.4f} to {accuracy['high']:.4f}"
        table.add_row(f"accuracy, from {accuracy['basis']}", f"{accuracy['value']:.4f}", interval)
        screen.print(table)
    for one in document["decisions"]:
        screen.print(f"{one['at']:>{DECISION_WIDTH},}  {escape(one['sentence'])}", soft_wrap=True)
