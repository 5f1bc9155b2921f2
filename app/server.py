"""Runs the application under uvicorn, configured in this one place, and ends it without losing a request."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys

import uvicorn

from boxcal.app.main import create_app
from boxcal.app.protocol import WholeAnswers
from boxcal.app.settings import Settings

SWITCH_SECONDS = 0.001
KEEP_ALIVE_SECONDS = 75
"""Longer than clients and proxies keep idle connections, so none is closed just as it brings a request."""
LINGER_TURNS, TURN_SECONDS = 100, 0.02
"""How long open connections may still bring a request once the service is told to stop.

Counted in turns of the event loop, each of which reads what has come: a machine so busy that seconds pass
between two turns closes no connection whose request lies unread.
"""


def server_config(settings: Settings) -> uvicorn.Config:
    """Configure uvicorn: its fast loop and parser, no log of requests, an end that waits for the work."""
    return uvicorn.Config(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=WholeAnswers,
        ws="none",
        lifespan="on",
        access_log=False,
        log_level="info",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, round(settings.shutdown_seconds)),
    )


class Server(uvicorn.Server):
    """A server that, told to stop, refuses new connections but still answers requests on their way."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listeners, let open connections bring what they have sent, then end as uvicorn does."""
        for server in self.servers:
            server.close()
        close = (b"connection", b"close")
        self.server_state.default_headers = [*self.server_state.default_headers, close]
        # Those who wait for a fit or follow one would otherwise hold the end up until its limit.
        await self.lifespan.state["boxcal"].fit_jobs.close()
        for _ in range(LINGER_TURNS):
            if not self.server_state.connections:
                break
            await asyncio.sleep(TURN_SECONDS)
        await super().shutdown(sockets)


class ProcessServer(Server):
    """The server of a process that has no other purpose."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then take all that the start has made out of the collection of garbage for good.

        It lives as long as the process does, and walking over it would hold every thread up for some 200 ms.
        """
        await super().startup(sockets)
        gc.freeze()


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; then finish the work in progress and return."""
    # How long the event loop waits for the interpreter while a thread that decodes or calibrates holds it.
    sys.setswitchinterval(SWITCH_SECONDS)
    server = ProcessServer(server_config(settings))
    # uvicorn ends by raising the signal that stopped it once more; here that is no failure.
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: None)
    server.run()
    # Libraries report at the end what the collection of garbage has not brought back to them.
    gc.unfreeze()
