"""Reads validation data that are named arrays, `.npz`, `.npy` parts and JSON, and checks their shapes.

No pickle is read, and no array of another size than its header and the archive's directory announce. The
directory of an archive takes many times its size in memory, so its size is limited before any entry is
unpacked. Entries that overlap let a small file unpack to any size, so their places are compared.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from boxcal.app.fitting.worker.validation_set import (
    Expected,
    FileColumns,
    check_count,
    check_size,
    keep_set,
    refuse_unread,
)
from boxcal.app.http.problems import InvalidUpload, MalformedBody, UploadTooLarge
from boxcal.app.settings import limits
from boxcal.app.tables.arrays import Array, Batch, Header, read_header, read_rows
from boxcal.app.tables.columns import GROUPS, SAMPLE_WEIGHT, SCORES, kind_of, refuse_weights
from boxcal.app.tables.file_part import FilePart
from boxcal.app.tables.kinds import BOM, START_BYTES, foreign_archive
from boxcal.app.tables.labels import CLASSES, check_shape, names_of, refuse_matrix
from boxcal.app.tables.sample_schema import FEATURES, TEXTS, ModelInputs, either_of, naming_samples
from boxcal.app.tables.scores import is_single, stored_dtype
from boxcal.calibrators.errors import hint
from boxcal.calibrators.scores import two_columns
from boxcal.models import UnusableInput

MAX_DIRECTORY_BYTES = 16 * 2**20
LOCAL_HEADER_BYTES = 30
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
END = struct.Struct("<4s4H2LH")
END_MAGIC = b"PK\x05\x06"
LOCATOR_MAGIC, LOCATOR_BYTES = b"PK\x06\x07", 20  # right before the end, in the 64-bit form
MAX_COMMENT = 2**16


def open_archive(file: IO[bytes]) -> zipfile.ZipFile:
    """Open a zip archive whose entries can be unpacked one by one."""
    size = _directory_size(file)
    if size > MAX_DIRECTORY_BYTES:
        raise UploadTooLarge(
            f"The directory of the archive has {size:,} bytes; the limit is {MAX_DIRECTORY_BYTES:,}."
        )
    try:
        archive = zipfile.ZipFile(file)
    except (*DAMAGE, ValueError, OSError) as error:
        raise InvalidUpload(f"The file is no readable zip archive: {error}.") from error
    end = 0
    for entry in sorted(archive.infolist(), key=lambda entry: entry.header_offset):
        if not entry.filename:  # zipfile also cuts names at a NUL
            raise InvalidUpload("An entry of the archive has no name.")
        if entry.header_offset < end:
            raise InvalidUpload(
                f"The entry {entry.filename!r:.200} begins at byte {entry.header_offset:,}, "
                f"before byte {end:,}, where the entry before it ends."
            )
        end = entry.header_offset + LOCAL_HEADER_BYTES + len(entry.orig_filename) + entry.compress_size
        if entry.flag_bits & 0x1:
            raise InvalidUpload(f"The entry {entry.filename!r:.200} is encrypted.")
        if entry.compress_type not in METHODS:
            raise InvalidUpload(
                f"The entry {entry.filename!r:.200} is packed with zip method {entry.compress_type}; "
                "methods 0 and 8 are read."
            )
    return archive


def _directory_size(file: IO[bytes]) -> int:
    """Read the size of the directory from the archive's last record."""
    length = file.seek(0, io.SEEK_END)
    file.seek(max(0, length - END.size - MAX_COMMENT))
    tail = file.read()
    file.seek(0)
    start = tail.rfind(END_MAGIC)
    if start < 0 or len(tail) - start < END.size:
        raise InvalidUpload("The file is no readable zip archive: its end is missing.")
    if tail[max(0, start - LOCATOR_BYTES) : start].startswith(LOCATOR_MAGIC):
        head = file.read(START_BYTES)
        length = int.from_bytes(head[LOCAL_HEADER_BYTES - 4 : LOCAL_HEADER_BYTES - 2], "little")
        name = head[LOCAL_HEADER_BYTES : LOCAL_HEADER_BYTES + length].decode(errors="replace")
        said = foreign_archive([name]) or "it is in the 64-bit form of zip"
        raise InvalidUpload(f"The file is no readable zip archive: {said}.")
    size: int = END.unpack_from(tail, start)[5]
    return size


