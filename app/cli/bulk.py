"""`boxcal predict SOURCE --output FILE.parquet`: a folder of images or a table, in parts.

Threads read, run the model and calibrate side by side; this one keeps the results in the order of the source.
Each part is written whole. A run that was stopped continues with the first part that is missing, if the
source, the model, the calibrator and the bounds are still the same.

What a bulk prediction reads: images, rows of features, texts or logits, in tasks that run side by side.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import ipc

from boxcal.app.cli.offline import Bound, bounds_of, calibrator_of, image_of, scores_of
from boxcal.app.cli.output import Advance, UsageError, check_outputs, escape, messages, naming, progress_bar
from boxcal.app.cli.settings import read_settings
from boxcal.app.cli.validation import saved_calibrator, unpacked
from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.http.problems import InvalidUpload
from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings
from boxcal.app.tables.columns import LABEL, SCORES, Columns, check_distinct, choose_columns, kind_of
from boxcal.app.tables.formats import BATCH_ROWS, in_memory, open_table, readable
from boxcal.app.tables.kinds import IMAGE_SUFFIXES, START_BYTES, foreign_archive, no_kind, table_kind
from boxcal.app.tables.labels import NOTHING, Declared
from boxcal.app.tables.sample_schema import FEATURES, ModelInputs, either_of, tokens_of
from boxcal.app.tables.sample_schema import TEXTS as TEXT_MEMBER
from boxcal.app.tables.scores import check_kind, logits_of
from boxcal.app.tables.values import samples_of_batch, scores_of_batch
from boxcal.calibrators.array_calibrator import ArrayCalibrator, Box
from boxcal.calibrators.scores import LOGITS, PROBABILITIES, ScoreLook
from boxcal.models.backends.backbone import Backbone
from boxcal.models.backends.core_pool import usable_cores
from boxcal.models.inputs.base import Samples
from boxcal.models.inputs.images import is_hidden
from boxcal.models.loading.specifications import LogitsOnly

ROWS = 5000
"""Rows of features or logits of a task; the model runs on all of them at once."""
IMAGES = 64
"""Images of a task."""
IMAGE_BATCH = 8
"""Images of a forward pass on a core: what a few images need stays in its cache."""
SMALL_BYTES = 8192
"""Mean size of images that one thread at a time decodes: most of it is Python code, and threads that wait
for the interpreter at every step take twice as long."""
TEXTS = 512
TEXT_BATCH = 32

Scores = NDArray[Any]
Run = Callable[[Samples], Scores]
"""Runs the model on samples, and gives what the calibrator reads."""


@dataclass(frozen=True)
class Task:
    """Some rows of a source."""

    rows: int
    scores: Callable[[], Scores]  # Reads them and runs the model, if there is one; any thread may call it
    others: dict[str, Any] = field(default_factory=dict)  # Further columns of the output


@dataclass(frozen=True)
class Source:
    """All rows, in tasks."""

    rows: int  # How many there are; 0 where the file does not say
    size: int  # Rows of a task; the last ones of a file or row group may be fewer
    per_part: int  # Tasks whose results are kept together
    tasks: Iterator[Task]  # In the order of the output
    digest: str  # Of the names, sizes and times of the files: another one if a file has changed


class RowFile:
    """A table, or arrays, of scores, features or texts, read in parts; labels that it has are not read."""

    def __init__(self, path: Path, backbone: Backbone, declared: Declared, *, is_csv: bool = False) -> None:
        with path.open("rb") as file:
            start = file.read(START_BYTES)
        of_arrays = (kind for kind, magic in ARRAYS.items() if start.startswith(magic))
        kind = next(of_arrays, table_kind(start, is_csv=is_csv))
        if kind is None:
            kinds = "folder of images, and no .parquet, .arrow, .csv, .npz, .npy or .json of records"
            raise InvalidUpload(no_kind(f"The file is no {kinds}", start))
        self._kind, self._backbone, self._samples = kind, backbone, ModelInputs.of(backbone)
        with readable(kind):
            if kind in ARRAYS:
                table, declared = _table_of_arrays(path, self._samples, declared)
                self._table = in_memory(table)
            else:
                self._table = open_table(pa.OSFile(os.fsencode(path)), kind)
        names, label = self._table.names, declared.label or LABEL
        own = () if self._samples is None else self._samples.table_columns
        self.has_samples = bool(own) and set(own) <= set(names)
        check_distinct(names)
        self.rows = self._table.rows or 0  # 0 where it does not say
        self._names: Sequence[str] = own
        self._numbers: Sequence[str] = ()
        if not self.has_samples:
            others = [name for name in names if name != label]
            with readable(kind):
                self._columns = self._choose([*others, label], declared)
            self._names = self._columns.names
            self.has_samples = self._columns.has_samples
            if self.has_samples and self._samples:  # features whose names only the file knows
                messages().print(f"[dim]columns {self._samples.read_as(self._names)}", soft_wrap=True)
            self._numbers = () if self._columns.is_list or self.has_samples else self._columns.names
            if declared.scores is None and self._columns.kind == LOGITS:
                self._check_kind()
        ignored = set(COLUMNS) & set(declared.ignore)  # others that are ignored are no scores, but kept
        unnamed = {""} if names.count("") > 1 else set()
        self._kept = [name for name in names if name not in {*self._names, label, *ignored, *unnamed}]
        self._check_kept()

    def _choose(self, names: Sequence[str], declared: Declared) -> Columns:
        try:
            return choose_columns(
                names, self._backbone.labels, declared, self._samples, texts=self._table.texts
            )
        except InvalidUpload as error:
            if "ignore=" not in str(error):
                raise
            raise InvalidUpload(f"{error} Columns left out are kept beside the predictions.") from error

    def _check_kept(self) -> None:
        """Refuse columns that the output cannot have beside its own."""
        if taken := next((name for name in self._kept if name in COLUMNS), None):
            raise InvalidUpload(
                f"The table has a column {taken!r}, and the output has its own of this name. Leave it out "
                f"with ignore={taken}, or rename it."
            )

    def _check_kind(self) -> None:
        """Refuse columns of logits that look like something else, by the first rows."""
        with readable(self._kind):
            for batch in islice(self._table.batches(self._names, self._numbers, BATCH_ROWS), 1):
                rows = scores_of_batch(batch, self._columns, 0)
                look = ScoreLook.of([rows[np.isfinite(rows).all(axis=1)]])
                check_kind(look, is_single=self._columns.is_single)

    def tasks(self, size: int, scores: Callable[[Any], Scores]) -> Iterator[Task]:
        """Yield tasks of at most `size` rows, of CSV those of a block, which keep the columns not read."""
        first = 0
        with readable(self._kind):
            for batch in self._table.batches([*self._names, *self._kept], self._numbers, size):
                kept = {name: batch.column(name) for name in self._kept}
                yield Task(len(batch), partial(self._scores, scores, batch, first), kept)
                first += len(batch)

    def _scores(self, scores: Callable[[Any], Scores], batch: Any, first: int) -> Scores:
        return scores(self._read(batch, first))

    def _read(self, batch: Any, first: int) -> Samples | Scores:
        if self.has_samples and self._samples:
            samples = samples_of_batch(batch, self._samples, self._names, first)
            is_text = self._samples.member == TEXT_MEMBER
            return tokens_of(samples.tolist(), self._backbone.inputs, first) if is_text else samples
        values = scores_of_batch(batch, self._columns, first).astype(np.float64)
        if values.shape[1] != self._backbone.num_classes:
            raise InvalidUpload(
                f"The rows have {values.shape[1]} numbers, the model has {self._backbone.num_classes} "
                f"classes. Without a model, set BOXCAL_MODEL=logits:{values.shape[1]}, or name a calibrator."
            )
        if (wrong := np.argwhere(~np.isfinite(values))).size:
            row, column = map(int, wrong[0])
            raise InvalidUpload(
                f"{self._columns.kind}[{first + row}, {column}] is {values[row, column]}, of the class "
                f"{self._backbone.labels[column]!r:.100}; every value must be finite."
            )
        return logits_of(values, self._columns.kind, first)[0]


ARRAYS = {"npy": b"\x93NUMPY", "npz": b"PK"}
"""How files of arrays begin."""


def _table_of_arrays(
    path: Path, samples: ModelInputs | None, declared: Declared
) -> tuple[pa.Table, Declared]:
    """Give the scores or features of `.npz`, or the one array of `.npy`, as a table, and what it holds."""
    reads = FEATURES if samples is not None and samples.member == FEATURES and not declared.scores else None
    with path.open("rb") as file:
        loaded = np.load(file, allow_pickle=False)
        there = {reads or LOGITS: loaded} if isinstance(loaded, np.ndarray) else loaded
        arrays = {name: there[name] for name in (*SCORES, reads, "classes") if name in there}
    found = [name for name in arrays if name != "classes"]
    if len(found) != 1:
        if foreign := foreign_archive([*there]):
            raise InvalidUpload(f"The file cannot be read: {foreign}.")
        shown = ", ".join(f"`{name:.100}`" for name in there) or "nothing"
        raise InvalidUpload(f"The file must hold {either_of(samples)}; it holds {shown}.")
    (name,) = found
    rows = arrays[name].astype(arrays[name].dtype.newbyteorder("="), copy=False)
    if rows.ndim not in {1, 2} or rows.dtype.kind not in "fiu":
        raise InvalidUpload(f"`{name}` must be numbers (N, K), got {rows.dtype} of the shape {rows.shape}.")
    if name == PROBABILITIES:
        declared = replace(declared, scores=kind_of(name, declared))
    names = [str(one) for one in arrays["classes"].tolist()] if "classes" in arrays else declared.classes
    names = samples.names if samples is not None and name == FEATURES else names
    if name != FEATURES and (rows.ndim == 1 or rows.shape[1] == 1):
        return pa.table({"score": rows.ravel()}), declared
    if names is None:
        lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
        return pa.table({name: lists}), declared
    if rows.shape[1:] != (len(names),):
        raise InvalidUpload(f"`{name}` has the shape {rows.shape}; it must be (N, {len(names)}).")
    return pa.table([pa.array(np.ascontiguousarray(one)) for one in rows.T], [*names]), declared


@dataclass(frozen=True)
class Loaded:
    """What predicts."""

    backbone: Backbone
    calibrator: ArrayCalibrator
    settings: Settings

    @classmethod
    def of(cls, source: Path, calibrator: str | None, declared: Declared) -> Self:
        """Load the model of the settings; a table of scores needs none where a calibrator is named."""
        settings = read_settings()
        if not source.is_dir() and "model" not in settings.model_fields_set:
            if calibrator is None:
                raise UsageError(
                    f"for a table, as {source} is, name the calibrator with --calibrator, or the model with "
                    "BOXCAL_MODEL (logits:K for scores of K classes)"
                )
            own = saved_calibrator(calibrator)
            if own.reads == "logits" and own.input_shift is None:
                classes = own.classes or declared.classes or [str(k) for k in range(own.num_classes)]
                return cls(LogitsOnly(classes), own, settings)
        backbone = BackboneSource.of(settings).load()
        return cls(backbone, calibrator_of(calibrator, backbone.labels), settings)


def source_of(path: Path, loaded: Loaded, declared: Declared, run: Run) -> Source:
    """Open a folder of images, or a table or arrays of features, texts, logits or probabilities."""
    backbone, calibrator, settings = loaded.backbone, loaded.calibrator, loaded.settings
    given = settings.max_batch_size if "max_batch_size" in settings.model_fields_set else None
    if path.is_dir():
        size = given or (IMAGE_BATCH if backbone.device == "cpu" else IMAGES)
        return _images(path, backbone, limits.MAX_PIXELS, size, run)
    _, digest = _sizes_of(path.parent, [path.name])
    with unpacked(path) as plain:
        is_csv = path.name.lower().endswith((".csv", ".csv.gz"))
        file = RowFile(plain, backbone, declared, is_csv=is_csv)
    if file.has_samples and backbone.inputs.kind == "texts":
        return _rows(file, TEXTS, partial(_of_texts, run, given or TEXT_BATCH), digest)
    if file.has_samples:
        return _rows(file, given or ROWS, run, digest)
    if calibrator.reads != "logits":
        raise UsageError(f"{calibrator.method!r} reads {calibrator.reads}, but {path} has logits alone")
    return _rows(file, ROWS, _unchanged, digest)


def _rows(file: RowFile, size: int, scores: Callable[[Any], Scores], digest: str) -> Source:
    return Source(file.rows, size, 4, file.tasks(size, scores), digest)


def _unchanged(scores: Scores) -> Scores:
    return scores


def _of_texts(run: Run, size: int, samples: Samples) -> Scores:
    """Run the model on texts of similar lengths together, since a batch is padded to its longest text."""
    order = np.argsort([len(sample[0]) for sample in samples], kind="stable")
    groups = [order[start : start + size] for start in range(0, len(order), size)]
    return np.concatenate([run(samples[group]) for group in groups])[np.argsort(order)]


def _images(folder: Path, backbone: Backbone, max_pixels: int, size: int, run: Run) -> Source:
    names = [name for name in _files_in(folder) if name.lower().endswith(IMAGE_SUFFIXES)]
    sizes, digest = _sizes_of(folder, names)
    alone = Lock()

    def decoded(batch: Sequence[str]) -> Samples:
        small = sum(sizes[name] for name in batch) < SMALL_BYTES * len(batch)
        with alone if small else nullcontext():
            return np.stack([image_of(folder / name, backbone, max_pixels) for name in batch])

    def scores(chosen: Sequence[str]) -> Scores:
        batches = (chosen[first : first + size] for first in range(0, len(chosen), size))
        return np.concatenate([run(decoded(batch)) for batch in batches])

    def tasks() -> Iterator[Task]:
        for first in range(0, len(names), IMAGES):
            chosen = names[first : first + IMAGES]
            shown = [os.fsencode(name).decode(errors="backslashreplace") for name in chosen]
            yield Task(len(chosen), partial(scores, chosen), {"path": shown})

    return Source(len(names), IMAGES, 8, tasks(), digest)


def _files_in(folder: Path) -> list[str]:
    """List the files of a folder and its subfolders that are not hidden, by their paths below it."""
    found: list[str] = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not is_hidden(name)]  # the others are not walked
        below = os.path.relpath(place, folder)
        found += [name if below == "." else f"{below}/{name}" for name in names if not is_hidden(name)]
    return sorted(found)


def _sizes_of(folder: Path, names: Iterable[str]) -> tuple[dict[str, int], str]:
    """Return the bytes of each file, and the digest of a `Source`."""
    digest, sizes = hashlib.sha256(), {}
    for name in names:
        found = os.stat(f"{folder}/{name}")  # noqa: PTH116 - a `Path` of each takes twice as long
        digest.update(os.fsencode(f"{name} {found.st_size} {found.st_mtime_ns}\n"))
        sizes[name] = found.st_size
    return sizes, digest.hexdigest()


AHEAD = 2
"""Tasks for each thread that wait, so that none is idle while results are written."""
UNFINISHED = "output.unfinished"
NOTE = "run.json"
"""What a folder of parts belongs to; one without it is not ours."""
LOCK = "lock"
CSV, FORMATS = ".csv", (".parquet", ".csv", "")
"""The endings of an output; one without any is Parquet."""
REPEATED = ["label", "index"]
"""Columns with few different values."""
COLUMNS = (*REPEATED, "probability", "probabilities")
"""What a row of the output has after the columns that it has from the source."""


def run(
    source: Path,
    output: Path,
    *,
    lower: Bound,
    upper: Bound,
    calibrator: str | None,
    declared: Declared = NOTHING,
) -> int:
    """Predict everything in the source, and write the label and the probabilities of each row.

    Returns the number of rows.
    """
    folder = output.with_name(output.name + ".parts")
    _check_output(source, output, folder)
    found = Loaded.of(source, calibrator, declared)
    backbone, loaded = found.backbone, found.calibrator
    bounds = bounds_of(lower, upper, backbone.labels)
    with naming(source):
        opened = source_of(source, found, declared, _model(backbone, loaded))
    identity = {
        "source": [str(source.absolute()), opened.digest],
        "model": backbone.fingerprint,
        "labels": backbone.labels,
        "calibrator": hashlib.sha256(loaded.to_bytes()).hexdigest(),
        "bounds": [lower, upper],
        "declared": asdict(declared),
        "part": [opened.size, opened.per_part],
    }
    answers = _Answers(loaded, bounds, backbone.labels)
    with _alone(folder, output):
        _prepare(folder, json.dumps(identity, sort_keys=True))
        with naming(source), progress_bar("predicting") as advance, ExitStack() as stack:
            pool = ThreadPoolExecutor(usable_cores(), thread_name_prefix="bulk")
            stack.callback(pool.shutdown, cancel_futures=True)
            results = _results(opened, folder, answers, pool)
            count = _write(
                folder, opened, results, advance, backbone.labels if output.suffix == CSV else None
            )
        if count == 0:
            raise UsageError(f"{source} has no images or rows")
        (folder / UNFINISHED).replace(output)
        _clear(folder)
        shutil.rmtree(folder, ignore_errors=True)  # the next run may be in it already
    messages().print(f"saved {escape(str(output))}", soft_wrap=True)
    return count


def _check_output(source: Path, output: Path, folder: Path) -> None:
    """Refuse, before any work, an output that cannot be written or would replace files of others."""
    if output.suffix not in FORMATS:
        raise UsageError(f"--output writes .parquet or .csv, which {output.name} is not")
    output.parent.mkdir(parents=True, exist_ok=True)
    check_outputs([output], source)
    if folder.is_dir() and {path.name for path in folder.iterdir()} - {LOCK} and not (folder / NOTE).exists():
        raise UsageError(
            f"{folder}, where the parts of the output are kept until it is whole, holds other files; move it "
            "away, or name another --output"
        )


@contextmanager
def _alone(folder: Path, output: Path) -> Iterator[None]:
    """Hold the folder of parts, which no two runs write at once, until the run ends or its process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl  # noqa: PLC0415 - Windows has none
    except ModuleNotFoundError:
        yield
        return
    path = folder / LOCK
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        except OSError:  # a file system without locks
            is_ours = True
        if not is_ours:
            raise UsageError(f"another run is writing {output}")
        yield


