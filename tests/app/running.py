"""A real service for tests: uvicorn with its own event loop in a thread, on a free port of the loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from boxcal.app.server import Server, server_config
from boxcal.app.settings.service import Settings
from boxcal.app.state import State
from boxcal.calibrators.temperature_fast_path import warm_arrays
from tests.pauses import PAUSES

JSON = {"content-type": "application/json"}
NPY = {"content-type": "application/x-npy"}
PNG = {"content-type": "image/png"}


@dataclass(frozen=True)
class Service:
    url: str
    server: Server

    @property
    def state(self) -> State:
        state: State = self.server.lifespan.state["boxcal"]
        return state


@contextmanager
def running(data_dir: Path, **settings: Any) -> Iterator[Service]:
    """Run a service for as long as the block lasts; settings by the names of their fields."""
    server = Server(server_config(Settings(data_dir=data_dir, port=0, **settings)))
    with listening(server) as port:
        yield Service(f"http://127.0.0.1:{port}", server)


@contextmanager
def listening(server: uvicorn.Server) -> Iterator[int]:
    """Run a server in a thread for as long as the block lasts; gives its port."""
    warm_arrays()  # as `boxcal serve` does: the event loop does not compile
    thread = threading.Thread(target=server.run)
    try:
        with PAUSES.watched(server):
            thread.start()
            while not server.started:
                assert thread.is_alive(), "the service did not start"
                time.sleep(0.01)
            port: int = server.servers[0].sockets[0].getsockname()[1]
            yield port
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the service did not end"
