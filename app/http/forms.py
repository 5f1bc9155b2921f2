"""Splits the body of a form (multipart/form-data, RFC 7578) into its parts, which are not copied."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from email.message import Message
from typing import NamedTuple

from boxcal.app.http.problems import MalformedBody

MAX_HEADER_BYTES = 8192
FOLD = re.compile(r"\r\n[ \t]+")
"""Continues a line of a header."""
PARAMETER = re.compile(r';\s*([^=;\s]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"?|([^;\s]*))')
ESCAPED = re.compile(r"\\(.)")
FILE_NAMES = ("filename", "filename*", "filename*0", "filename*0*")
"""Parameters of a part that is a file; the name itself is not used (RFC 5987, RFC 2231)."""


class FormPart(NamedTuple):
    """One part of a form, and where its content begins and ends."""

    name: str
    is_file: bool  # Whether it has a file name
    start: int
    end: int


def delimiter_of(content_type: str) -> bytes:
    """Return what begins the line before each part."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if not boundary:
        raise MalformedBody(f"Missing boundary in the content type {content_type!r:.200}.")
    return b"--" + boundary.encode("latin-1", "replace")


def parts(content: bytes | mmap.mmap, delimiter: bytes, most: int) -> Iterator[FormPart]:
    """Yield the parts of a form, which has at most so many."""
    position = 0 if content[: len(delimiter)] == delimiter else content.find(b"\r\n" + delimiter) + 2
    if position == 1:
        raise MalformedBody(f"The multipart body does not begin with its boundary {delimiter!r:.200}.")
    for _ in range(most + 1):
        position += len(delimiter)
        if content[position : position + 2] == b"--":
            return
        head_end = content.find(b"\r\n\r\n", position, position + MAX_HEADER_BYTES)
        if content[position : position + 2] != b"\r\n" or head_end < 0:
            raise MalformedBody(f"The multipart body has no part header at byte {position:,}.")
        start = head_end + 4
        end = content.find(b"\r\n" + delimiter, start)
        if end < 0:
            raise MalformedBody("The multipart body ends before its closing boundary.")
        about = _disposition(content[position + 2 : head_end].decode("utf-8", "replace"))
        if "name" not in about:
            raise MalformedBody(
                f"The part at byte {start:,} has no header `Content-Disposition: form-data; name=...`."
            )
        yield FormPart(about["name"], not about.keys().isdisjoint(FILE_NAMES), start, end)
        position = end + 2
    raise MalformedBody(f"The multipart body has more than {most:,} parts.")


def _disposition(head: str) -> dict[str, str]:
    """Return the parameters of `Content-Disposition: form-data` in the header of a part."""
    for line in FOLD.sub(" ", head).split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            if value.partition(";")[0].strip().lower() != "form-data":
                return {}
            found = PARAMETER.findall(value)
            return {key.lower(): ESCAPED.sub(r"\1", quoted) or plain for key, quoted, plain in found}
    return {}
