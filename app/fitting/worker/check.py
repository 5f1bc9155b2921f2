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
from functools import partial
from pathlib import Path
from typing import IO

from boxcal.app.fitting.fields import FitFields
from boxcal.app.fitting.messages import BODY_FILE, Checked, CheckTask
from boxcal.app.fitting.resources import limit_memory
from boxcal.app.fitting.worker import requirements
from boxcal.app.fitting.worker.arrays import NAMES, open_archive, read_json, read_npy, read_npz, read_object
from boxcal.app.fitting.worker.form import read_form
from boxcal.app.fitting.worker.images import keep_images
from boxcal.app.fitting.worker.validation_set import Expected, FileColumns, StoredSet, check_size, keep_set
from boxcal.app.http.problems import InvalidUpload, UnknownMethod, UnknownUploadFormat
from boxcal.app.tables.columns import LABEL, SCORES, choose_columns
from boxcal.app.tables.file_part import FilePart
from boxcal.app.tables.kinds import (
    BOM,
    GZIP_MAGIC,
    START_BYTES,
    check_tables_package,
    foreign_archive,
    no_kind,
    table_kind,
    unpack,
)
from boxcal.app.tables.labels import NAME, NOTHING, Declared
from boxcal.app.tables.sample_schema import ModelInputs
from boxcal.calibrators.method import no_method


def check(task: CheckTask) -> Checked:
    """Read the form, convert its file to arrays, and refuse it where the method misses what it reads."""
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
                    inputs=backbone.samples,
                    declared=fields.declared,
                )
            else:
                read_npy(
                    files, task.folder, Expected(classes, task.max_bytes, backbone.samples, fields.declared)
                )
                data = StoredSet(task.folder)
    data.keep_declared(fields.declared)
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
    backbone = task.backbone
    read_json(
        document, task.folder, Expected(backbone.labels, task.max_bytes, backbone.samples, fields.declared)
    )
    return fields, StoredSet(task.folder)


def _check_method(fields: FitFields, task: CheckTask) -> None:
    if fields.method not in task.methods:
        raise UnknownMethod(f"There is {no_method(fields.method, task.methods)}.")


def read_file(
    file: FilePart,
    folder: Path,
    *,
    classes: Sequence[str] | None,
    max_bytes: int,
    inputs: ModelInputs | None = None,
    declared: Declared = NOTHING,
) -> StoredSet:
    """Check a file of arrays, a table, a document or images, and keep in `folder` what a fit reads.

    `classes`: the backbone's K labels; None to accept arrays of any K.
    """
    expected = Expected(classes, max_bytes, inputs, declared)
    buffered = io.BufferedReader(file, START_BYTES)
    start = buffered.peek(START_BYTES)[:START_BYTES]
    if start[:2] == GZIP_MAGIC:
        path = folder / "unpacked"
        file = FilePart(path, 0, unpack(buffered, path, max_bytes))
        buffered = io.BufferedReader(file, START_BYTES)
        start = buffered.peek(START_BYTES)[:START_BYTES]
    if start[:2] == b"PK":
        with open_archive(buffered) as archive:
            if said := foreign_archive(archive.namelist()):
                raise UnknownUploadFormat(f"The file is neither .npz nor a .zip of images: {said}.")
            if _is_of_images(archive):
                keep_images(archive, file, folder, classes=classes or (), max_bytes=max_bytes)
            else:
                read_npz(archive, folder, expected)
    elif (kind := table_kind(start)) is not None:
        _read_table(buffered, kind, folder, expected)
    elif start.removeprefix(BOM).lstrip()[:1] == b"{":
        document = read_object(buffered, file.length)
        read_json(document, folder, expected)
    else:
        wanted = "The file is neither .npz nor .parquet, .arrow, .csv or .json, nor a .zip of images"
        raise UnknownUploadFormat(no_kind(wanted, start))
    return StoredSet(folder)


def _read_table(file: IO[bytes], kind: str, folder: Path, expected: Expected) -> None:
    """Check a table, of a kind of `table_kind`, and keep it in `folder`."""
    check_tables_package()
    from boxcal.app.tables.formats import BATCH_ROWS, open_table, readable  # noqa: PLC0415 - arrays need neither
    from boxcal.app.tables.values import arrays_of, distinct_labels  # noqa: PLC0415 - as above

    declared = expected.declared
    with readable(kind):
        table = open_table(file, kind)
        check_size({LABEL: 8 * (table.rows or 0)}, expected.max_bytes)
        columns = choose_columns(
            table.names,
            expected.classes,
            declared,
            expected.inputs,
            label_values=partial(distinct_labels, table),
            texts=table.texts,
        )
        if columns.reordered and declared.classes is None and declared.labels_as is None:
            # An index could count the columns of the file, or the classes of the model.
            expected = replace(expected, declared=replace(declared, labels_as=NAME))
        numbers = () if columns.is_list or columns.has_samples else columns.names
        arrays = arrays_of(table.batches(columns.read, numbers, BATCH_ROWS), columns, expected.inputs)
        known, own = (columns.classes, None) if columns.is_list else (expected.classes, columns.classes)
        taken_for = columns.kind if declared.scores is None and columns.names[0] not in SCORES else None
        matched = FileColumns.matched(
            known, own, kind=taken_for, is_single=columns.is_single, left_out=columns.left_out
        )
        if columns.has_samples and expected.inputs is not None:
            matched = replace(matched, said=expected.inputs.read_as(columns.names))
        keep_set(folder, arrays, columns.kind, expected, columns=matched)


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
