"""Limits of bodies, of one API key, and of what all requests together may hold at once, in this process."""

from __future__ import annotations

import math
import resource
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from boxcal.app.http.problems import ConcurrencyLimited, QueueFull, RateLimited, Unavailable

WINDOW_SECONDS = 60


class Limiter:
    """A bucket of `per_minute` requests that refills steadily, and a count of requests in progress.

    Used by the event loop only. The headers follow draft-ietf-httpapi-ratelimit-headers-10.

    `per_minute`, `concurrency`: None for no limit.
    """

    def __init__(self, per_minute: int | None, concurrency: int | None) -> None:
        self.limits = (per_minute, concurrency)
        self._quota = per_minute
        self._concurrency = concurrency
        self._left = float(per_minute or 0)
        self._filled = time.monotonic()
        self._in_progress = 0

    def enter(self) -> None:
        """Count a request that begins; call `leave` when it ends."""
        if self._concurrency is not None and self._in_progress >= self._concurrency:
            error = ConcurrencyLimited(
                f"The API key has {self._in_progress} requests in progress; the limit is {self._concurrency}."
            )
            error.headers["Retry-After"] = "1"
            raise error
        if self._quota is not None:
            now = time.monotonic()
            rate = self._quota / WINDOW_SECONDS
            self._left = min(float(self._quota), self._left + (now - self._filled) * rate)
            self._filled = now
            if self._left < 1.0:
                limited = RateLimited(
                    f"The API key may send {self._quota} requests per minute to each replica."
                )
                limited.headers["Retry-After"] = str(math.ceil((1.0 - self._left) / rate))
                limited.headers |= {name.decode(): value.decode() for name, value in self.headers()}
                raise limited
            self._left -= 1.0
        self._in_progress += 1

    def leave(self) -> None:
        self._in_progress -= 1

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell a client how many requests are left, and when all will be again."""
        if self._quota is None:
            return []
        full = math.ceil((self._quota - self._left) * WINDOW_SECONDS / self._quota)
        return [
            (b"ratelimit-policy", b'"key";q=%d;w=%d' % (self._quota, WINDOW_SECONDS)),
            (b"ratelimit", b'"key";r=%d;t=%d' % (int(self._left), full)),
        ]


def descriptor_limit() -> int:
    """Return how many files and connections this process may have open."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**20 if limit == resource.RLIM_INFINITY else limit


UNCOUNTED_BYTES = 256 * 1024
"""Of each body or message, which the budget of all does not count: large ones do not block small ones."""


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


class Shares:
    """Counts what clients hold open, such as event streams; used by the event loop only.

    What is open keeps a descriptor or memory as long as its client likes, so a client has a share of all.
    """

    def __init__(
        self, what: str, in_all: int, per_client: int, headers: Mapping[str, str] | None = None
    ) -> None:
        self._what = what
        self._in_all = in_all
        self._per_client = per_client
        self._headers = headers or {}
        self._open: Counter[str] = Counter()

    @contextmanager
    def holding(self, client: str) -> Iterator[None]:
        """Hold one for the duration of a block; refuse it if the client or all together have too many."""
        if self._open[client] >= self._per_client:
            raise ConcurrencyLimited(
                f"The client has {self._open[client]} {self._what} open; the limit is {self._per_client}.",
                headers=self._headers,
            )
        if self._open.total() >= self._in_all:
            refused = Unavailable(f"All {self._in_all} {self._what} of this process are in use.")
            refused.headers |= self._headers
            raise refused
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]
