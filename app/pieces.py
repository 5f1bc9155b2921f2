"""A response body in several pieces, which a server that knows of them sends in one system call.

It is an extension of ASGI: where the scope of a request announces `EXTENSION`, the `body` of a message may be
`Pieces`. Without it the pieces are joined, or sent one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

EXTENSION = "boxcal.pieces"
PIECES: dict[str, dict[object, object]] = {EXTENSION: {}}
"""The extensions in the scope of a request."""


class Pieces:
    """Pieces whose concatenation is a body.

    Attributes
    ----------
    parts
        At least one.
    """

    __slots__ = ("_length", "parts")

    def __init__(self, parts: Sequence[bytes | memoryview], length: int) -> None:
        self.parts = parts
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)
