"""Closes connections of clients that do not read, for which gRPC has no call."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import unquote

logger = logging.getLogger("boxcal")

SWEEP_SECONDS = 1.0
"""In this time late clients are collected, and then closed together: it takes a look at all open files."""


class Readers:
    """Disconnects clients that do not read their answers: gRPC waits for them without a limit.

    Until then such a client holds the answer, and its place among the calls in progress.
    """

    def __init__(self) -> None:
        self._late: set[str] = set()

    def expect(self, context: Any, seconds: float) -> None:
        """Disconnect the client of a call unless it is over in time."""
        peer = context.peer()  # not asked for later: it would end the process if the call were over
        timer = asyncio.get_running_loop().call_later(seconds, self._give_up, peer)
        context.add_done_callback(lambda _: timer.cancel())

    def _give_up(self, peer: str) -> None:
        if not self._late:
            asyncio.get_running_loop().call_later(SWEEP_SECONDS, self._disconnect)
        self._late.add(peer)

    def _disconnect(self) -> None:
        late, self._late = self._late, set()
        names = ", ".join(sorted(late))
        logger.warning("gRPC: disconnecting who did not read answers (%d): %.200s", len(late), names)
        asyncio.get_running_loop().run_in_executor(None, close_connections, late)


def close_connections(peers: Collection[str]) -> None:
    """Close the connections of peers such as `ipv4:127.0.0.1:50000`; gRPC then ends their calls.

    Their sockets are found among the open files. A duplicate of a descriptor names the same connection, also
    where gRPC closes its own meanwhile.
    """
    addresses = {_parsed(peer) for peer in peers}
    for file in Path("/dev/fd").iterdir():
        with suppress(OSError):
            descriptor = os.dup(int(file.name))
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            with socket.socket(fileno=descriptor) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and _address(one) in addresses:
                    one.shutdown(socket.SHUT_RDWR)


def _parsed(peer: str) -> tuple[str, str]:
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), port


def _address(one: socket.socket) -> tuple[str, str]:
    """Return the address of the other end, as gRPC writes it."""
    host, port, *_ = one.getpeername()
    parsed = ip_address(host)
    if isinstance(parsed, IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    return str(parsed), str(port)