NAMES = (*SCORES, "labels", FEATURES, TEXTS, GROUPS, SAMPLE_WEIGHT, CLASSES)
BLOCK_BYTES = 8 * 2**20
MAX_MEMBERS = 1000
KINDS = {"labels": "iufUSb", GROUPS: "iufUS", "probabilities": "fiu", CLASSES: "iUS"}
"""Kinds of dtypes that an array may have; others may have real numbers."""


def read_npz(archive: zipfile.ZipFile, folder: Path, expected: Expected) -> None:
    """Check the arrays of an archive and keep them in `folder`."""
    entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
    if len(entries) > MAX_MEMBERS:
        raise InvalidUpload(f"The archive has {len(entries)} arrays; the limit is {MAX_MEMBERS}.")
    files = {entry.filename.removesuffix(".npy"): entry for entry in entries}
    if len(files) < len(entries):
        raise InvalidUpload("The archive holds two arrays of the same name.")
    chosen = choose("The .npz", files, expected.inputs)
    headers = {}
    for name in chosen:
        with _naming_damage(name), archive.open(files[name]) as file:
            headers[name] = _header(file, files[name].file_size, name)
    check_arrays(headers, chosen[0], expected)
    arrays = {}
    for name, header in headers.items():
        with _naming_damage(name), archive.open(files[name]) as file:
            arrays[name] = _unpacked(file, header, name)
    keep_arrays(folder, arrays, chosen[0], expected)


def read_npy(parts: Mapping[str, FilePart], folder: Path, expected: Expected) -> None:
    """Check arrays that are `.npy` files of their own, by name, and keep them in `folder`.

    The errors are those of `read_npz`.
    """
    chosen = choose("The form", parts, expected.inputs)
    headers = {name: _header(io.BufferedReader(parts[name]), parts[name].length, name) for name in chosen}
    check_arrays(headers, chosen[0], expected)
    arrays = {}
    for name, header in headers.items():
        place = parts[name].start + header.offset
        arrays[name] = header.array(np.memmap(parts[name].path, np.uint8, "r", place, (header.bytes,)))
    keep_arrays(folder, arrays, chosen[0], expected)


def choose(place: str, there: Collection[str], inputs: ModelInputs | None) -> list[str]:
    """Choose the arrays to read; the first is that of the scores or samples."""
    refuse_weights(list(there))
    found = [name for name in SCORES if name in there]
    if inputs is not None and inputs.check_member(list(there)):
        found = [inputs.member]
    if TEXTS in there and TEXTS not in found:
        raise InvalidUpload(f"{place} has a member 'texts', which this model does not read.")
    for name in there:
        if name not in NAMES and (found or place == "The document"):
            known = f"it may have {', '.join(f'`{each}`' for each in NAMES)}."
            known += " A table is a list with an object for each row."
            raise InvalidUpload(f"{place} has a member {name!r:.100}{hint(name, NAMES, known)}")
    if not found or "labels" not in there:
        shown = ", ".join(f"`{name:.100}`" for name in sorted(there)[:20]) or "no arrays"
        raise InvalidUpload(f"{place} needs `labels` and {either_of(inputs)}; it holds {shown}.")
    if len(found) > 1:
        raise InvalidUpload(f"{place} holds both `logits` and `probabilities`; send the one to be fitted.")
    others = [
        name for name in (FEATURES, GROUPS, SAMPLE_WEIGHT, CLASSES) if name in there and name not in found
    ]
    return [found[0], "labels", *others]