def _model(backbone: Backbone, calibrator: ArrayCalibrator) -> Any:
    """Give a function that runs the model on samples, in as many threads as it uses at the same time."""
    free = Semaphore(backbone.passes)

    def scores(samples: Samples) -> Any:
        with free:
            return scores_of(backbone, calibrator, samples, alone=backbone.passes == 1)

    return scores


Result = tuple[int, pa.Table | None]
"""Rows of a task, and its predictions; None in a part that an earlier run has written."""


def _results(source: Source, folder: Path, answers: _Answers, pool: ThreadPoolExecutor) -> Iterator[Result]:
    """Yield the results of the tasks in their order, while the next ones are under way."""
    waiting: deque[tuple[int, Future[pa.Table] | None]] = deque()

    def next_result() -> Result:
        rows, future = waiting.popleft()
        return rows, None if future is None else future.result()

    first, done = 0, False
    for position, task in enumerate(source.tasks):
        if position % source.per_part == 0:
            done = _is_whole(_part(folder, position // source.per_part))
        waiting.append((task.rows, None if done else pool.submit(answers, task, first)))
        first += task.rows
        if len(waiting) > AHEAD * usable_cores():
            yield next_result()
    while waiting:
        yield next_result()


class _Answers:
    """From the scores of a task to its rows of the output."""

    def __init__(self, calibrator: ArrayCalibrator, bounds: Box | None, labels: Sequence[str]) -> None:
        self._calibrate = partial(calibrator.calibrate, request=bounds)
        self._labels = pa.array(labels, pa.string())

    def __call__(self, task: Task, first: int) -> pa.Table:
        scores = task.scores()
        try:
            calibrated = self._calibrate(scores)
        except ValueError as error:
            raise UsageError(f"from row {first} on: {error}") from error
        probabilities = calibrated.probabilities
        largest = probabilities.max(axis=1)
        ties = probabilities == largest[:, None]
        index = pa.array(np.where(ties, calibrated.logits, -np.inf).argmax(axis=1).astype(np.int64))
        lists = pa.FixedSizeListArray.from_arrays(pa.array(probabilities.ravel()), probabilities.shape[1])
        answers = dict(zip(COLUMNS, (self._labels.take(index), index, largest, lists), strict=True))
        return pa.table({**task.others, **answers})


def _write(
    folder: Path, source: Source, results: Iterator[Result], advance: Advance, labels: Sequence[str] | None
) -> int:
    """Keep each part, and add it to the output; return the number of rows.

    `labels`: the classes, where the output is a CSV.
    """
    count = 0

    def counted() -> Iterator[pa.Table | None]:
        nonlocal count
        for rows, table in results:
            count += rows
            advance(count / max(count, source.rows), f"{count:,} rows")
            yield table

    tables, number = counted(), 0
    with ExitStack() as stack:
        writer: pq.ParquetWriter | pacsv.CSVWriter | None = None
        while of_part := list(islice(tables, source.per_part)):
            part = _kept(_part(folder, number), [table for table in of_part if table is not None])
            part = part if labels is None else _flat(part, labels)
            if writer is None:
                # Arrow encodes a name itself, unless it gets bytes; not every name is UTF-8.
                file = stack.enter_context(pa.OSFile(os.fsencode(folder / UNFINISHED), "wb"))
                opened = (
                    pq.ParquetWriter(file, part.schema, use_dictionary=REPEATED)
                    if labels is None
                    else pacsv.CSVWriter(file, part.schema)
                )
                writer = stack.enter_context(opened)
            writer.write_table(part)
            number += 1
    return count


def _flat(table: pa.Table, labels: Sequence[str]) -> pa.Table:
    """Give rows as CSV can hold them: the probability of each class as a column `p_` and its name."""
    columns: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name == COLUMNS[-1]:
            rows = column.combine_chunks().flatten().to_numpy().reshape(-1, len(labels))
            own = {f"p_{label}": rows[:, k] for k, label in enumerate(labels)}
            if taken := next((one for one in own if one in columns), None):
                raise UsageError(f"the table has a column {taken!r:.100} already; write a .parquet file")
            columns |= own
        elif pa.types.is_nested(column.type):
            raise UsageError(f"the column {name!r:.100} holds lists or objects; write a .parquet file")
        else:
            is_coded = pa.types.is_dictionary(column.type)
            columns[name] = _as_text(name, column.cast(column.type.value_type) if is_coded else column)
    return pa.table(columns)


def _as_text(name: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Turn the types that are written to no CSV as they are into text; other columns stay."""
    if not any(one in str(column.type) for one in ("binary", "view", "interval")):
        return column
    try:
        return column.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        message = f"the column {name!r:.100} ({column.type}) is no text; write a .parquet file"
        raise UsageError(message) from None


def _part(folder: Path, number: int) -> Path:
    return folder / f"{number}.arrow"


def _read(path: Path) -> pa.Table:
    return ipc.open_file(pa.memory_map(os.fsencode(path))).read_all()


def _is_whole(path: Path) -> bool:
    """Whether an earlier run has written a part; what a crash of the machine has left of one is none."""
    try:
        _read(path).validate()
    except (OSError, pa.ArrowException):
        return False
    return True


def _kept(path: Path, tables: Sequence[pa.Table]) -> pa.Table:
    """Write a part, or read the one that an earlier run has written."""
    if not tables:
        return _read(path)
    table = pa.concat_tables(tables).unify_dictionaries()
    unfinished = path.with_suffix(".unfinished")
    with pa.OSFile(os.fsencode(unfinished), "wb") as file, ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    unfinished.replace(path)
    return table


def _prepare(folder: Path, identity: str) -> None:
    """Keep the parts of an earlier run with the same identity, and remove others."""
    note = folder / NOTE
    folder.mkdir(parents=True, exist_ok=True)
    if not note.exists() or note.read_text() != identity:
        _clear(folder)
    note.write_text(identity)


def _clear(folder: Path) -> None:
    """Remove all but the lock."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()
