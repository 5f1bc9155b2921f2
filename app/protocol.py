"""How answers reach the wire: uvicorn's protocol for HTTP, with the head of an answer sent with its body."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONTINUE = b"HTTP/1.1 100 "


class WholeAnswers(HttpToolsProtocol):
    """uvicorn's protocol, which holds the head of an answer back until the first of its body is there.

    So ASGI asks, and small answers leave in one write: two cost the system twice as much, and wake the client
    for a head with which it cannot do anything yet.
    """

    def on_headers_complete(self) -> None:
        """Begin to answer a request, through a transport of its own."""
        super().on_headers_complete()
        cycle = self.cycle
        if cycle is not None and cycle.scope is self.scope and cycle.scope["method"] != "HEAD":
            cycle.transport = cast("asyncio.Transport", BufferedHeaderTransport(cycle.transport))


class BufferedHeaderTransport:
    """What uvicorn uses of a transport for one answer, whose first write is the head.

    Parameters
    ----------
    transport
        That of the connection.
    """

    __slots__ = ("_head", "_transport", "close", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""  # None once it has left
        self.close = transport.close
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """Hold the head; write it with what comes next, and then everything at once."""
        if self._head is None:
            self._transport.write(data)
        elif self._head:
            self._transport.writelines((self._head, data))
            self._head = None
        elif data.startswith(CONTINUE):
            self._transport.write(data)
        else:
            self._head = data
