"""TLS: loads the certificate again when its files change, so that a renewal needs no restart."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from boxcal.app.settings.service import Settings

logger = logging.getLogger("boxcal")


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
