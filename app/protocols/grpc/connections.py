"""Closes connections of clients that do not read, for which gRPC has no call."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import stat
from collections import Counter
from collections.abc import Collection
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import unquote

logger = logging.getLogger("boxcal")


class Readers:
    """Disconnects clients that do not read their answers: gRPC waits for them without a limit.

    Until then such a client holds the answer, and its place among the calls in progress. Calls are counted by
    the second in which they are due: a timer for each costs a small call two per cent.
    """

    def __init__(self) -> None:
        self._due: dict[int, Counter[str]] = {}

    def expect(self, context: Any, peer: str, seconds: float) -> None:
        """Disconnect the client of a call unless it is over in time, or at most a second later."""
        loop = asyncio.get_running_loop()
        second = math.ceil(loop.time() + seconds)
        unread = self._due.get(second)
        if unread is None:
            unread = self._due[second] = Counter()
            loop.call_at(second, self._disconnect, second)
        unread[peer] += 1

        def is_over(_: Any) -> None:
            unread[peer] -= 1

        context.add_done_callback(is_over)

    def _disconnect(self, second: int) -> None:
        late = {peer for peer, calls in self._due.pop(second).items() if calls}
        if late:
            names = ", ".join(sorted(late))
            logger.warning("gRPC: disconnecting who did not read answers (%d): %.200s", len(late), names)
            asyncio.get_running_loop().run_in_executor(None, close_connections, late)


def close_connections(peers: Collection[str]) -> None:
    """Close the connections of peers such as `ipv4:127.0.0.1:50000`; gRPC then ends their calls.

    Their sockets are found among the open files. A duplicate of a descriptor names the same connection, also
    where gRPC closes its own meanwhile.
    """
    addresses = {parsed(peer) for peer in peers}
    for file in Path("/dev/fd").iterdir():
        with suppress(OSError):
            descriptor = os.dup(int(file.name))
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            with socket.socket(fileno=descriptor) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and _address(one) in addresses:
                    one.shutdown(socket.SHUT_RDWR)


def parsed(peer: str) -> tuple[str, str]:
    """Return the host and the port of a peer."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), port


def _address(one: socket.socket) -> tuple[str, str]:
    """Return the address of the other end, as gRPC writes it."""
    host, port, *_ = one.getpeername()
    parsed = ip_address(host)
    if isinstance(parsed, IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    return str(parsed), str(port)
