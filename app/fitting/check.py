"""The check of an upload, in the worker: the body of `/fit` becomes a validation set, or is refused with why.

What the file is, its first bytes say: names and content types are not believed.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

from boxcal.app.fitting import requirements
from boxcal.app.fitting.archives import open_archive
from boxcal.app.fitting.errors import InvalidUpload, UnknownMethod, UnknownUploadFormat
from boxcal.app.fitting.form import FilePart, read_form
from boxcal.app.fitting.images import keep_images
from boxcal.app.fitting.memory import limit_memory
from boxcal.app.fitting.messages import BODY_FILE, Checked, CheckTask
from boxcal.app.fitting.npz import read_npz
from boxcal.app.fitting.validation_set import ValidationSet, check_size


def check(task: CheckTask) -> Checked:
    """Read the form, convert its file to arrays, and refuse it where the method misses what it reads.

    Raises
    ------
    BoxcalError
        Names the field, array, place or value that cannot be accepted.
    """
    limit_memory(task.memory_bytes)
    body, backbone = task.folder / BODY_FILE, task.backbone
    fields, file = read_form(body, task.content_type)
    if fields.method not in task.methods:
        raise UnknownMethod(
            f"There is no method {fields.method!r:.200}; there are {', '.join(task.methods)}."
        )
    with file:
        data = read_file(file, task.folder, classes=backbone.labels, max_bytes=task.max_bytes)
    if data.holds_images and backbone.inputs != "images":
        raise InvalidUpload(f"The file holds images, which {backbone.name} does not read; send its logits.")
    required_by = {task.methods[fields.method]: f"the method {fields.method!r}"}
    name, reads = task.compared_with
    required_by.setdefault(reads, f"the active calibrator, {name!r}, which the report compares with")
    for wanted, who in required_by.items():
        if missing := requirements.missing(wanted, data, backbone):
            raise UnknownMethod(f"For {who}, {missing}.")
    if data.holds_images:
        # The fit will keep the logits of all images, and the inputs where they are read.
        sizes = {"logits": len(backbone.labels), "inputs": math.prod(backbone.input_shape)}
        kept = {"logits"} | ({"inputs"} & required_by.keys())
        check_size({each: 4 * data.samples * sizes[each] for each in sorted(kept)}, task.max_bytes)
    else:
        body.unlink()
    return Checked(fields.method, fields.activate, fields.budget_seconds, data.samples)


def read_file(
    file: FilePart, folder: Path, *, classes: Sequence[str] | None, max_bytes: int
) -> ValidationSet:
    """Check a file of arrays or of images, and keep in `folder` what a fit reads.

    Parameters
    ----------
    classes
        The backbone's K labels; None to accept arrays of any K.
    max_bytes
        How large the arrays may be, or the images, unpacked.

    Raises
    ------
    UnknownUploadFormat, InvalidUpload, UploadTooLarge
        Names the array, the image, the place and the value that cannot be accepted.
    """
    buffered, num_classes = io.BufferedReader(file), None if classes is None else len(classes)
    magic = buffered.read(4)
    if magic[:2] == b"PK":
        with open_archive(buffered) as archive:
            if _is_of_images(archive):
                keep_images(archive, file, folder, classes=classes or (), max_bytes=max_bytes)
            else:
                read_npz(archive, folder, num_classes=num_classes, max_bytes=max_bytes)
    elif magic == b"PAR1":
        from boxcal.app.fitting.parquet import read_parquet  # noqa: PLC0415 - pyarrow takes long to load

        read_parquet(buffered, folder, num_classes=num_classes, max_bytes=max_bytes)
    else:
        start = f"it begins with {magic!r}" if magic else "it is empty"
        raise UnknownUploadFormat(f"The file is neither .npz nor .parquet, nor a .zip of images: {start}.")
    return ValidationSet(folder)


def holds_images(file: FilePart) -> bool:
    """Whether a file is a zip archive that holds something, and no array."""
    try:
        with open_archive(io.BufferedReader(file)) as archive:
            return _is_of_images(archive)
    except InvalidUpload:
        return False


def _is_of_images(archive: zipfile.ZipFile) -> bool:
    names = archive.namelist()
    return bool(names) and not any(name.endswith(".npy") for name in names)
