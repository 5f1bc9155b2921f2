"""A limit on what all requests together may hold at once, such as bytes of bodies."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

from boxcal.app.http.problems import QueueFull


def descriptor_limit() -> int:
    """Return how many files and connections this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if limit == resource.RLIM_INFINITY else limit


class Budget:
    """Counts what requests under way hold; used on the event loop alone."""

    def __init__(self, what: str, limit: int) -> None:
        self._what = what
        self.limit = limit
        self.held = 0

    def add(self, amount: int) -> None:
        if self.held + amount > self.limit:
            raise QueueFull(
                f"Requests under way hold {self.held:,} {self._what}; {amount:,} more would exceed the limit "
                f"of {self.limit:,}."
            )
        self.held += amount

    def release(self, amount: int) -> None:
        self.held -= amount

    @contextmanager
    def holding(self, amount: int) -> Iterator[None]:
        """Hold an amount for the duration of a block; raises what `add` does."""
        self.add(amount)
        try:
            yield
        finally:
            self.release(amount)
