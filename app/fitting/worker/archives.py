"""Opens an uploaded zip archive without trusting it: its directory is checked before any entry is unpacked.

A directory takes many times its size in memory, so its size is limited. Entries that overlap let a small file
unpack to any size, so their places are compared.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import IO

from boxcal.app.http.problems import InvalidUpload, UploadTooLarge

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
        raise InvalidUpload("The file is no readable zip archive: it is in the 64-bit form of zip.")
    size: int = END.unpack_from(tail, start)[5]
    return size