def check_arrays(
    headers: Mapping[str, Header],
    member: str,
    expected: Expected,
) -> None:
    """Refuse arrays of other kinds, shapes and sizes before any is read."""
    inputs, classes = expected.inputs, expected.classes
    for name, header in headers.items():
        _check_kind(name, header.dtype)
    shapes = {name: header.shape for name, header in headers.items()}
    check_shape(shapes["labels"])
    count = shapes["labels"][0]
    if inputs is not None and member == inputs.member:
        _check_samples(inputs, shapes[member], count)
    else:
        check_rows(member, shapes[member], count, None if classes is None else len(classes))
    check_beside(shapes, count)
    sizes = {}
    for name, header in headers.items():
        kept = np.dtype(np.int64) if name in ("labels", GROUPS, CLASSES) else stored_dtype(header.dtype)
        sizes[name] = math.prod(header.shape) * max(header.dtype.itemsize, kept.itemsize)
    check_size(sizes, expected.max_bytes)


def check_rows(name: str, shape: tuple[int, ...], count: int, num_classes: int | None) -> None:
    """Refuse scores that are no validation set of this backbone."""
    if is_single(shape):
        if num_classes not in (None, 2):
            raise InvalidUpload(f"`{name}` must have the shape (N, {num_classes}), got {shape}.")
    elif len(shape) != 2:
        raise InvalidUpload(f"`{name}` must have the shape (N, {num_classes or 'K'}), got {shape}.")
    elif num_classes is not None and shape[1] != num_classes:
        raise InvalidUpload(
            f"`{name}` has {shape[1]} columns; the backbone served here has {num_classes} classes."
        )
    if shape[0] != count:
        raise InvalidUpload(f"`{name}` has {shape[0]} rows but `labels` has {count} values.")
    check_count(count)
    if not shape[-1]:
        raise InvalidUpload(f"`{name}` has no numbers in its rows; it needs one for each class.")


def _check_samples(inputs: ModelInputs, shape: tuple[int, ...], count: int) -> None:
    if inputs.member == TEXTS or any(column.is_text for column in inputs.columns):
        raise InvalidUpload(f"{inputs.model} reads strings; send JSON, CSV, Arrow or Parquet.")
    expected = (count, len(inputs.names))
    if shape != expected:
        raise InvalidUpload(
            f"`features` has the shape {shape}; {inputs.model} reads {expected[1]} features and `labels` has "
            f"{count} values, so it must have {expected}."
        )


def check_beside(shapes: Mapping[str, tuple[int, ...]], count: int) -> None:
    """Refuse features, groups and weights that are not of the samples."""
    for name in (GROUPS, SAMPLE_WEIGHT):
        if name in shapes and shapes[name] not in {(count,), (count, 1)}:
            raise InvalidUpload(f"`{name}` must have the shape ({count},), got {shapes[name]}.")
    features = shapes.get(FEATURES, (count, 1))
    if len(features) != 2 or features[0] != count or features[1] < 1:
        raise InvalidUpload(f"`features` must have the shape ({count}, D), got {features}.")


def _check_kind(name: str, dtype: np.dtype[Any]) -> None:
    """Refuse an array that does not hold what its name says."""
    if dtype.kind not in KINDS.get(name, "fiu") or not dtype.itemsize:
        others = {
            "labels": "class indices or names",
            GROUPS: "numbers or texts",
            CLASSES: "names or integers",
        }
        wanted = others.get(name, "real numbers")
        raise InvalidUpload(f"`{name}` must hold {wanted}, got the dtype {dtype}.")


