"""Splits the body of `/fit` (multipart/form-data) into its fields and its file, in the worker.

The file is not copied: `FilePart` reads it where it lies in the body.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

from boxcal.app.fitting.fields import FILES, FitFields
from boxcal.app.http.forms import delimiter_of, parts
from boxcal.app.http.problems import InvalidParameter, InvalidUpload, MalformedBody
from boxcal.app.tables.file_part import FilePart

MAX_PARTS = len(FitFields.model_fields) + len(FILES)
MAX_FIELD_BYTES = 4096


def read_form(
    body: Path, content_type: str, accepted: Sequence[str]
) -> tuple[FitFields, dict[str, FilePart]]:
    """Read the `accepted` fields, and open the files: `file` alone, or arrays by name."""
    delimiter = delimiter_of(content_type)
    if body.stat().st_size == 0:
        raise MalformedBody("The multipart body is empty.")
    fields: dict[str, str] = {}
    files: list[tuple[str, int, int]] = []
    with body.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for name, is_file, start, end in parts(content, delimiter, MAX_PARTS):
            if is_file:
                files.append((name, start, end - start))
            elif end - start > MAX_FIELD_BYTES:
                raise MalformedBody(
                    f"The field `{name:.200}` has {end - start:,} bytes; the limit is {MAX_FIELD_BYTES:,}."
                )
            elif name in fields:
                raise InvalidParameter(f"The form has two fields `{name:.200}`; it may have each once.")
            else:
                fields[name] = content[start:end].decode("utf-8", "replace")
    names = [name for name, _, _ in files]
    if names != ["file"] and ("file" in names or not names or len(set(names)) < len(names)):
        shown = ", ".join(f"`{name:.200}`" for name in names) or "none"
        raise InvalidUpload(
            "The form needs one part `file` with a file name, holding .npz, .parquet, .csv, .arrow, .json or "
            f".zip, or .npy parts such as `logits` and `labels`; its parts with a file name: {shown}."
        )
    checked = FitFields.of(fields, accepted)
    return checked, {name: FilePart(body, start, length) for name, start, length in files}
