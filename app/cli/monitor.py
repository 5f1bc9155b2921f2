"""`boxcal monitor`: replays a log of predictions and labels through the monitor of the service.

Reads a log of predictions for `boxcal monitor`: `.npz` or a table, labelled where labels arrived.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from boxcal.app.cli.output import (
    UsageError,
    check_outputs,
    escape,
    messages,
    naming,
    plain_table,
    progress_bar,
    screen,
    show_warnings,
    write_json,
)
from boxcal.app.cli.validation import saved_calibrator, unpacked
from boxcal.app.http.problems import InvalidUpload
from boxcal.app.monitoring.fold import ActiveVersion, MonitorFold, document_of
from boxcal.app.monitoring.records import NONE, entries
from boxcal.app.tables.columns import LABEL, SCORES, choose_columns, kind_of
from boxcal.app.tables.kinds import START_BYTES, check_tables_package, no_kind, table_kind
from boxcal.app.tables.labels import (
    CLASSES,
    Declared,
    as_indices,
    check_shape,
    column_order,
    label_names,
    names_of,
    refuse_matrix,
)
from boxcal.app.tables.scores import check_kind, finite_rows, is_single
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.checks import check_known
from boxcal.calibrators.errors import hint
from boxcal.calibrators.monitoring.candidates import candidates, mean_nll
from boxcal.calibrators.monitoring.decisions import DecisionKind, LoopDecision
from boxcal.calibrators.monitoring.figure import Trace, draw
from boxcal.calibrators.monitoring.refit_loop import INTERVAL
from boxcal.calibrators.monitoring.stored_logits import pack
from boxcal.calibrators.row_statistics import Sketch
from boxcal.calibrators.scores import LOGITS, ScoreLook, two_columns

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]

UNLABELLED = -1
TIME = "time"


@dataclass(frozen=True)
class PredictionLog:
    """Predictions in the order in which they were made."""

    logits: Array  # (N, K) float64
    labels: Array  # (N,) int64; `UNLABELLED` where no label is known
    times: Array | None  # (N,) float64, or None where the file has none
    classes: Sequence[str] | None  # The names of the classes; None where nothing names them


def read(path: Path, declared: Declared, classes: Sequence[str] | None) -> PredictionLog:
    """Read a log and sort it by time, where there is one; `classes`: the names of a calibrator."""
    with naming(path), unpacked(path) as plain, plain.open("rb") as file:
        start = file.read(START_BYTES)
        file.seek(0)
        kind = "npz" if start[:2] == b"PK" else table_kind(start)
        if kind is None:
            raise InvalidUpload(
                no_kind("The file is no .npz, .parquet, .arrow, .csv or .json of records", start)
            )
        return _npz(file, declared, classes) if kind == "npz" else _table(file, kind, declared, classes)


def _npz(file: IO[bytes], declared: Declared, classes: Sequence[str] | None) -> PredictionLog:
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidUpload(f"The file is no readable .npz: {error}.") from error
    arrays = {name: one for name, one in arrays.items() if name not in declared.ignore}
    scores = [name for name in SCORES if name in arrays]
    label = next((name for name in ("labels", LABEL) if name in arrays), None)
    if len(scores) != 1 or label is None:
        shown = ", ".join(f"`{name:.50}`" for name in list(arrays)[:20]) or "no arrays"
        raise InvalidUpload(f"The .npz needs `labels`, and `logits` or `probabilities`; it holds {shown}.")
    read = (scores[0], label, TIME, CLASSES)
    if unread := next((name for name in arrays if name not in read), None):
        raise _unread("The .npz has an array", unread, read)
    rows = arrays[scores[0]]
    if rows.ndim not in {1, 2} or not rows.size or rows.dtype.kind not in "fiu":
        raise InvalidUpload(
            f"`{scores[0]}` must hold numbers (N, K), got {rows.dtype} of shape {rows.shape}."
        )
    check_shape(arrays[label].shape)
    refuse_matrix(arrays[label])
    kind, of_one = kind_of(scores[0], declared), is_single(rows.shape)
    rows = two_columns(rows, kind) if of_one else rows
    own = names_of(arrays[CLASSES]) if CLASSES in arrays else declared.classes
    if own is not None and len(own) != rows.shape[1]:
        raise InvalidUpload(
            f"`{CLASSES}` names {len(own)} classes, and `{scores[0]}` has {rows.shape[1]} columns."
        )
    order, names = column_order(classes, own), own or classes
    known = replace(declared, classes=None if names is None else tuple(names))
    log = _log(rows, kind, arrays[label].ravel(), arrays.get(TIME), known, is_single=of_one)
    if order is None:
        return log
    labels = np.where(log.labels == UNLABELLED, UNLABELLED, np.argsort(order)[log.labels])
    return replace(log, logits=log.logits[:, order], labels=labels, classes=classes)


def _unread(where: str, name: str, read: Sequence[str] = ()) -> InvalidUpload:
    leave_out = f"leave it out with ignore={name:.100}."
    return InvalidUpload(f"{where} {name!r:.100}, which is not read{hint(name, read, leave_out)}")


def _table(file: IO[bytes], kind: str, declared: Declared, classes: Sequence[str] | None) -> PredictionLog:
    check_tables_package()
    from boxcal.app.tables.formats import BATCH_ROWS, open_table, readable  # noqa: PLC0415 - arrays need neither
    from boxcal.app.tables.values import scores_of_batch  # noqa: PLC0415 - as above

    scores, labels, times = list[Array](), list[Any](), list[Any]()
    with readable(kind):
        table = open_table(file, kind)
        label = declared.label or next((name for name in (LABEL, "labels") if name in table.names), LABEL)
        has_times = TIME in table.names and TIME not in declared.ignore

        def names_of_labels(name: str) -> tuple[list[str], int]:
            batches = table.batches([name], (), BATCH_ROWS)
            cells = [cell for batch in batches for cell in _cells(batch, name)]
            if not cells:
                raise InvalidUpload("The table has no rows.")
            found = Counter(str(cell) for cell in cells if not _is_missing(cell))
            # -1 stands for no label, but where the two classes are named -1 and 1.
            if label_names(found) != {"-1", "1"}:
                found = Counter({cell: n for cell, n in found.items() if label_names({cell}) != {"-1"}})
            return sorted(label_names(found)), found.total()

        columns = choose_columns(
            [name for name in table.names if name != TIME],
            classes,
            replace(declared, label=label),
            label_values=names_of_labels,
            texts=table.texts,
        )
        if columns.weight is not None:
            raise _unread("The table has a column", columns.weight)
        read = [*columns.names, label, *([TIME] if has_times else ())]
        numbers = () if columns.is_list else columns.names
        for batch in table.batches(read, numbers, BATCH_ROWS):
            width = scores[0].shape[1] if scores else 0
            scores.append(scores_of_batch(batch, columns, len(labels), width))
            labels += _cells(batch, label)
            times += _times(batch.column(TIME)) if has_times else ()
    if not scores:
        raise InvalidUpload("The table has no rows.")
    names = None if columns.classes is None else tuple(columns.classes)
    known = replace(declared, classes=names)
    rows, seconds = np.concatenate(scores), times if has_times else None
    return _log(rows, columns.kind, labels, seconds, known, is_single=columns.is_single)


def _log(
    rows: Array, kind: str, labels: Any, times: Any, declared: Declared, *, is_single: bool = False
) -> PredictionLog:
    """Check scores (N, K) of a kind, labels and times, and sort them by time."""
    for name, values in (("labels", labels), (TIME, times)):
        if values is not None and len(values) != len(rows):
            raise InvalidUpload(f"`{kind}` has {len(rows):,} rows, but `{name}` has {len(values):,} values.")
    logits, _ = finite_rows(kind, rows.astype(np.float64), 0)
    if kind == LOGITS and declared.scores is None:
        check_kind(ScoreLook.of([logits]), is_single=is_single)
    indices, classes = _indices(labels, declared, logits.shape[1]), declared.classes
    if times is None:
        return PredictionLog(logits, indices, None, classes)
    seconds = _seconds(times)
    order = np.argsort(seconds, kind="stable")
    return PredictionLog(logits[order], indices[order], seconds[order], classes)


def _cells(batch: pa.RecordBatch, label: str) -> list[Any]:
    """List the labels of a batch of a table."""
    from boxcal.app.tables.values import label_column  # noqa: PLC0415 - arrays need no pyarrow

    column = label_column(batch, label)
    if column.type.num_fields:
        raise InvalidUpload(f"The column `{label}` must hold class indices or names, got {column.type}.")
    cells: list[Any] = column.to_pylist()
    return cells


def _times(column: Any) -> list[Any]:
    """List times; Python has no nanoseconds."""
    import pyarrow as pa  # noqa: PLC0415 - arrays need it not

    kind = column.type
    if str(kind).startswith("timestamp[ns"):
        column = column.cast(pa.timestamp("us", kind.tz), safe=False)
    return list(column.to_pylist())


def _is_missing(cell: Any) -> bool:
    return cell is None or cell == "" or cell != cell  # noqa: PLR0124 - as NaN is


def _indices(labels: Any, declared: Declared, num_classes: int) -> Array:
    """Turn labels (N,) into indices of classes; `UNLABELLED` where a cell is empty, NaN or -1."""
    classes = declared.classes
    cells = labels.tolist() if isinstance(labels, np.ndarray) else labels
    has_minus_one = classes is not None and "-1" in label_names(classes)
    unknown = () if has_minus_one else {cell for cell in {*cells} if label_names({str(cell)}) == {"-1"}}
    known = np.array([not (_is_missing(cell) or cell in unknown) for cell in cells])
    if not known.any():
        return np.full(len(cells), UNLABELLED)
    one = cells[known.argmax()]
    filled = np.array([cell if there else one for cell, there in zip(cells, known, strict=True)])
    indices = as_indices(filled, classes, labels_as=declared.labels_as)
    wrong = np.flatnonzero((indices < 0) | (indices >= num_classes))
    if wrong.size:
        raise InvalidUpload(
            f"labels[{wrong[0]}] is {indices[wrong[0]]}; class indices go from 0 to {num_classes - 1}, and "
            "-1 stands for no label."
        )
    return np.where(known, indices, UNLABELLED)


def _seconds(times: Any) -> Array:
    """Turn times (N,), numbers or dates in ISO 8601, into numbers."""
    array = np.asarray(times)
    if array.dtype.kind == "M":
        seconds = array.astype("datetime64[us]").astype(np.float64) / 1e6
        array = np.where(np.isnat(array), np.nan, seconds)  # a missing time becomes a number otherwise
    found = np.empty(len(array))
    for row, cell in enumerate(array.tolist()):
        if _is_missing(cell):
            raise InvalidUpload(f"{TIME}[{row}] is missing.")
        try:
            found[row] = float(cell)
        except (TypeError, ValueError, OverflowError):
            found[row] = _date(cell, row)
        if not np.isfinite(found[row]):
            raise InvalidUpload(f"{TIME}[{row}] is {cell!r:.100}; a time must be finite.")
    return found


def _date(cell: Any, row: int) -> float:
    """Turn a date, in UTC unless it says otherwise, into seconds."""
    try:
        date = datetime.fromisoformat(str(cell))
    except ValueError:
        raise InvalidUpload(f"{TIME}[{row}] is {cell!r:.100}, no number and no date of ISO 8601.") from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


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
    declared: Declared,
    as_json: bool,
) -> None:
    """Replay, save the plot, and show the numbers."""
    if plot is not None and plot.suffix.lower() not in {".svg", ".png"}:
        raise UsageError(f"{plot} is no .svg or .png file")
    check_outputs([plot], file)
    loaded = None if calibrator is None else saved_calibrator(calibrator)
    log = read(file, declared, None if loaded is None else loaded.classes)
    warnings = [] if loaded is None else _warnings(log, loaded)
    show_warnings(warnings, file)
    replay = Replay(
        _calibrator_for(log, calibrator, loaded),
        None if validation is None else _validation(validation, log, declared),
        refit=refit,
    )
    with progress_bar("replaying") as advance:
        replay.run(log, advance)
    if plot is not None:
        if not replay.trace.labels:
            raise UsageError(f"{file} has no labels to plot")
        plot.write_bytes(draw(replay.trace, "svg" if plot.suffix.lower() == ".svg" else "png"))
        messages().print(f"saved {escape(str(plot))}", soft_wrap=True)
    document = replay.document(log) | {"warnings": warnings}
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

    def document(self, log: PredictionLog) -> dict[str, Any]:
        """Give the numbers as the service does, and the decisions."""
        size = self.fold.num_classes
        decisions = [
            {"kind": one.kind.value, "at": one.at, "sentence": one.sentence, "evidence": dict(one.evidence)}
            for one in self.decisions
        ]
        document = document_of(self.fold, list(log.classes or map(str, range(size))))
        return {"predictions": len(log.labels), **document, "decisions": decisions}


def _calibrator_for(log: PredictionLog, path: Path | None, loaded: ArrayCalibrator | None) -> ArrayCalibrator:
    """Check the calibrator of a file against a log; `uncalibrated` where none is named."""
    size = log.logits.shape[1]
    if loaded is None:
        return ArrayCalibrator.uncalibrated(size)
    if loaded.reads != "logits" or loaded.num_classes != size:
        raise UsageError(
            f"{path} reads {loaded.reads} of {loaded.num_classes} classes, but the log has logits of {size}"
        )
    return loaded


def _warnings(log: PredictionLog, loaded: ArrayCalibrator) -> list[dict[str, Any]]:
    """Find labelled rows that the calibrator was fitted to."""
    labelled = log.logits[log.labels != UNLABELLED]
    if loaded.sketch is None or not len(labelled):
        return []
    effect = "the tests find less than on new data"
    found = check_known(Sketch.of(labelled), loaded.sketch, "the calibrator was", effect)
    return [one.to_dict() for one in found]


def _validation(path: Path, log: PredictionLog, declared: Declared) -> PredictionLog:
    found, size = read(path, declared, log.classes), log.logits.shape[1]
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
    screen().print(
        f"{document['predictions']:,} predictions; calibrator {escape(calibrator['method'])} was tested on"
        f" {document['labels']:,} labels",
        soft_wrap=True,
    )
    table = plain_table("test", "alarm", "log₁₀ E", "largest", "alarm from")
    for name, found in document["alarms"].items():
        numbers = (found["log_evidence"], found["largest_log_evidence"], found["threshold"])
        table.add_row(name, "yes" if found["alarm"] else "no", *(f"{n / np.log(10):.2f}" for n in numbers))
    screen().print(table)
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
        screen().print(table)
    for one in document["decisions"]:
        screen().print(f"{one['at']:>{DECISION_WIDTH},}  {escape(one['sentence'])}", soft_wrap=True)