def keep_arrays(
    folder: Path,
    arrays: Mapping[str, Array],
    member: str,
    expected: Expected,
    *,
    are_samples: bool = False,
) -> None:
    """Keep arrays in blocks of rows; rows of features are converted to samples, unless they are."""
    inputs = expected.inputs
    refuse_unread(
        expected.declared,
        ("label", "ignore"),
        "it names columns of a table, which arrays and documents are not",
    )
    arrays = dict(arrays)
    for name, one in arrays.items():
        if one.dtype.kind == "U":
            _check_characters(name, one)
    refuse_matrix(arrays["labels"])
    own = names_of(arrays.pop(CLASSES)) if CLASSES in arrays else expected.declared.classes
    kind = member
    if inputs is None or member != inputs.member:
        kind = kind_of(member, expected.declared)
        scores = arrays.pop(member)
        single = is_single(scores.shape)
        width = 2 if single else scores.shape[1]
        if own is not None and len(own) != width:
            raise InvalidUpload(f"`{CLASSES}` names {len(own)} classes, and `{member}` has {width} columns.")
        arrays = {kind: two_columns(scores, kind) if single else scores, **arrays}
        columns = FileColumns.matched(expected.classes, own, is_single=single)
    else:
        columns = FileColumns.matched(expected.classes, None)

    def batches() -> Iterator[Batch]:
        width = max(one[:1].nbytes for one in arrays.values())
        size = max(1, BLOCK_BYTES // max(1, width))
        flat = ("labels", GROUPS, SAMPLE_WEIGHT)
        for first in range(0, len(arrays["labels"]), size):
            batch = {
                name: one[first : first + size].ravel() if name in flat else one[first : first + size]
                for name, one in arrays.items()
            }
            if inputs is not None and member == inputs.member and not are_samples:
                columns = [*batch[member].astype(np.float64).T]
                batch[member] = inputs.rows.of_columns(columns, first, FEATURES)
            yield batch

    with naming_samples():
        keep_set(folder, batches(), kind, expected, columns=columns)


def _check_characters(name: str, texts: Array) -> None:
    """Refuse texts with numbers that are no characters: Python cannot make strings of them."""
    codes = np.ascontiguousarray(texts).view(np.dtype(np.uint32).newbyteorder(texts.dtype.byteorder))
    if (highest := codes.max(initial=0)) > sys.maxunicode:
        raise InvalidUpload(f"`{name}` holds {highest:#x}, which is the number of no character in Unicode.")


@contextmanager
def _naming_damage(name: str) -> Iterator[None]:
    """Convert errors of a damaged archive to `InvalidUpload`."""
    try:
        yield
    except DAMAGE as error:
        raise InvalidUpload(f"`{name}` is damaged: {error}.") from error


def _header(file: IO[bytes], length: int, name: str) -> Header:
    try:
        header = read_header(file, length)
    except ValueError as error:
        raise InvalidUpload(f"`{name}` {error}.") from error
    _check_kind(name, header.dtype)
    return header


def _unpacked(file: IO[bytes], header: Header, name: str) -> Array:
    file.read(header.offset)
    content = file.read(header.bytes)
    # The checksum is compared only when the end is read.
    if len(content) < header.bytes or file.read(1):
        raise InvalidUpload(f"`{name}` has another size than its header announces.")
    return header.array(content)


def read_object(file: IO[bytes], size: int) -> dict[str, Any]:
    if size > limits.MAX_JSON_UPLOAD_BYTES:
        raise UploadTooLarge(
            f"The JSON document has {size:,} bytes; the limit is {limits.MAX_JSON_UPLOAD_BYTES:,}. "
            "Send .npz or .parquet."
        )
    try:
        document = orjson.loads(file.read().removeprefix(BOM))
    except orjson.JSONDecodeError as error:
        is_lines = "after document" in str(error)
        advice = " Send lines of 64 KiB or more as one list: [{...}, {...}]." if is_lines else ""
        raise MalformedBody(f"The document is not JSON: {error}.{advice}") from error
    except SystemError as error:  # what orjson raises where an allocation fails
        raise MemoryError from error
    if not isinstance(document, dict):
        raise MalformedBody("The document must be a JSON object with `labels` and `logits`.")
    return document


def read_json(document: dict[str, Any], folder: Path, expected: Expected) -> None:
    """Check the arrays of a document and keep them in `folder`; texts, and features by name, are read too.

    The errors are those of `read_npz`.
    """
    inputs, classes = expected.inputs, expected.classes
    members = choose("The document", document, inputs)
    member = members[0]
    for name in members:
        if not isinstance(document[name], list):
            raise InvalidUpload(f"`{name}` of the document must be a list.")
    count = len(document["labels"])
    arrays: dict[str, Array] = {"labels": _labels(document["labels"])}
    for name in members:
        rows = document[name]
        if inputs is not None and name == member == inputs.member:
            if len(rows) != count:
                raise InvalidUpload(f"`{name}` has {len(rows)} rows but `labels` has {count} values.")
            arrays[name] = _samples(rows, inputs)
        elif name in (*SCORES, FEATURES):
            if name in SCORES and rows and isinstance(rows[0], int | float):
                rows = [[row] for row in rows]  # of the second of two classes
            width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
            width = len(classes) if classes is not None and name in SCORES and width != 1 else width
            if name in SCORES:
                check_rows(name, (len(rows), width), count, None if classes is None else len(classes))
            else:
                check_beside({name: (len(rows), width)}, count)
            check_size({name: 8 * len(rows) * width, "labels": 8 * count}, expected.max_bytes)
            arrays[name] = read_rows(rows, width, name, of_model=classes is not None)
        elif name != "labels":
            arrays[name] = _beside(name, rows)
    arrays = {name: arrays[name] for name in members}
    if inputs is None or member != inputs.member:
        headers = {name: Header(one.shape, one.dtype, False, 0) for name, one in arrays.items()}
        check_arrays(headers, member, expected)
    check_beside({name: one.shape for name, one in arrays.items()}, count)
    keep_arrays(folder, arrays, member, expected, are_samples=True)


def _beside(name: str, rows: list[Any]) -> Array:
    """Turn the groups, the weights or the names of the classes of a document into an array."""
    kinds = set(map(type, rows))
    if name == GROUPS:
        if kinds not in ({int}, {str}):
            raise InvalidUpload("`groups` must be a list of integers or of texts.")
        return np.array(rows)
    if name == CLASSES:
        if not kinds <= {int, str}:
            raise InvalidUpload(f"`{CLASSES}` must be a list of the names of the classes.")
        return np.array(list(map(str, rows)))
    if not kinds <= {int, float}:
        raise InvalidUpload(f"`{name}` must be a list of numbers.")
    return np.array(rows, np.float64)


def _samples(rows: list[Any], inputs: ModelInputs) -> Array:
    """Turn rows of features (lists, or objects by name) or texts into samples of the model."""
    if inputs.member == TEXTS:
        return np.array([*rows, None], object)[:-1]  # of one dimension, whatever was sent
    samples = inputs.rows.blank(len(rows))
    for row, one in enumerate(rows):
        try:
            samples[row] = inputs.rows.decode("features", one, 0)
        except UnusableInput as error:
            raise InvalidUpload(f"{FEATURES}[{row}]: {error}") from error
    return samples


def _labels(sent: list[Any]) -> Array:
    """Turn labels of a document, class indices or names, into an array (N,) or (N, M)."""
    kinds = set(map(type, sent))
    width = len(sent[0]) if kinds == {list} else 0
    if width and all(len(one) == width for one in sent):
        flat = [label for one in sent for label in one]
        if not any(isinstance(label, list) for label in flat):  # deeper ones are refused below
            return _labels(flat).reshape(-1, width)
    if not (kinds <= {int, float, bool} or kinds == {str}):
        raise InvalidUpload("`labels` must be a list of class indices or of class names.")
    try:
        return np.array(sent, np.float64 if float in kinds else None)
    except OverflowError:
        raise InvalidUpload("`labels` holds an integer that is too large.") from None
