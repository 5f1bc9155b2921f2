"""Connections to PostgreSQL whose waits are bounded."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.pq import TransactionStatus

from boxcal.app.registry.database import ANSWER_SECONDS


class BoundedConnection(psycopg.Connection[Any]):
    """A connection whose waits for the server are bounded, so that a server that hangs holds up no thread.

    Attributes
    ----------
    seconds
        The bound. A connection whose answer is overdue is closed.
    """

    seconds: float = ANSWER_SECONDS

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for the server as `psycopg.Connection.wait` does, at most `seconds`."""
        try:
            return super().wait(gen, interval, self.seconds if timeout is None else timeout)
        except psycopg.OperationalError:
            if self.info.transaction_status is TransactionStatus.ACTIVE:
                self.close()
            raise
