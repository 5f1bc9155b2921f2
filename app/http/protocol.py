"""How bytes reach the application and leave it: uvicorn's HTTP protocol with limits on slow and large peers.

It relies on these parts of uvicorn that are not documented: `HttpToolsProtocol` with its attributes
`app_state`, `client`, `cycle`, `flow`, `headers`, `parser`, `scope` and `transport`, and of `cycle` the
attributes `body`, `disconnected`, `more_body`, `response_complete` and `transport`.

A body in several parts, which are copied once if they are joined.

A server that knows of them sends those of a response in one system call. This is an extension of ASGI: where
the scope of a request announces `EXTENSION`, the `body` of a message may be `BodyParts`. Without it the parts
are joined, or sent one after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from boxcal.app.http.limits import Shares, descriptor_limit
from boxcal.app.http.problems import BoxcalError

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


CONTINUE = b"HTTP/1.1 100 "
MAX_WAITING_BYTES = 512 * 1024
"""Of a body that the application has not received: beyond, nothing more is read from the connection."""
MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and the headers together."""
IDLE_SECONDS = 75.0
"""For the first byte of a connection; uvicorn's `timeout_keep_alive` limits the time between requests."""
HEAD_SECONDS = 10.0
"""From the first byte of a request to the end of its headers."""
STALL_SECONDS = 20.0
"""In this time a client sends `MIN_BODY_BYTES` of an unfinished body, or reads a buffer of the response."""
MIN_BODY_BYTES = 20 * 1024
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
MAX_CONNECTIONS = 3 * descriptor_limit() // 4
"""Half of them from one address. Beyond, a connection may only ask for the health of the service: these
requests must find a descriptor."""
PLACES = "boxcal.connections"
"""Under this name the state of the server counts the connections by address."""
RESERVE_SECONDS = 2.0
"""In place of `IDLE_SECONDS` and `HEAD_SECONDS` for such a connection."""
TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 2\r\n"
    b"content-type: application/problem+json\r\ncontent-length: 152\r\n\r\n"
    b'{"type":"urn:boxcal:problem:unavailable","title":"Service unavailable","status":503,'
    b'"detail":"There are too many open connections; retry in 2 seconds."}'
)
FREE_CHUNKS, LEAST_CHUNK = 4096, 256
"""After so many chunks of a chunked body, a chunk has at least so many bytes on average: each takes the event
loop as long as 100 kB of a large one."""
TOO_SMALL = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: application/problem+json\r\n"
    b"content-length: 149\r\n\r\n"
    b'{"type":"urn:boxcal:problem:malformed-body","title":"Malformed body","status":400,'
    b'"detail":"The chunks are too small: 256 bytes on average or more."}'
)
TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
DISCONNECTION = "boxcal.disconnection"
"""An extension of ASGI, with the member `watch`: see `LimitedProtocol.watch`."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the size of headers and on the time that a client takes.

    The server calls `check_progress` of every connection about once a second. The application may send a
    response of several pieces in one message (`body_parts`).

    The status line and the headers are sent with the first bytes of the body, as ASGI recommends: small
    responses leave in one write. Two writes cost the system twice as much and wake the client twice.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._chunk = self._head_chunk = self._head_bytes = 0
        self._head_since: float | None = None
        self._received = self._chunks = self._head_end = 0
        self._checkpoint = (time.monotonic(), 0)
        self._unread_since: float | None = None
        self._when_lost: Callable[[], object] | None = None
        self._place = ExitStack()
        self._is_reserve = False
        self._extensions: dict[str, dict[object, object]] = {
            EXTENSION: {},
            DISCONNECTION: {"watch": self.watch},
        }

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note whether the connection takes one of the descriptors kept for health checks."""
        super().connection_made(transport)
        shares = Shares("connections", MAX_CONNECTIONS, MAX_CONNECTIONS // 2)
        places: Shares = self.app_state.setdefault(PLACES, shares)
        try:
            self._place.enter_context(places.holding(self.client[0] if self.client else str(id(self))))
        except BoxcalError:
            self._is_reserve = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell who watches."""
        super().connection_lost(exc)
        self._place.close()
        if self._when_lost is not None:
            self._when_lost()

    def watch(self, when_lost: Callable[[], object] | None) -> None:
        """Have something called if the client disconnects during the current request; None ends that.

        The body has been received. A task that awaits `http.disconnect` costs several changes of task.
        """
        self._when_lost = when_lost
        if when_lost is not None:
            self.flow.resume_reading()
            if self.cycle.disconnected:
                when_lost()

    def data_received(self, data: bytes) -> None:
        """Parse what a client sent; refuse headers that are too large."""
        self._received += len(data)
        self._chunk = len(data)
        if self._head_since is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_since is not None and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)

    def on_message_begin(self) -> None:
        """Begin the head of a request."""
        super().on_message_begin()
        self.scope["extensions"] = self._extensions
        self._head_since = time.monotonic()
        self._head_chunk = self._chunk

    def on_headers_complete(self) -> None:
        """Begin to answer a request, through a transport of its own."""
        most = self._head_chunk + self._head_bytes  # the chunk may have begun with another request
        self._head_since = None
        self._head_bytes = 0
        self._checkpoint = (time.monotonic(), self._received)
        self._chunks, self._head_end = 0, self._received - self._chunk  # the body may have begun
        if most > MAX_HEAD_BYTES and self._size_of_head() > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)
            raise ValueError("the headers are too large")  # ends the parser, and with it `data_received`
        if self._is_reserve and b"/health/" not in self.url.partition(b"?")[0]:
            self._refuse(TOO_MANY)
            raise ValueError("there are too many connections")
        super().on_headers_complete()
        cycle = self.cycle
        if self._is_reserve and cycle is not None:
            cycle.keep_alive = False
        if cycle is not None and cycle.scope is self.scope and cycle.scope["method"] != "HEAD":
            cycle.transport = cast("asyncio.Transport", BufferedHeaderTransport(cycle.transport))

    def on_chunk_header(self) -> None:
        """Refuse a body of many small chunks."""
        self._chunks += 1
        if self._chunks > FREE_CHUNKS and self._received - self._head_end < LEAST_CHUNK * self._chunks:
            self._refuse(TOO_SMALL)
            raise ValueError("the chunks are too small")

    def on_body(self, body: bytes) -> None:
        """Keep a part of a body, uncopied, until the application receives it."""
        cycle = self.cycle
        if cycle.response_complete:
            return
        before: bytes | bytearray | BodyParts = cycle.body
        if isinstance(before, BodyParts):
            before.add(body)
            waiting = len(before)
        else:
            whole = BodyParts([before, body], len(before) + len(body)) if before else body
            cycle.body = cast("bytearray", whole)  # uvicorn takes its length, and makes bytes of it
            waiting = len(whole)
        if waiting > MAX_WAITING_BYTES:
            self.flow.pause_reading()
        cycle.message_event.set()

    def _size_of_head(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed."""
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        super().pause_writing()
        self._unread_since = time.monotonic()

    def resume_writing(self) -> None:
        """Note that the client has read."""
        super().resume_writing()
        self._unread_since = None

    def check_progress(self, now: float) -> None:
        """Close the connection of a client that sends or reads too slowly."""
        if self.transport.is_closing():
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        unfinished = cycle is not None and cycle.more_body and not cycle.response_complete
        since, received = self._checkpoint
        is_reserve = self._is_reserve
        if self._unread_since is not None:
            if now - self._unread_since > STALL_SECONDS:
                self.transport.abort()
        elif self._head_since is not None:
            if now - self._head_since > (RESERVE_SECONDS if is_reserve else HEAD_SECONDS):
                self._refuse(TOO_SLOW)
        elif cycle is None:
            if now - since > (RESERVE_SECONDS if is_reserve else IDLE_SECONDS):
                self.transport.close()
        elif not unfinished or self.flow.read_paused:
            self._checkpoint = (now, self._received)
        elif now - since > STALL_SECONDS:
            if self._received - received < MIN_BODY_BYTES:
                self._refuse(TOO_SLOW)
            self._checkpoint = (now, self._received)

    def _refuse(self, response: bytes) -> None:
        """Answer without the application, unless a response has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(response)
        self.transport.close()


class BufferedHeaderTransport:
    """The part of a transport that uvicorn uses for one response, whose first write is the headers."""

    __slots__ = ("_head", "_transport", "close", "is_closing")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._head: bytes | None = b""  # None once it has been sent
        self.close = transport.close
        self.is_closing = transport.is_closing

    def write(self, data: bytes | BodyParts) -> None:
        """Keep the headers, send them with what comes next, and then send everything at once."""
        if self._head is None:
            if isinstance(data, BodyParts):
                self._transport.writelines(data.parts)
            else:
                self._transport.write(data)
        elif self._head:
            parts = data.parts if isinstance(data, BodyParts) else (data,)
            self._transport.writelines((self._head, *parts))
            self._head = None
        elif isinstance(data, bytes) and data.startswith(CONTINUE):
            self._transport.write(data)
        else:
            self._head = bytes(data)
