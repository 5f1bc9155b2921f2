"""Accepts connections one at a time, and leaves them to a sibling that has fewer.

All processes accept from one socket. An event loop that takes whatever has arrived would give most
connections of a burst to whichever process wakes first, and a connection stays where it is.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
import ssl
import struct
import time
from collections.abc import Callable
from pathlib import Path

MANY = 2**30
"""Of a process that does not serve yet."""
PAUSE_SECONDS = 0.001
LONGEST_SECONDS = 0.02
"""How long a connection waits for a sibling, which may be busy."""
_COUNT = struct.Struct("i")


class Shares:
    """How many connections each process has, in memory that all of them see.

    Parameters
    ----------
    folder
        Where the memory has its file; made by the first process.
    index, count
        Of this process, and how many there are.
    """

    def __init__(self, folder: Path, index: int, count: int) -> None:
        self._index, self._count = index, count
        path = folder / "connections"
        if not path.exists():
            path.write_bytes(_COUNT.pack(MANY) * count)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _COUNT.size * count)

    def tell(self, connections: int) -> None:
        """Say how many connections this process has."""
        _COUNT.pack_into(self._memory, _COUNT.size * self._index, connections)

    def is_ahead(self, connections: int) -> bool:
        """Whether a sibling has fewer."""
        return any(
            _COUNT.unpack_from(self._memory, _COUNT.size * other)[0] < connections
            for other in range(self._count)
            if other != self._index
        )


class Acceptor:
    """Takes connections for a protocol until it is closed.

    Parameters
    ----------
    listener
        The socket of all processes.
    protocol
        Makes the protocol of a connection.
    context
        For TLS.
    shares
        What the siblings have.
    connections
        Counts those of this process.
    """

    def __init__(
        self,
        listener: socket.socket,
        protocol: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext | None,
        shares: Shares,
        connections: Callable[[], int],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener, self._protocol, self._context = listener, protocol, context
        self._shares, self._connections = shares, connections
        self._opening: set[asyncio.Task[object]] = set()
        self._waiting_since: float | None = None
        self._is_closed = False
        listener.setblocking(False)
        self.resume()

    def resume(self) -> None:
        """Look for connections."""
        if not self._is_closed:
            self._shares.tell(self._own())
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more."""
        if not self._is_closed:
            self._is_closed = True
            self._shares.tell(MANY)
            self._loop.remove_reader(self._listener.fileno())

    def tell(self) -> None:
        """Tell the siblings how many connections this process has."""
        if not self._is_closed:
            self._shares.tell(self._own())

    def _own(self) -> int:
        return self._connections() + len(self._opening)

    def _accept(self) -> None:
        own, now = self._own(), time.monotonic()
        if self._shares.is_ahead(own):
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            if now - self._waiting_since < LONGEST_SECONDS:
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_SECONDS, self.resume)
                return
        self._waiting_since = None
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # a sibling was faster, or the client has gone
            return
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opening = self._loop.create_task(self._open(accepted))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        self._shares.tell(own + 1)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, accepted, ssl=self._context)
        except OSError:  # the client has gone, or the TLS handshake failed
            accepted.close()
