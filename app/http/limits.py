"""Limits of one API key: requests per minute and requests in progress, in this process."""

from __future__ import annotations

import math
import time

from boxcal.app.http.problems import ConcurrencyLimited, RateLimited

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
