"""Limits event streams: each keeps a connection, and with it a descriptor, as long as its client likes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator

from starlette.requests import Request

from boxcal.app.access.access import LoadedKey
from boxcal.app.http.dependencies import SCOPE_KEY, address_of
from boxcal.app.http.limits import descriptor_limit
from boxcal.app.http.problems import ConcurrencyLimited, Unavailable

LARGEST = 1024
"""Streams in all, however many descriptors there are; a client may have a quarter of all streams."""
RETRY_SECONDS = 10
CLOSE = {"Connection": "close", "Retry-After": str(RETRY_SECONDS)}
"""A refused client must not keep the descriptor either."""


class EventStreams:
    """Counts the event streams of this process; used by the event loop only."""

    def __init__(self, descriptors: int | None = None) -> None:
        self._in_all = min(LARGEST, (descriptors or descriptor_limit()) // 4)
        self._per_client = self._in_all // 4
        self._open: Counter[str] = Counter()

    def enter(self, client: str) -> None:
        """Count a stream that begins; call `leave` when it ends."""
        if self._open[client] >= self._per_client:
            raise ConcurrencyLimited(
                f"The client has {self._open[client]} event streams open; the limit is {self._per_client}.",
                headers=CLOSE,
            )
        if self._open.total() >= self._in_all:
            refused = Unavailable(f"All {self._in_all} event streams of this process are in use.")
            refused.headers |= CLOSE
            raise refused
        self._open[client] += 1

    def leave(self, client: str) -> None:
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]


async def count_event_stream(request: Request) -> AsyncIterator[None]:
    """Count the event stream of a request until its response has ended; a dependency of its route."""
    streams: EventStreams = request.scope["state"]["boxcal"].event_streams
    key: LoadedKey | None = request.scope.get(SCOPE_KEY)
    address = address_of(request)
    client = address if key is None else key.record.id
    streams.enter(client)
    try:
        yield
    finally:
        streams.leave(client)
