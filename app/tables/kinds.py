"""Which kind of file an upload is, by its first bytes: known before anything is loaded that reads it."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from boxcal.app.http.problems import InvalidUpload, UploadTooLarge

START_BYTES = 2**16
GZIP_MAGIC = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
UNPACKED_AT_ONCE = 2**20
DELIMITERS = ",;\t|"
FRACTION = rb"(?:^|[;\t|])\"? *-?\d*%b\d+(?:e[-+]?\d+)? *\"?(?=[;\t|\r\n])"
DECIMAL_COMMA, DECIMAL_POINT = (
    re.compile(FRACTION % mark, re.IGNORECASE | re.MULTILINE) for mark in (b",", rb"\.")
)
"""The numbers of a table whose delimiter is no comma, as spreadsheets write them in many countries."""
MARKUP = rb"<(?:!|\?xml|[a-zA-Z])"
LIST = rb"\[[-+\d.eE, \t]*(?:[\[{\"]|(?:\][ \t]*)?\r?(?:\n|\Z))"
"""Not the classes `<=50K` and `[0, 10)`."""
OF_EXCEL = rb"(?:\xef\xbb\xbf)?\"?[sS][eE][pP]=.\"?\r?\n"
FOREIGN = (
    (
        rb"\x93NUMPY",
        "it is one .npy array; send the parts `logits` and `labels` (with --labels FILE), or an .npz of both",
    ),
    (rb"\x80", "it is a pickle, which is never opened; save arrays with numpy.savez, or a table as Parquet"),
    (rb"\xff\xfe", "it is text in UTF-16; save it in UTF-8"),
    (rb"\xfe\xff", "it is text in UTF-16; save it in UTF-8"),
    (rb"#", "it begins with a comment; the first line of a .csv names the columns"),
    (rb"\xfd7zXZ", "it is compressed with xz; unpack it, or use gzip"),
    (rb"BZh", "it is compressed with bzip2; unpack it, or use gzip"),
    (rb"\x28\xb5\x2f\xfd", "it is compressed with zstd; unpack it, or use gzip"),
    (rb"\x89HDF", "it is HDF5; save the arrays with numpy.savez"),
    (rb"MATLAB", "it is a file of MATLAB; save the arrays with numpy.savez"),
    (rb"FEA1", "it is Feather, version 1; write it in version 2"),
    (rb"\xd0\xcf\x11\xe0", "it is an old Excel file; save the sheet as .csv"),
    (OF_EXCEL, "its first line names the delimiter for Excel; remove that line"),
    (MARKUP, "it is HTML or XML"),
    (LIST, 'it is a list in JSON; records are read, [{"label": 0, "probabilities": [0.9, 0.1]}, ...]'),
)
"""How files begin that are not read, and what they are."""
NO_CSV = re.compile(rb"[{#]|%b|%b|%b" % (MARKUP, LIST, OF_EXCEL))
NUMBER = re.compile(rb"[-+]?[\d.]+(?:[eE][-+]?\d+)?")
ONE_COLUMN = re.compile(rb"(?!%b\r?\n)[^\r\n]+\r?\n%b\r?(?:\n|\Z)" % (NUMBER.pattern, NUMBER.pattern))
"""How a `.csv` begins that has one column, of numbers."""
OFFICE = (
    (r"xl/workbook\.xml", "it is an Excel file (.xlsx); save the sheet as .csv"),
    (r"content\.xml", "it is a file of OpenDocument (.ods); save the sheet as .csv"),
)
ARCHIVES = (
    *OFFICE,
    (
        r".*/data\.pkl",
        "it was saved by torch.save, a pickle, which is never opened; save arrays with numpy.savez",
    ),
    (r".*\.(csv|parquet|arrow|json)", "it is a table in a .zip; unpack it, or compress it with gzip"),
)
"""Members of zip archives that hold neither arrays nor images, and what the archives are."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""How names of images end, in small letters."""
TABLES_PACKAGE = (
    "Tables (.csv, .parquet, .arrow, .json) need the package pyarrow: pip install 'boxcal[tables]'. "
    "Without it, send arrays as .npz."
)


