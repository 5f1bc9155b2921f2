"""Runs the application under uvicorn, and ends it without losing a request.

The certificate is loaded again when its files change, so that a renewal needs no restart.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
import ssl
import sys
import time
from pathlib import Path

import uvicorn

from boxcal.app.http.protocol import IDLE_SECONDS, LimitedProtocol
from boxcal.app.main import create_app
from boxcal.app.observability.logs import log_config
from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings
from boxcal.app.workers.table import Slot


class CertificateReloader:
    """Watches the files of a TLS context. New connections use a new certificate, open ones keep theirs."""

    def __init__(self, context: ssl.SSLContext, settings: Settings) -> None:
        self._context = context
        self._cert, self._key, self._client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
        self._loaded = self._failed = self._state()

    def check(self) -> None:
        """Load the files again if they have changed; files that do not belong together are logged once."""
        state = self._state()
        if state in (self._loaded, self._failed):
            return
        try:
            # A key that does not match leaves a context without a certificate: try another one first.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self._context)
        except (ssl.SSLError, OSError) as error:
            self._failed = state
            logger.error("The TLS certificate %s was not loaded again: %s", self._cert, error)
            return
        self._loaded = state
        logger.info("The TLS certificate %s was loaded again.", self._cert)

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(str(self._cert), str(self._key))
        if self._client_ca is not None:
            context.load_verify_locations(str(self._client_ca))

    def _state(self) -> list[tuple[int, int, int] | None]:
        files = (self._cert, self._key, self._client_ca)
        return [None if file is None else _stamp(file) for file in files]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced or written; None while it does not exist."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


logger = logging.getLogger("boxcal")

SWITCH_SECONDS = 0.001
LINGER_TURNS, TURN_SECONDS = 100, 0.02
"""How long open connections may still send a request once the service is told to stop.

Counted in turns of the event loop, each of which reads what has arrived: a machine so busy that seconds pass
between two turns closes no connection with an unread request.
"""
TICKS_PER_CHECK = 10
"""uvicorn calls `on_tick` ten times a second."""
STANDSTILL_SECONDS = 1.0
"""Between two ticks, as where the machine is paused: clients are not slow before what they sent is read."""
FAILED = 70
"""Exit status of a process that can no longer predict."""


def server_config(settings: Settings, slot: Slot | None = None) -> uvicorn.Config:
    """Configure uvicorn: its fast loop and parser, no log of requests, a shutdown that waits for requests."""
    return uvicorn.Config(
        create_app(settings, slot),
        host=settings.address,
        port=settings.port,
        uds=None if settings.uds is None else str(settings.uds),
        loop="uvloop",
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=log_config(settings),
        server_header=False,
        # Longer than clients and proxies keep idle connections, so that none is closed as a request arrives.
        timeout_keep_alive=round(IDLE_SECONDS),
        timeout_graceful_shutdown=max(1, round(limits.SHUTDOWN_SECONDS)),
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=str(settings.tls_client_ca) if settings.tls_client_ca else None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if settings.tls_client_ca else ssl.CERT_NONE,
    )


class Server(uvicorn.Server):
    """A server that refuses new connections once told to stop, but still answers requests on their way."""

    failed = False
    _certificate: CertificateReloader | None = None
    _is_check_due = False
    _ticked = math.inf

    async def on_tick(self, counter: int) -> bool:
        """Check slow clients and the TLS certificate, and say whether to stop."""
        now = time.monotonic()
        has_stood_still, self._ticked = now - self._ticked > STANDSTILL_SECONDS, now
        self._is_check_due = self._is_check_due or counter % TICKS_PER_CHECK == 0
        if self._is_check_due and not has_stood_still:
            self._is_check_due = False
            if self.config.ssl is not None:
                if self._certificate is None:
                    settings: Settings = self.lifespan.state["boxcal"].settings
                    self._certificate = CertificateReloader(self.config.ssl, settings)
                self._certificate.check()
            for connection in list(self.server_state.connections):
                if isinstance(connection, LimitedProtocol):
                    connection.check_progress(now)
        if self.lifespan.state["boxcal"].has_failed():
            self.failed = True
            return True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listeners, let open connections send their requests, then end as uvicorn does."""
        deadline = time.monotonic() + (self.config.timeout_graceful_shutdown or 0)
        self.lifespan.state["boxcal"].ending.set()
        for server in self.servers:
            server.close()
        close = (b"connection", b"close")
        self.server_state.default_headers = [*self.server_state.default_headers, close]
        # A request that waits for a fit or follows one would otherwise last until the limit.
        models = self.lifespan.state["boxcal"].models.values()
        await asyncio.gather(*(model.fit_jobs.close() for model in models))
        for model in models:
            model.monitor.close()
        for _ in range(LINGER_TURNS):
            if not self.server_state.connections or time.monotonic() > deadline:
                break
            await asyncio.sleep(TURN_SECONDS)
        self.config.timeout_graceful_shutdown = max(0, round(deadline - time.monotonic()))
        await super().shutdown(sockets)
        # The tasks that uvicorn has cancelled still answer their clients.
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks, timeout=1)


class ProcessServer(Server):
    """The server of a process that has no other purpose."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then exclude what exists by now from garbage collection, which may be off until then.

        It lives as long as the process, and walking over it would stop every thread for some 200 ms.
        """
        await super().startup(sockets)
        gc.freeze()
        gc.enable()


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; then finish the requests in progress and return."""
    # Without a socket, asyncio would take `::` for the addresses of IPv6 alone.
    sockets = [settings.listen(settings.port)] if settings.address == "::" else None
    serve_with(ProcessServer(server_config(settings)), sockets)


def serve_with(server: ProcessServer, sockets: list[socket.socket] | None = None) -> None:
    """Run a server, on sockets that are open already if there are any, as `serve`."""
    # How long the event loop waits for the interpreter while a thread that decodes or calibrates has it.
    sys.setswitchinterval(SWITCH_SECONDS)
    # uvicorn ends by raising the signal that stopped it once more; here that is no failure.
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: None)
    server.run(sockets)
    # Triton, which torch imports, reports at exit what it has not got back; to collect all takes .5 seconds.
    if "triton" in sys.modules:
        gc.unfreeze()
    if server.failed:
        logger.critical("the service could no longer predict and has stopped")
        sys.exit(FAILED)
