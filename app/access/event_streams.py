"""Limits event streams: each keeps a connection, and with it a descriptor, as long as its client likes."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request

from boxcal.app.http.admission import TICKET
from boxcal.app.http.limits import Shares, descriptor_limit

LARGEST = 1024
"""Streams in all, however many descriptors there are; a client may have a quarter of all streams."""
CLOSE = {"Connection": "close", "Retry-After": "10"}
"""A refused client must not keep the descriptor either."""


def event_streams(descriptors: int | None = None) -> Shares:
    """Return the count of the event streams of this process."""
    in_all = min(LARGEST, (descriptors or descriptor_limit()) // 4)
    return Shares("event streams", in_all, in_all // 4, CLOSE)


async def count_event_stream(request: Request) -> AsyncIterator[None]:
    """Count the event stream of a request until its response has ended; a dependency of its route."""
    streams: Shares = request.scope["state"]["boxcal"].event_streams
    with streams.holding(request.scope[TICKET].client):
        yield
