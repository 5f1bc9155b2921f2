"""A body in several parts, which are copied once if they are joined.

A server that knows of them sends those of a response in one system call. This is an extension of ASGI: where
the scope of a request announces `EXTENSION`, the `body` of a message may be `BodyParts`. Without it the parts
are joined, or sent one after the other.
"""

from __future__ import annotations

EXTENSION = "boxcal.body_parts"


class BodyParts:
    """Parts whose concatenation is a body."""

    __slots__ = ("_length", "parts")

    def __init__(self, parts: list[bytes | bytearray | memoryview], length: int) -> None:
        self.parts = parts
        self._length = length

    def add(self, part: bytes) -> None:
        """Add a part at the end."""
        self.parts.append(part)
        self._length += len(part)

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)
