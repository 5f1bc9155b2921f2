"""A checked validation set in a folder of its own: what an upload becomes, and what its fit reads.

Arrays are plain `.npy` files. They are checked, converted and written in blocks of rows, so that memory does
not grow with the upload, and written by `write`, so that a full disk is an error and not a SIGBUS.

Labelled rows of features and texts in place of logits: the check keeps them, the fit runs the model.

The check writes them to one file, block by block: of each block one column for each feature, or one of texts.
A column of texts is a line of JSON, one of numbers a `.npy` array.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import orjson

from boxcal.app.http.problems import InvalidUpload, UploadTooLarge
from boxcal.app.settings import limits
from boxcal.app.tables.arrays import Array, Batch
from boxcal.app.tables.columns import GROUPS, SAMPLE_WEIGHT
from boxcal.app.tables.labels import CLASSES, NOTHING, Declared, are_indices, as_indices, column_order
from boxcal.app.tables.sample_schema import FEATURES, TEXTS, ModelInputs, tokens_of
from boxcal.app.tables.scores import check_kind, finite_rows, stored_dtype
from boxcal.calibrators.data import WEIGHED_TWICE
from boxcal.calibrators.scores import LOGITS, WHOLE, ScoreLook
from boxcal.models.inputs.base import Inputs
from boxcal.models.inputs.rows import RowInputs

SAMPLES = "samples.blocks"


class SampleWriter:
    """Writes samples of a model into a folder, block by block; a context manager."""

    def __init__(self, folder: Path, inputs: ModelInputs) -> None:
        inputs.check_tokenizer()
        self._is_text, self._count = inputs.member == TEXTS, 0
        self._text_columns = [True] if self._is_text else [one.is_text for one in inputs.rows.by_feature]
        self._file = (folder / SAMPLES).open("wb")

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, block: Array) -> int:
        """Write checked rows of features (n, D), or texts (n,), and return how many bytes they have."""
        if self._is_text:
            _check_texts(block, self._count)
        start = self._file.tell()
        for column, is_text in zip([block] if self._is_text else block.T, self._text_columns, strict=True):
            if is_text:
                # Not orjson, which ends the process where it gets no memory.
                written = json.dumps(column.tolist(), ensure_ascii=False, separators=(",", ":"))
                self._file.write(written.encode() + b"\n")
            else:
                np.save(self._file, column.astype(np.float64), allow_pickle=False)
        self._count += len(block)
        return self._file.tell() - start


def kept_samples(folder: Path, inputs: Inputs, rows: int) -> Iterator[Array]:
    """Yield what `SampleWriter` wrote, at most `rows` samples at a time, as samples of the model."""
    text_columns = [one.is_text for one in inputs.by_feature] if isinstance(inputs, RowInputs) else [True]
    first, path = 0, folder / SAMPLES
    with path.open("rb") as file:
        end = path.stat().st_size
        while file.tell() < end:
            columns = [
                np.array(orjson.loads(file.readline()), object) if is_text else np.load(file)
                for is_text in text_columns
            ]
            for start in range(0, len(columns[0]), rows):
                parts = [column[start : start + rows] for column in columns]
                if isinstance(inputs, RowInputs):
                    yield inputs.of_columns(parts, first, FEATURES)
                else:
                    yield tokens_of(parts[0].tolist(), inputs, first)
                first += len(parts[0])


def _check_texts(texts: Array, first: int) -> None:
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidUpload(f"texts[{first + row}] is {text!r:.100}; it must be a string.")
        if len(text) > limits.MAX_TEXT_BYTES // 4 and (size := len(text.encode())) > limits.MAX_TEXT_BYTES:
            raise UploadTooLarge(
                f"texts[{first + row}] has {size:,} bytes; a text may have {limits.MAX_TEXT_BYTES:,}."
            )


LISTING = "images.json"
MIN_SAMPLES = 20
NOTES = "notes.json"
CLASS_MIX = "class_mix"
COLUMNS = "columns.json"
MIN_GROUPS = 2


@dataclass(frozen=True, slots=True)
class StoredSet:
    """N samples of K logits, or images, rows or texts, and one label each, all checked."""

    # Holds `logits.npy` (N, K), float32 or float64, finite, and `labels.npy` (N,), int64, each 0 to K - 1;
    # perhaps `features.npy` (N, D), what the backbone's last layer takes, and `inputs.npy` (N, ...), what the
    # backbone takes, `groups.npy` (N,), int64, and `sample_weight.npy` (N,), float64. Until the fit has run
    # the backbone, labelled images have `images.json`, which says where they are, and labelled rows and texts
    # `samples.blocks`, in place of logits.
    folder: Path

    @property
    def samples(self) -> int:
        return len(np.load(self.folder / "labels.npy", mmap_mode="r"))

    @property
    def holds_images(self) -> bool:
        """Whether it is made of images."""
        return (self.folder / LISTING).exists()

    @property
    def needs_backbone(self) -> bool:
        """Whether it is made of images, rows or texts, which only a backbone can turn into logits."""
        return self.holds_images or (self.folder / SAMPLES).exists()

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Warnings that the check of the upload adds to those of the report."""
        path = self.folder / NOTES
        return list(json.loads(path.read_text())) if path.exists() else []

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, in the order of the columns; None where nothing names them."""
        return self._columns.get("classes")

    @property
    def columns(self) -> str | None:
        """How the columns of the file belong to the classes, as a sentence."""
        return self._columns.get("said")

    @property
    def _columns(self) -> dict[str, Any]:
        path = self.folder / COLUMNS
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def arrays(self) -> tuple[Array, npt.NDArray[np.int64]]:
        """Logits (N, K), mapped from the disk, and labels (N,)."""
        return np.load(self.folder / "logits.npy", mmap_mode="c"), np.load(self.folder / "labels.npy")

    def besides(self, name: str) -> Array | None:
        """`features` (N, D) or `inputs` (N, ...), mapped from the disk; None where there are none."""
        path = self.folder / f"{name}.npy"
        return np.load(path, mmap_mode="r") if path.exists() else None

    @property
    def grouping(self) -> dict[str, Any]:
        """What `boxcal.calibrators.fit` takes of `groups`, `sample_weight` and `class_mix`."""
        named = {name: self.besides(name) for name in (GROUPS, SAMPLE_WEIGHT)}
        path = self.folder / CLASS_MIX
        said = {CLASS_MIX: path.read_text()} if path.exists() else {}
        return {name: np.array(values) for name, values in named.items() if values is not None} | said

    def keep_declared(self, declared: Declared) -> None:
        """Keep how the samples were drawn, and refuse what is said of a table where there is none to read."""
        if self.holds_images:
            unread = ("scores", "label", "ignore", "labels_as", CLASSES)
            refuse_unread(declared, unread, "the file holds images, in a folder for each class")
        if declared.group is not None and self.besides(GROUPS) is None:
            raise InvalidUpload(
                f"group={declared.group:.100} names a column of a table, which the data are not. Arrays and "
                "documents hold `groups`, one of each sample."
            )
        if declared.class_mix == "resampled" and self.besides(SAMPLE_WEIGHT) is not None:
            raise InvalidUpload(f"The {WEIGHED_TWICE}.")
        if declared.class_mix is not None:
            (self.folder / CLASS_MIX).write_text(declared.class_mix)


def refuse_unread(declared: Declared, names: Sequence[str], why: str) -> None:
    """Refuse what the sender says of a file and nothing reads."""
    for name in names:
        given = getattr(declared, name) or ""
        if said := given if isinstance(given, str) else ",".join(given):
            raise InvalidUpload(f"Nothing reads {name}={said:.100}: {why}.")


class ArrayWriter:
    """Writes an array `folder/name.npy` block by block; a context manager."""

    def __init__(self, folder: Path, name: str, row_shape: tuple[int, ...], dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._file = (folder / f"{name}.npy").open("wb")
        self._row_shape, self._rows = row_shape, 0
        self._write_header()

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """Write the header; numpy pads it so that its length does not depend on the number of rows."""
        shape = (self._rows, *self._row_shape)
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, block: Array) -> None:
        """Write the next rows."""
        self._rows += len(block)
        self._file.write(np.ascontiguousarray(block, dtype=self._dtype).data)


@dataclass(frozen=True)
class Expected:
    """What an upload is compared with."""

    classes: Sequence[str] | None  # The K class names of the backbone; None to accept any K
    max_bytes: int  # How large the arrays may be, all together, unpacked and converted
    inputs: ModelInputs | None = None  # Of a model of features or texts, which may be sent in place of logits
    declared: Declared = NOTHING  # What the sender says of the file


@dataclass(frozen=True)
class FileColumns:
    """How the columns of a file belong to the classes."""

    classes: Sequence[str] | None  # In the order in which the set is kept; None where nothing names them
    own: Sequence[str] | None  # In the order of the columns, if the file names them: its labels are theirs
    # For each class the column of the file; None where they are in the order of the classes
    order: Sequence[int] | None
    said: str | None  # The same as a sentence
    is_single: bool = False  # Whether one column holds the scores of the second of two classes
    left_out: tuple[str, ...] = ()  # Columns of a table that are not read

    @classmethod
    def matched(
        cls,
        known: Sequence[str] | None,
        own: Sequence[str] | None,
        *,
        kind: str | None = None,
        is_single: bool = False,
        left_out: tuple[str, ...] = (),
    ) -> Self:
        """Match the classes that a file names with those known; see `column_order`."""
        order = column_order(known, own)
        classes = known or own
        said = None
        if is_single:
            said = "taken for the score of the second class" + (f", {classes[1]!r:.100}" if classes else "")
        elif own is not None:
            said = "matched with the classes by name" if known is not None else "named by the file"
        elif known is not None and not are_indices(known):
            said = "in the order of the classes: the file does not name them"
        said = f"{said}, read as {kind}" if said and kind else said
        kept, sent = (None if one is None else list(one) for one in (classes, own))
        return cls(kept, sent, order, said, is_single, left_out)


def keep_set(
    folder: Path,
    batches: Iterable[Batch],
    member: str,
    expected: Expected,
    *,
    columns: FileColumns | None = None,
) -> None:
    """Check the samples of an upload, and write them into `folder`."""
    columns = FileColumns.matched(expected.classes, None) if columns is None else columns
    classes, inputs, declared = columns.own or columns.classes, expected.inputs, expected.declared
    beside: dict[str, list[Array]] = {"labels": [], GROUPS: [], SAMPLE_WEIGHT: []}
    scores = ScoreWriter(folder, member, columns)
    sizes, rows = Counter[str](), 0
    with ExitStack() as stack:
        samples = None
        for batch in batches:
            for name, block in batch.items():
                if name == "labels":
                    beside[name].append(as_indices(block, classes, rows, declared.labels_as))
                elif name in beside:
                    beside[name].append(block)
                elif inputs is not None and name == member == inputs.member:
                    samples = samples or stack.enter_context(SampleWriter(folder, inputs))
                    sizes[name] += samples.append(block)
                else:
                    sizes[name] += scores.append(stack, name, block, rows)
            rows += len(batch["labels"])
            check_size({**sizes, "labels": 8 * rows}, expected.max_bytes)
    check_count(rows)
    if declared.scores is None:
        check_kind(scores.look, is_single=columns.is_single)
    labels = _checked_labels(np.concatenate(beside["labels"]), scores.width)
    _keep(folder, "labels", labels if columns.order is None else np.argsort(columns.order)[labels])
    if beside[GROUPS]:
        _keep(folder, GROUPS, _numbered(np.concatenate(beside[GROUPS])))
    if beside[SAMPLE_WEIGHT]:
        _keep(folder, SAMPLE_WEIGHT, _checked_weights(np.concatenate(beside[SAMPLE_WEIGHT])))
    (folder / COLUMNS).write_text(json.dumps({"classes": columns.classes, "said": columns.said}))
    if notes := _notes(columns, rows, scores.scaled):
        (folder / NOTES).write_text(json.dumps(notes))


class ScoreWriter:
    """Writes scores as logits in the order of the classes, and features beside them, block by block."""

    def __init__(self, folder: Path, member: str, columns: FileColumns) -> None:
        self._folder, self._member, self._order = folder, member, columns.order
        self._writers: dict[str, ArrayWriter] = {}
        self.look, self.scaled = ScoreLook(), 0
        self.width = 0 if columns.classes is None else len(columns.classes)

    def append(self, stack: ExitStack, name: str, block: Array, first: int) -> int:
        """Write the next rows, the first of which has the number `first`, and return their bytes."""
        if name == self._member:
            self.width = _check_width(name, block, self.width)
        kept, scaled = finite_rows(name, block, first)
        self.scaled += scaled
        if name == LOGITS:
            self.look.add(kept)
        if name == self._member and self._order is not None:
            kept = kept[:, list(self._order)]
        if name not in self._writers:
            stored = LOGITS if name in WHOLE else name
            writer = ArrayWriter(self._folder, stored, block.shape[1:], stored_dtype(block.dtype))
            self._writers[name] = stack.enter_context(writer)
        self._writers[name].append(kept)
        return int(kept.nbytes)


def _notes(columns: FileColumns, rows: int, scaled: int) -> list[dict[str, Any]]:
    """List what the report says of the file."""
    found = []
    if columns.left_out:
        names = ", ".join(f"`{name:.50}`" for name in columns.left_out[:10])
        found.append(("columns_left_out", f"columns that are no class were left out: {names}", rows))
    if scaled:
        message = (
            f"the probabilities of {scaled:,} samples sum to 1 only within rounding; they were divided by "
            "their sums"
        )
        found.append(("probabilities_scaled", message, scaled))
    return [
        {"code": code, "severity": "warning", "message": message, "rows": count}
        for code, message, count in found
    ]


def keep_labels(folder: Path, labels: Array, classes: Sequence[str]) -> None:
    """Write the labels (N,) of images, and the names of the K classes, into `folder`."""
    check_count(len(labels))
    _keep(folder, "labels", _checked_labels(labels, len(classes)))
    (folder / COLUMNS).write_text(json.dumps({"classes": list(classes)}))


def _keep(folder: Path, name: str, values: Array) -> None:
    with ArrayWriter(folder, name, (), values.dtype) as out:
        out.append(values)


def _check_width(name: str, block: Array, expected: int) -> int:
    """Return K, or refuse rows of another number of classes than expected; 0 accepts any."""
    if expected and block.shape[1] != expected:
        raise InvalidUpload(
            f"`{name}` has {block.shape[1]} columns; the backbone served here has {expected} classes."
        )
    return int(block.shape[1])


def _checked_labels(labels: Array, num_classes: int) -> Array:
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        row = int(wrong[0])
        raise InvalidUpload(
            f"labels[{row}] is {labels[row]}; class indices go from 0 to {num_classes - 1}"
            f"{_others(wrong.size - 1, 'label')}."
            + (" The labels go from 1: subtract 1, or name the classes." if labels.min() == 1 else "")
        )
    return labels


def _numbered(groups: Array) -> Array:
    """Replace the groups (N,), which may be numbers or texts, by numbers."""
    if groups.dtype.kind == "f" and not np.isfinite(groups).all():
        row = int(np.isfinite(groups).argmin())
        raise InvalidUpload(f"{GROUPS}[{row}] is {groups[row]}; each sample needs a group.")
    names, numbers = np.unique(groups, return_inverse=True)
    if len(names) < MIN_GROUPS:
        raise InvalidUpload(
            f"All samples belong to the group {names[0].item()!r:.100}; a fit is judged on groups that it "
            "has not seen."
        )
    return numbers.astype(np.int64)


def _checked_weights(weights: Array) -> Array:
    values = weights.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        row = int(wrong[0])
        raise InvalidUpload(
            f"{SAMPLE_WEIGHT}[{row}] is {values[row]}; weights are finite and not negative"
            f"{_others(wrong.size - 1, 'weight')}."
        )
    if np.count_nonzero(values) < MIN_SAMPLES:
        raise InvalidUpload(
            f"`{SAMPLE_WEIGHT}` is above 0 for {np.count_nonzero(values)} samples; a fit needs at least "
            f"{MIN_SAMPLES}."
        )
    return values


def check_count(samples: int) -> None:
    """Refuse a validation set of fewer than `MIN_SAMPLES` samples."""
    if samples < MIN_SAMPLES:
        raise InvalidUpload(
            f"The validation set has {samples} sample{'' if samples == 1 else 's'}; a fit that is judged on "
            f"unseen folds needs at least {MIN_SAMPLES}."
        )


def check_size(sizes: dict[str, int], max_bytes: int) -> None:
    """Refuse arrays that would take more than `max_bytes` together; `sizes` are bytes by name."""
    total = sum(sizes.values())
    if total > max_bytes:
        names = ", ".join(f"`{name}`" for name in sizes)
        raise UploadTooLarge(f"The arrays {names} unpack to {total:,} bytes; the limit is {max_bytes:,}.")


def _others(count: int, noun: str) -> str:
    return "" if count == 0 else f" ({count} more {noun}{'s' if count > 1 else ''} out of range)"
