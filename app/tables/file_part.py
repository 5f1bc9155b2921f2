"""A part of a file as a file of its own: an upload is read where it lies in the body of its request."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any


class FilePart(io.RawIOBase):
    """`length` bytes of the file at `path`, from `start`, as a file of their own."""

    def __init__(self, path: Path, start: int, length: int) -> None:
        self.path, self.start, self.length = path, start, length
        self._file = path.open("rb", buffering=0)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position within the part."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        if origin + offset < 0:
            raise OSError(errno.EINVAL, f"the position {origin + offset} is before the beginning of the file")
        self._position = origin + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, at most to the end of the part."""
        room = memoryview(buffer)[: max(0, self.length - self._position)]
        count = os.preadv(self._file.fileno(), [room], self.start + self._position)
        self._position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
