"""The check of an upload, in the worker: the body of `/fit` becomes a validation set, or is refused with why.

What the file is, its first bytes say: names and content types are not believed.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO

from boxcal.app.fitting.fields import FitFields
from boxcal.app.fitting.messages import BODY_FILE, Checked, CheckTask
from boxcal.app.fitting.worker import requirements
from boxcal.app.fitting.worker.archives import open_archive
from boxcal.app.fitting.worker.arrays import NAMES, read_json, read_npy, read_npz, read_object
from boxcal.app.fitting.worker.form import FilePart, read_form
from boxcal.app.fitting.worker.images import keep_images
from boxcal.app.fitting.worker.memory import limit_memory
from boxcal.app.fitting.worker.validation_set import Expected, StoredSet, check_size, keep_set
from boxcal.app.http.problems import InvalidUpload, UnknownMethod, UnknownUploadFormat
from boxcal.app.tables.columns import LABEL, SCORES, choose_columns
from boxcal.app.tables.formats import BATCH_ROWS, START_BYTES, open_table, readable, table_kind
from boxcal.app.tables.model_inputs import ModelInputs
from boxcal.app.tables.values import arrays_of

NPY_MAGIC = b"\x93NUM"


def check(task: CheckTask) -> Checked:
    """Read the form, convert its file to arrays, and refuse it where the method misses what it reads.

    Raises
    ------
    BoxcalError
        Names the field, array, place or value that cannot be accepted.
    """
    limit_memory(task.memory_bytes)
    body, backbone = task.folder / BODY_FILE, task.backbone
    if is_json(task.content_type):
        fields, data = _read_json(body, task)
    else:
        fields, files = read_form(body, task.content_type, task.fields)
        _check_method(fields, task)
        with ExitStack() as stack:
            for part in files.values():
                stack.enter_context(part)
            classes = backbone.labels
            if "file" in files:
                data = read_file(
                    files["file"],
                    task.folder,
                    classes=classes,
                    max_bytes=task.max_bytes,
                    scores=fields.scores,
                    inputs=backbone.samples,
                )
            else:
                read_npy(files, task.folder, Expected(classes, task.max_bytes, backbone.samples))
                data = StoredSet(task.folder)
    if data.holds_images and backbone.inputs != "images":
        raise InvalidUpload(f"The file holds images, which {backbone.name} does not read; send its logits.")
    required_by = {task.methods[fields.method]: f"the method {fields.method!r}"}
    for name, reads in task.others:
        required_by.setdefault(reads, name)
    for wanted, who in required_by.items():
        if missing := requirements.missing(wanted, data, backbone):
            raise UnknownMethod(f"For {who}, {missing}.")
    if data.needs_backbone:
        # The fit will keep the logits of all samples, and the inputs where they are read.
        sizes = {"logits": len(backbone.labels), "inputs": math.prod(backbone.input_shape)}
        kept = {"logits"} | ({"inputs"} & required_by.keys())
        check_size({each: 4 * data.samples * sizes[each] for each in sorted(kept)}, task.max_bytes)
    if not data.holds_images:
        body.unlink()
    return Checked(fields.method, fields.activate, fields.budget_seconds, data.samples)


def is_json(content_type: str) -> bool:
    """Whether a body of this type is a JSON document in place of a form."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


def _read_json(body: Path, task: CheckTask) -> tuple[FitFields, StoredSet]:
    with body.open("rb") as file:
        document = read_object(file, body.stat().st_size)
    given = {name: document.pop(name) for name in task.fields if name in document}
    for name in document:
        if name not in NAMES:
            FitFields.of({name: document[name]}, task.fields)  # names the nearest field
    fields = FitFields.of(given, task.fields)
    _check_method(fields, task)
    read_json(document, task.folder, Expected(task.backbone.labels, task.max_bytes, task.backbone.samples))
    return fields, StoredSet(task.folder)


def _check_method(fields: FitFields, task: CheckTask) -> None:
    if fields.method not in task.methods:
        raise UnknownMethod(
            f"There is no method {fields.method!r:.200}; there are {', '.join(task.methods)}."
        )


def read_file(
    file: FilePart,
    folder: Path,
    *,
    classes: Sequence[str] | None,
    max_bytes: int,
    scores: str | None = None,
    inputs: ModelInputs | None = None,
) -> StoredSet:
    """Check a file of arrays, a table, a document or images, and keep in `folder` what a fit reads.

    Parameters
    ----------
    classes
        The backbone's K labels; None to accept arrays of any K.
    max_bytes
        How large the arrays may be, or the images, unpacked.
    scores
        What the columns of a table hold that are named by class: `logits` or `probabilities`.
    inputs
        Of a model of features or texts, which may take the place of logits.

    Raises
    ------
    UnknownUploadFormat, InvalidUpload, UploadTooLarge
        Names the array, the image, the place and the value that cannot be accepted.
    """
    expected = Expected(classes, max_bytes, inputs, scores)
    buffered = io.BufferedReader(file)
    start = buffered.peek(START_BYTES)[:START_BYTES]
    if start[:2] == b"PK":
        with open_archive(buffered) as archive:
            if _is_of_images(archive):
                keep_images(archive, file, folder, classes=classes or (), max_bytes=max_bytes)
            else:
                read_npz(archive, folder, expected)
    elif start.lstrip()[:1] == b"{":
        document = read_object(buffered, file.length)
        read_json(document, folder, expected)
    elif (kind := table_kind(start)) is not None:
        _read_table(buffered, kind, folder, expected)
    else:
        begins = f"it begins with {start[:4]!r}" if start else "it is empty"
        if start[:4] == NPY_MAGIC:
            begins = "it is one .npy array; send the parts `logits` and `labels`"
        raise UnknownUploadFormat(
            f"The file is neither .npz nor .parquet, .arrow, .csv or .json, nor a .zip of images: {begins}."
        )
    return StoredSet(folder)


def _read_table(file: IO[bytes], kind: str, folder: Path, expected: Expected) -> None:
    """Check a table, of a kind of `table_kind`, and keep it in `folder`.

    Raises
    ------
    InvalidUpload, UploadTooLarge
        Names the column, the row and the value that cannot be accepted.
    """
    with readable(kind):
        table = open_table(file, kind)
        columns = choose_columns(table.names, expected.classes, expected.scores, expected.inputs)
        check_size({LABEL: 8 * (table.rows or 0)}, expected.max_bytes)
        numbers = () if columns.is_list or columns.has_samples else columns.names
        batches = table.batches(columns.read, numbers, BATCH_ROWS)
        arrays = arrays_of(batches, columns, expected.inputs)
        keep_set(folder, arrays, columns.kind, replace(expected, classes=columns.classes))


def holds_images(file: FilePart) -> bool:
    """Whether a file is a zip archive that holds something, and no array."""
    try:
        with open_archive(io.BufferedReader(file)) as archive:
            return _is_of_images(archive)
    except InvalidUpload:
        return False


def holds_scores(file: FilePart) -> bool:
    """Whether a file is an `.npz` with an array of logits or of probabilities."""
    try:
        with open_archive(io.BufferedReader(file)) as archive:
            return not {f"{name}.npy" for name in SCORES}.isdisjoint(archive.namelist())
    except InvalidUpload:
        return False


def _is_of_images(archive: zipfile.ZipFile) -> bool:
    names = archive.namelist()
    return bool(names) and not any(name.endswith(".npy") for name in names)
