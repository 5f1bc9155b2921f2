"""Admits the requests of every protocol: key and scope, rate, and a ticket that charges what they hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Protocol, TypeVar

from starlette.requests import Request

from boxcal.app.http.limits import UNCOUNTED_BYTES, Budget, Shares, descriptor_limit
from boxcal.app.http.problems import BoxcalError, InvalidApiKey, QueueFull
from boxcal.app.http.scopes import Level, Requirement
from boxcal.app.settings import limits

TICKET = "boxcal.ticket"
"""Under this name a request's ASGI scope has its ticket."""
MOST_STREAMS = 1024
"""Event streams in all, however many descriptors there are; a client may have a quarter of all streams."""
VALID_SECONDS = 1.0
"""How often a stream without events asks whether its key is still valid."""
CLOSE = {"Connection": "close", "Retry-After": "10"}
"""A client whose stream is refused must not keep the descriptor either."""


T = TypeVar("T")


class KeyCheck(Protocol):
    """The keys of the service, as requests are checked against them."""

    is_required: bool
    """Whether requests need a key."""

    def admit(self, headers: list[tuple[bytes, bytes]], requirement: Requirement) -> Any:
        """Return the key of a request that may pass, or raise the problem that refuses it."""

    def holds(self, key: Any) -> bool:
        """Whether a key, or None of a request without one, would still be admitted."""

    def guessed(self, address: str) -> float:
        """Note a wrong key, and return how long its answer waits."""


def address_of(host: str) -> str:
    """Return the address that a host is; empty where a proxy names something else."""
    try:
        return str(ip_address(host))
    except ValueError:
        return ""


class Ticket:
    """Whom a request counts for, and what it holds until the block ends.

    `key`: None where none is required.
    """

    __slots__ = ("_admission", "_at_end", "_held", "_host", "key")

    def __init__(self, admission: Admission, host: str, key: Any) -> None:
        self._admission = admission
        self._host = host
        self._held = 0
        self._at_end: list[Callable[..., object]] = []
        self.key = key

    @property
    def address(self) -> str:
        return address_of(self._host)

    @property
    def client(self) -> str:
        """The id of the key, or the address."""
        return self.address if self.key is None else self.key.record.id

    def rate(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that tell what is left of the rate."""
        return [] if self.key is None or self.key.limiter is None else self.key.limiter.headers()

    def charge(self, size: int) -> None:
        """Count the bytes that have arrived so far of a body or message; raises what the budget does."""
        more = size - UNCOUNTED_BYTES - self._held
        if more > 0:
            self._admission.bodies.add(more)
            self._held += more

    def answer(self, size: int, at_end: Callable[..., object] | None = None) -> None:
        """Count an answer; of all those that are not read, a client leaves half.

        An answer may be larger if there is no other. `at_end`: takes what to call once the answer is read, if
        that is not at the end of the block.
        """
        answers, unread, client = self._admission.answers, self._admission.unread, self.client
        if unread[client] and unread[client] + size > answers.limit // 2:
            raise QueueFull(f"The client has not read {unread[client]:,} bytes of earlier answers.")
        counted = size if answers.held else min(size, answers.limit)
        answers.add(counted)
        unread[client] += size

        def read(*_: object) -> None:
            answers.release(counted)
            unread[client] -= size
            if not unread[client]:
                del unread[client]

        (at_end or self._at_end.append)(read)

    @property
    def is_valid(self) -> bool:
        """Whether the key has not been revoked and has not expired since."""
        return self._admission.access.holds(self.key)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._held:
            self._admission.bodies.release(self._held)
        for call in self._at_end:
            call()
        if self.key is not None and self.key.limiter is not None:
            self.key.limiter.leave()


class Admission:
    """Gives each request its ticket; used by the event loop alone.

    `bodies`, `answers`: count the bytes of those that are under way, of all protocols. `unread`: the bytes of
    answers by client.
    """

    def __init__(self, access: KeyCheck) -> None:
        self.access = access
        self.bodies = Budget("bytes of bodies", 8 * limits.MAX_BODY_BYTES)
        self.answers = Budget("bytes of answers", 8 * limits.MAX_BODY_BYTES)
        self.unread: Counter[str] = Counter()

    async def enter(self, headers: list[tuple[bytes, bytes]], requirement: Requirement, host: str) -> Ticket:
        """Return the ticket of a request, a context manager; a wrong key waits for its refusal."""
        key = None
        if self.access.is_required and requirement is not Level.OPEN:
            try:
                key = self.access.admit(headers, requirement)
            except BoxcalError as error:
                if error.kind is InvalidApiKey:
                    await asyncio.sleep(self.access.guessed(address_of(host)))
                raise
        return Ticket(self, host, key)


def event_streams(descriptors: int | None = None) -> Shares:
    """Return the count of event streams, which keep a connection as long as their clients like."""
    in_all = min(MOST_STREAMS, (descriptors or descriptor_limit()) // 4)
    return Shares("event streams", in_all, in_all // 4, CLOSE)


async def count_event_stream(request: Request) -> AsyncIterator[None]:
    """Count the event stream of a request until its response has ended; a dependency of its route."""
    streams: Shares = request.scope["state"]["boxcal"].event_streams
    with streams.holding(request.scope[TICKET].client):
        yield


async def while_valid(request: Request, events: AsyncGenerator[T]) -> AsyncIterator[T]:
    """Pass on the events of a stream until its end, or until the key of its request is revoked or expires."""
    ticket: Ticket = request.scope[TICKET]
    async with aclosing(events):
        while True:
            following = asyncio.ensure_future(anext(events, None))
            try:
                while not following.done() and ticket.is_valid:
                    await asyncio.wait([following], timeout=VALID_SECONDS)
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait([following])
            if not ticket.is_valid or (event := following.result()) is None:
                return
            yield event
