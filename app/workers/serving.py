"""One serving process: takes connections from the socket that the supervisor opened for all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from dataclasses import dataclass
from typing import Any

from boxcal.app.server import ProcessServer, serve_with, server_config
from boxcal.app.settings.service import Settings
from boxcal.app.workers.accepting import Acceptor, Shares
from boxcal.app.workers.slot import Slot


@dataclass(frozen=True, slots=True)
class Channels:
    """File descriptors of the supervisor.

    Attributes
    ----------
    listener
        The socket to accept connections from.
    ready
        Gets one byte once this process serves.
    lifeline
        At its end once the supervisor is gone.
    """

    listener: int
    ready: int
    lifeline: int


class WorkerServer(ProcessServer):
    """A server that tells the supervisor when it is ready, and stops when the supervisor is gone."""

    channels: Channels
    shares: Shares
    _acceptor: Acceptor | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup([])
        if self.started and sockets:
            self._acceptor = Acceptor(
                sockets[0], self._protocol, self.config.ssl, self.shares, self._connections
            )
            asyncio.get_running_loop().add_reader(self.channels.lifeline, self._orphaned)
            os.write(self.channels.ready, b"1")
            os.close(self.channels.ready)

    async def on_tick(self, counter: int) -> bool:
        """Do what every server does, and tell the siblings how many connections there are."""
        if self._acceptor is not None:
            self._acceptor.tell()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leave new connections to the others, and end as every server does."""
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _connections(self) -> int:
        return len(self.server_state.connections)

    def _orphaned(self) -> None:
        asyncio.get_running_loop().remove_reader(self.channels.lifeline)
        self.should_exit = True


def run(slot: Slot, channels: Channels) -> None:
    """Serve until SIGTERM.

    Parameters
    ----------
    slot
        The place of this process.
    channels
        To the supervisor.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    settings = Settings()
    listener = socket.socket(fileno=channels.listener)
    server = WorkerServer(server_config(settings, slot))
    server.channels = channels
    server.shares = Shares(slot.folder, slot.index, slot.count)
    serve_with(server, [listener])
