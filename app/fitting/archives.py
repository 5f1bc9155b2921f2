"""Opens an uploaded zip archive, once its directory is known to be of a reasonable size.

Reading a directory takes many times its size in memory, so one of a million made-up entries would be a bomb
before anything is unpacked.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import IO

from boxcal.app.fitting.errors import InvalidUpload, UploadTooLarge

MAX_DIRECTORY_BYTES = 16 * 2**20
END = struct.Struct("<4s4H2LH")
END_MAGIC = b"PK\x05\x06"
LOCATOR_MAGIC, LOCATOR_BYTES = b"PK\x06\x07", 20  # right before the end, in the 64-bit form
MAX_COMMENT = 2**16


def open_archive(file: IO[bytes], kind: str) -> zipfile.ZipFile:
    """Open a zip archive.

    Parameters
    ----------
    file
        Seekable; not closed here.
    kind
        What it should be, for the refusal.

    Raises
    ------
    InvalidUpload
        It is no readable zip archive.
    UploadTooLarge
        Its directory is larger than `MAX_DIRECTORY_BYTES`.
    """
    size = directory_size(file, kind)
    if size is None:
        raise InvalidUpload(f"The file is no readable {kind}: the end of a zip archive is missing.")
    if size > MAX_DIRECTORY_BYTES:
        raise UploadTooLarge(
            f"The directory of the archive has {size:,} bytes; the limit is {MAX_DIRECTORY_BYTES:,}."
        )
    try:
        return zipfile.ZipFile(file)
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise InvalidUpload(f"The file is no readable {kind}: {error}.") from error


def directory_size(file: IO[bytes], kind: str) -> int | None:
    """Read the size of the directory from the archive's last record; None where there is none.

    Raises
    ------
    InvalidUpload
        The archive is in the 64-bit form, which keeps another size elsewhere.
    """
    length = file.seek(0, io.SEEK_END)
    file.seek(max(0, length - END.size - MAX_COMMENT))
    tail = file.read()
    file.seek(0)
    start = tail.rfind(END_MAGIC)
    if start < 0 or len(tail) - start < END.size:
        return None
    if tail[max(0, start - LOCATOR_BYTES) : start].startswith(LOCATOR_MAGIC):
        raise InvalidUpload(f"The file is no readable {kind}: it is in the 64-bit form of zip.")
    size: int = END.unpack_from(tail, start)[5]
    return size
