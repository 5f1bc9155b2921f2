"""Decompresses the body of a request with a `Content-Encoding` (RFC 9110) as the application receives it."""

from __future__ import annotations

import asyncio
import zlib

from starlette.types import Message, Receive

from boxcal.app.http.problems import MalformedBody, UnsupportedMediaType

CODINGS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Content codings with the `wbits` of zlib."""
ACCEPTED = {"Accept-Encoding": "gzip, deflate"}
STEP = 64 * 1024
"""Bytes that are decompressed at once, and that come of it; other requests run between two steps."""
MAX_MEMBERS = 1000
"""Of a gzip body; each costs as much as a step, however few bytes it has."""


def decompressed(receive: Receive, encoding: str) -> Receive:
    """Return what receives a body without the coding that the header `Content-Encoding` names."""
    names = [name for part in encoding.lower().split(",") if (name := part.strip()) not in ("", "identity")]
    if not names:
        return receive
    if len(names) > 1 or names[0] not in CODINGS:
        raise UnsupportedMediaType(
            f"The content encoding is {', '.join(names)!r:.100}; the service reads gzip or deflate.",
            headers=ACCEPTED,
        )
    return Decompression(receive, names[0])


class Decompression:
    """Receives a body in decompressed pieces of at most `STEP` bytes."""

    def __init__(self, receive: Receive, name: str) -> None:
        self._receive = receive
        self._name = name
        self._stream = zlib.decompressobj(CODINGS[name])
        self._data = memoryview(b"")  # received and not yet decompressed
        self._members = 1
        self._more = self._is_full = False

    async def __call__(self) -> Message:
        """Receive a message of the request."""
        if self._data or self._is_full:
            await asyncio.sleep(0)
        else:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._data = memoryview(message.get("body", b""))
            self._more = message.get("more_body", False)
        piece = self._data[:STEP]
        if piece and self._stream.eof:  # a file of gzip may have several members
            self._members += 1
            if self._members > MAX_MEMBERS:
                raise MalformedBody(f"The {self._name} body has more than {MAX_MEMBERS:,} members.")
            self._stream = zlib.decompressobj(CODINGS[self._name])
        try:
            body = self._stream.decompress(piece, STEP)
        except zlib.error as error:
            raise MalformedBody(f"The body is not {self._name}: {error}.") from error
        left = len(self._stream.unconsumed_tail) + len(self._stream.unused_data)
        self._data = self._data[len(piece) - left :]
        self._is_full = len(body) == STEP  # zlib may hold more of what it has consumed
        more = bool(self._more or self._data or self._is_full)
        if not more and not self._stream.eof:
            raise MalformedBody(f"The {self._name} body ends before its end.")
        return {"type": "http.request", "body": body, "more_body": more}