def table_kind(start: bytes, *, is_csv: bool = False) -> str | None:
    """Name the kind of table that begins so: `parquet`, `arrow`, `arrows` (a stream), `json` or `csv`.

    `json` are records, `[{"label": ...}, ...]` or lines of `{"label": ...}`. `is_csv`: whether the file is
    named as `.csv`, which may then have one column of texts.
    """
    for magic, kind in ((b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"\xff\xff\xff\xff", "arrows")):
        if start.startswith(magic):
            return kind
    if re.match(rb"(\xef\xbb\xbf)?\s*(\[\s*\{|\{[^\n]*\}[ \t\r]*\n\s*\{)", start):
        return "json"
    line = start.partition(b"\n")[0].rstrip(b"\r")
    printable = all(byte >= 32 or byte == 9 for byte in line)
    has_rows = b"\n" in start or len(start) >= START_BYTES
    is_csv = (
        (is_csv and not NUMBER.fullmatch(line))
        or any(mark.encode() in line for mark in DELIMITERS)
        or bool(ONE_COLUMN.match(start))
    )
    is_csv = is_csv and printable and has_rows and b"\0" not in start
    return "csv" if is_csv and not NO_CSV.match(start) else None


def dialect(start: bytes) -> tuple[str, str]:
    """Return the delimiter of a CSV that begins so, and how its numbers mark decimals: `.` or `,`."""
    line = start.partition(b"\n")[0]
    delimiter = max(DELIMITERS, key=lambda mark: line.count(mark.encode()))
    if delimiter == ",":
        return delimiter, "."
    rows = len(line)  # where the rows begin: names may hold points
    has_commas = DECIMAL_COMMA.search(start, rows) and not DECIMAL_POINT.search(start, rows)
    return delimiter, "," if has_commas else "."


def no_kind(expected: str, start: bytes) -> str:
    """Say that a file that begins so is none of those expected, what it is instead, and what to do."""
    begins = f"it begins with {start[:4]!r}" if start else "it is empty"
    line, end, _ = start.partition(b"\n")
    first, is_cut, rest = line.partition(b"\r")
    is_text = first.isascii() and first.decode().isprintable()
    if is_text and is_cut and rest:
        begins = "its lines end with CR alone, as in CSV for the Macintosh; save it as CSV in UTF-8"
    elif is_text and end and b" " in first and not any(mark.encode() in first for mark in DELIMITERS):
        begins += ", and its first line has no comma, semicolon, tab or bar; save tables with commas"
    return f"{expected}: {next((said for magic, said in FOREIGN if re.match(magic, start)), begins)}."


def foreign_archive(names: Sequence[str]) -> str | None:
    """Say what a zip archive with these members is, if it holds neither arrays nor images."""
    has_images = any(name.lower().endswith(IMAGE_SUFFIXES) for name in names)
    known = OFFICE if has_images else ARCHIVES  # a sheet may hold images of its own
    return next((said for member, said in known if any(re.fullmatch(member, name) for name in names)), None)


def unpack(file: IO[bytes], path: Path, max_bytes: int | None = None) -> int:
    """Write to `path` what a file that is compressed with gzip holds, and return how many bytes that are."""
    size = 0
    try:
        with gzip.open(file) as content, path.open("wb") as out:
            while block := content.read(UNPACKED_AT_ONCE):
                size += len(block)
                if max_bytes is not None and size > max_bytes:
                    raise UploadTooLarge(
                        f"The file unpacks to more than {max_bytes:,} bytes, which is the limit."
                    )
                out.write(block)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InvalidUpload(f"The file is no readable .gz: {error}.") from error
    return size


def check_tables_package() -> None:
    """Refuse a table, and say what to install, where the package that reads tables is missing."""
    try:
        import pyarrow  # noqa: F401, PLC0415 - what is no table needs none
    except ModuleNotFoundError as error:
        raise InvalidUpload(TABLES_PACKAGE) from error
