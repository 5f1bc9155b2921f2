"""When the database of the registry last answered; logs each change, and only changes."""

from __future__ import annotations

import logging
import threading
import time

logger = logging.getLogger("boxcal")

GAP_SECONDS = 10.0


class Contact:
    """Whether a database answers; its methods may be called from any thread.

    Parameters
    ----------
    name
        Names the database in the log.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._answered = self._steady_from = time.monotonic()
        self._failed = 0.0
        self._is_lost = False

    def made(self) -> None:
        """Record that the database answered."""
        with self._lock:
            now = time.monotonic()
            silence, was_lost, self._is_lost = now - self._answered, self._is_lost, False
            if was_lost or silence > GAP_SECONDS:
                self._steady_from = now
            self._answered = now
        if was_lost:
            logger.warning("The registry at %s answers again after %.0f s.", self._name, silence)

    def lost(self, reason: str) -> None:
        """Record that the database did not answer."""
        with self._lock:
            was_lost, self._is_lost = self._is_lost, True
            self._failed = time.monotonic()
        if not was_lost:
            logger.warning("The registry at %s does not answer: %s", self._name, reason)

    def failed_after(self, moment: float) -> bool:
        """Whether the database is lost, and failed to answer after a moment of `time.monotonic`."""
        return self._is_lost and self._failed > moment

    def silence(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._answered

    def steady(self) -> float:
        """Seconds over which the database has answered again and again, without a gap."""
        return self._answered - self._steady_from
