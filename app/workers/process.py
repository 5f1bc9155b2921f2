"""The program of one serving process: it accepts from the socket that the supervisor opened for all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from boxcal.app.cli.quick_start import prepare
from boxcal.app.workers.table import CLOSED, ProcessTable, Slot, take_share_of_cores

if TYPE_CHECKING:
    import uvicorn

PAUSE_SECONDS = 0.001
LONGEST_SECONDS = 0.02
"""How long a connection is left to a process that has fewer, which may be busy."""


class Acceptor:
    """Accepts connections one at a time, and leaves them to a process that has fewer.

    An event loop that accepts whatever has arrived gives most connections of a burst to one process: of 16
    connections, the other process got none in a third of the bursts.
    """

    def __init__(
        self, listener: socket.socket, server: uvicorn.Server, table: ProcessTable, row: int
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener, self._server = listener, server
        self._table, self._row = table, row
        self._opening: set[asyncio.Task[None]] = set()
        self._waiting_since: float | None = None
        self._is_closed = False
        listener.setblocking(False)
        self._resume()

    def beat(self) -> None:
        """Write that the event loop runs, and the number of connections."""
        connections = len(self._server.server_state.connections) + len(self._opening)
        self._table.write(self._row, CLOSED if self._is_closed else connections)

    async def close(self) -> None:
        """Accept what has arrived, then close the socket; after the last process, connections are refused."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._listener.fileno())
            while self._accept():
                pass
            self._listener.close()
            self.beat()
            await asyncio.gather(*self._opening)

    def _resume(self) -> None:
        if not self._is_closed:
            self.beat()
            self._loop.add_reader(self._listener.fileno(), self._accept_or_wait)

    def _accept_or_wait(self) -> None:
        connections = len(self._server.server_state.connections) + len(self._opening)
        if self._table.fewest_connections(self._row) < connections:
            now = time.monotonic()
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
            if now - self._waiting_since < LONGEST_SECONDS:
                self._loop.remove_reader(self._listener.fileno())
                self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
        self._waiting_since = None
        self._accept()
        self.beat()

    def _accept(self) -> bool:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # another process was faster, or the client has gone
            return False
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opening = self._loop.create_task(self._open(accepted))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        return True

    async def _open(self, accepted: socket.socket) -> None:
        config = self._server.config
        try:
            await self._loop.connect_accepted_socket(self._protocol, accepted, ssl=config.ssl)
        except OSError:  # the client has gone, or the TLS handshake failed
            accepted.close()

    def _protocol(self) -> asyncio.Protocol:
        make: Any = self._server.config.http_protocol_class
        state = self._server.server_state
        protocol: asyncio.Protocol = make(
            config=self._server.config, server_state=state, app_state=self._server.lifespan.state
        )
        return protocol


def main() -> None:
    """Serve until SIGTERM: `process.py INDEX COUNT ROW LISTENER SUPERVISOR FOLDER`."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    index, count, row, listener, supervisor = map(int, sys.argv[1:6])
    folder = Path(sys.argv[6])
    cores = take_share_of_cores(index, count)
    prepare()
    from boxcal.app.server import ProcessServer, serve_with, server_config  # noqa: PLC0415 - starts threads
    from boxcal.app.settings.service import Settings  # noqa: PLC0415 - not before `prepare`

    class WorkerServer(ProcessServer):
        """A server with a heartbeat, which ends when the supervisor is gone."""

        acceptor: Acceptor | None = None

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup([])
            if self.started and sockets:
                self.acceptor = Acceptor(sockets[0], self, ProcessTable(folder, count), row)

        async def on_tick(self, counter: int) -> bool:
            if self.acceptor is not None:
                self.acceptor.beat()
            if os.getppid() != supervisor:
                self.should_exit = True
            return await super().on_tick(counter)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            if self.acceptor is not None:
                await self.acceptor.close()
            await super().shutdown(sockets)

    slot = Slot(index, count, row, folder, cores)
    serve_with(WorkerServer(server_config(Settings(), slot)), [socket.socket(fileno=listener)])


if __name__ == "__main__":
    main()
