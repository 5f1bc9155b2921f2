"""Admits gRPC calls before their messages are received, limits the messages, and waits for readers.

Connections of clients that do not read are closed here, for which gRPC has no call.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from http import HTTPStatus
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from types import coroutine
from typing import Any
from urllib.parse import unquote

import grpc
import numpy as np
from grpc_health.v1 import health

from boxcal.app.http.admission import Admission, Ticket
from boxcal.app.http.limits import UNCOUNTED_BYTES, Shares
from boxcal.app.http.problem_documents import CLIENT_CLOSED
from boxcal.app.http.problems import (
    DEFECTS,
    BodyTooLarge,
    BoxcalError,
    DeadlineExceeded,
    InvalidParameter,
    MalformedBody,
)
from boxcal.app.http.protocol import STALL_SECONDS
from boxcal.app.http.scopes import RPCS, UNKNOWN, Level
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.predict.bodies import MOST_GROWTH, unblocked
from boxcal.app.predict.pipeline import within
from boxcal.app.protocols.grpc import inference_pb2
from boxcal.app.settings import limits

logger = logging.getLogger("boxcal")

SERVICE: str = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
STATUS = {
    HTTPStatus.BAD_REQUEST: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNPROCESSABLE_ENTITY: grpc.StatusCode.INVALID_ARGUMENT,
    HTTPStatus.UNAUTHORIZED: grpc.StatusCode.UNAUTHENTICATED,
    HTTPStatus.FORBIDDEN: grpc.StatusCode.PERMISSION_DENIED,
    HTTPStatus.TOO_MANY_REQUESTS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.NOT_FOUND: grpc.StatusCode.NOT_FOUND,
    HTTPStatus.CONFLICT: grpc.StatusCode.FAILED_PRECONDITION,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    HTTPStatus.SERVICE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT: grpc.StatusCode.DEADLINE_EXCEEDED,
}
MAX_FIELDS = 4000
"""Inputs, outputs, parameters and raw contents of one message, and the fields of each input and output."""
COUNTED = ((5,), (6,), (5, 5))
"""The fields `inputs` and `outputs` of a request, and the typed contents of an input."""
UNPARSED = ((7,), (5, 5, 8))
"""Raw contents and typed `BYTES`: all else, numbers for the most part, becomes larger when it is parsed."""
WIDTHS = {(5, 5, 6): 4, (5, 5, 7): 8}
"""Bytes of each number of typed `FP32` and `FP64`; of other numbers, the last byte alone is below 128."""
PARSED_BYTES = 32
"""Of a number: 8 in the message, which doubles as it grows, and 8 in an array."""
QUICK_SECONDS = 0.1
RECEIVE_SECONDS = 20.0
OPEN_SECONDS = 2.0
"""To receive the message of a call that needs no key: these have a few bytes."""
SLOW_MESSAGES = 8
"""Messages of one client that may take longer than `QUICK_SECONDS` to arrive; of all, twice as many."""
TOLD_SECONDS = 0.2
"""For the last answer of a health watch."""
WATCHES, REFLECTIONS, REFLECTION_SECONDS = 256, 32, 30.0
"""Streams of each kind, a quarter of them of one client."""
QUICK_COPY, COPIED_AT_ONCE = 2**16, 2**20
"""Bytes of a message that gRPC copies on the event loop without being counted, and of those that are, after
which the next waits for the next iteration of the loop: 16 MiB of an answer take 15 to 20 ms."""
SHARES_SECONDS = 1.0
"""Time between two looks at the connections of each address."""
READ_BYTES = 2**20
"""A client reads so many bytes of an answer a second, beyond the first `STALL_SECONDS`."""


def check_size(method: str, data: bytes) -> None:
    most = RPCS.get(method, UNKNOWN).most_bytes
    if most is not None and len(data) > most:
        raise BodyTooLarge(f"The message has {len(data):,} bytes; the limit is {most:,}.")


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Has calls admitted before their messages are received, and receives, parses and answers these.

    gRPC receives and deserialises the message of a unary call before it calls the handler. So unary calls
    are served as streams of one message, which are received on demand: nothing is received for a call that
    is refused. The key is in the metadata.
    """

    def __init__(self, admission: Admission, telemetry: Telemetry, ending: asyncio.Event) -> None:
        self._admission = admission
        self._telemetry = telemetry
        self._ending = ending
        self._slow = Shares("unfinished messages", 2 * SLOW_MESSAGES, SLOW_MESSAGES)
        self._open = Shares("unfinished messages without a key", 4 * SLOW_MESSAGES, SLOW_MESSAGES)
        self._watches = Shares("watches", WATCHES, WATCHES // 4)
        self._reflections = Shares("reflections", REFLECTIONS, REFLECTIONS // 4)
        self.readers = Readers()
        self._copies = Copies()

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        """Return the handler of a call."""
        handler = await continuation(details)
        if handler is None:
            return None
        if handler.response_streaming:
            return self._streaming(handler, details)
        is_open = RPCS.get(details.method, UNKNOWN).requirement is Level.OPEN

        async def answer(context: Any, peer: str, ticket: Ticket) -> Any:
            data = await self._received(context, ticket, is_open=is_open)
            check_size(details.method, data)
            size = measured(data)
            ticket.charge(size)
            copied = len(data)  # raw contents, for the most part
            request = await unblocked(
                size - copied, _parsed, handler.request_deserializer, data, copied=copied
            )
            del data
            response = await handler.unary_unary(request, context)
            del request
            size = response.ByteSize()
            self.readers.expect(context, peer, STALL_SECONDS + size / READ_BYTES)
            if size > UNCOUNTED_BYTES:
                ticket.answer(size, context.add_done_callback)
            written = await unblocked(0, handler.response_serializer, response, copied=size)
            if size > QUICK_COPY:
                await self._copies.turn(size)
            return written

        async def handle(_: Any, context: Any) -> bytes:
            written: bytes = await self._admitted(details, context, answer)
            return written

        return grpc.stream_unary_rpc_method_handler(handle)

    def _streaming(self, handler: Any, details: Any) -> Any:
        """Admit a call that is answered by a stream: the health watch and reflection."""
        if not handler.request_streaming:
            serve, make = handler.unary_stream, grpc.unary_stream_rpc_method_handler
        else:
            serve, make = handler.stream_stream, grpc.stream_stream_rpc_method_handler

        async def respond(requests: Any, context: Any) -> None:
            responses = serve(requests, context)
            if inspect.iscoroutine(responses):  # it writes to the context itself
                await responses
                return
            async for response in responses:
                await context.write(response)

        def read(data: bytes) -> Any:
            check_size(details.method, data)
            measured(data)
            return _parsed(handler.request_deserializer, data)

        async def each(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in messages:
                yield read(data)

        async def handle(sent: Any, context: Any) -> None:
            async def answer(context: Any, _: str, ticket: Ticket) -> None:
                requests = each(sent) if handler.request_streaming else read(sent)
                if details.method.startswith(f"/{health.SERVICE_NAME}/"):
                    with self._watches.holding(ticket.client):
                        await self._until_the_end(respond(requests, context))
                else:
                    with self._reflections.holding(ticket.client):
                        await within(REFLECTION_SECONDS, respond(requests, context))

            await self._admitted(details, context, answer, is_watch=True)

        return make(handle, None, handler.response_serializer)

    async def _until_the_end(self, watch: Coroutine[Any, Any, None]) -> None:
        """Run a watch, which would keep the service from ending, until its client has heard of the end."""
        watching, ending = asyncio.create_task(watch), asyncio.create_task(self._ending.wait())
        try:
            await asyncio.wait({watching, ending}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({watching}, timeout=TOLD_SECONDS)
        finally:
            ending.cancel()
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching

    async def _admitted(
        self,
        details: Any,
        context: Any,
        answer: Callable[[Any, str, Ticket], Awaitable[Any]],
        *,
        is_watch: bool = False,
    ) -> Any:
        """Answer a call that is admitted and count it; turn errors into status codes with their detail."""
        began, status = time.perf_counter(), int(HTTPStatus.OK)
        peer = context.peer()  # not asked for later: it would end the process if the call were over
        headers = [
            (name.encode(), value if isinstance(value, bytes) else value.encode())
            for name, value in details.invocation_metadata
        ]
        requirement = RPCS.get(details.method, UNKNOWN).requirement
        try:
            with await self._admission.enter(headers, requirement, host_and_port(peer)[0]) as ticket:
                return await answer(context, peer, ticket)
        except BoxcalError as error:
            status = error.status
            self._telemetry.rejected(error.reason)
            if error.kind in DEFECTS:
                logger.error("gRPC failed: %s", error)
            code = STATUS.get(HTTPStatus(error.status), grpc.StatusCode.INTERNAL)
            self.readers.expect(context, peer, STALL_SECONDS)  # a stream may have answers before the error
            await context.abort(code, error.detail)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            status = CLIENT_CLOSED
            raise
        except Exception as error:
            status = int(HTTPStatus.INTERNAL_SERVER_ERROR)
            logger.error("gRPC failed", exc_info=error)
            await context.abort(grpc.StatusCode.INTERNAL, "Internal error; see the server log.")
        finally:
            if not is_watch:
                self._telemetry.request(details.method, status, time.perf_counter() - began)

    async def _received(self, context: Any, ticket: Ticket, *, is_open: bool) -> bytes:
        """Receive the message of a call; few calls at once may take longer than a moment to send it."""
        shares, seconds = (self._open, OPEN_SECONDS) if is_open else (self._slow, RECEIVE_SECONDS)
        loop = asyncio.get_running_loop()
        reading: Any = asyncio.current_task()
        held, refusals = ExitStack(), list[BoxcalError]()

        def refuse(error: BoxcalError) -> None:
            refusals.append(error)
            reading.cancel()

        def note_slow() -> None:
            try:
                held.enter_context(shares.holding(ticket.client))
            except BoxcalError as error:
                refuse(error)
                return
            late = DeadlineExceeded(f"The message was not received within {seconds:g} seconds.")
            held.callback(loop.call_later(seconds, refuse, late).cancel)

        timer = loop.call_later(QUICK_SECONDS, note_slow)  # a task and two waits cost 15 us more
        try:
            data = await self._copies.received(context.read())
        except asyncio.CancelledError:
            if refusals and not reading.uncancel():
                raise refusals[0] from None
            raise
        finally:
            timer.cancel()
            held.close()
        if not isinstance(data, bytes):
            raise MalformedBody("The call has no message.")
        return data


class Copies:
    """Spreads the copies of messages over iterations of the event loop, on which gRPC makes them.

    It copies a message when the loop resumes who waits for it, and an answer when its handler returns: of 24
    that became ready in one iteration, it would copy all before anything else runs.
    """

    def __init__(self) -> None:
        self._bytes = 0  # in this iteration

    def _count(self, size: int) -> None:
        if size > QUICK_COPY:
            if not self._bytes:
                asyncio.get_running_loop().call_soon(self._forget)
            self._bytes += size

    def _forget(self) -> None:
        self._bytes = 0

    async def turn(self, size: int) -> None:
        """Wait until an answer may be copied, which happens before the caller waits again."""
        while self._bytes >= COPIED_AT_ONCE:  # noqa: ASYNC110 - mostly for one iteration
            await asyncio.sleep(0)
        self._count(size)

    @coroutine
    def received(self, reading: Coroutine[Any, Any, Any]) -> Generator[Any, None, Any]:
        """Do what `await reading` does, but resume it only when its message may be copied."""
        step = partial(reading.send, None)
        while True:
            try:
                waited = step()
            except StopIteration as end:
                if isinstance(end.value, bytes):
                    self._count(len(end.value))
                return end.value
            try:
                yield waited
                while self._bytes >= COPIED_AT_ONCE:
                    yield
                step = partial(reading.send, None)
            except BaseException as error:
                step = partial(reading.throw, error)


class Readers:
    """Disconnects clients that do not read their answers: gRPC waits for them without a limit.

    Until then such a client holds the answer, and its place among the calls in progress. Calls are counted by
    the second in which they are due: a timer for each costs a small call two per cent.
    """

    def __init__(self) -> None:
        self.port = 0  # On which gRPC listens
        self._due: dict[int, Counter[str]] = {}

    def expect(self, context: Any, peer: str, seconds: float) -> None:
        """Disconnect the client of a call unless it is over in time, or at most a second later."""
        loop = asyncio.get_running_loop()
        second = math.ceil(loop.time() + seconds)
        unread = self._due.get(second)
        if unread is None:
            unread = self._due[second] = Counter()
            loop.call_at(second, self._disconnect, second)
        unread[peer] += 1

        def is_over(_: Any) -> None:
            unread[peer] -= 1

        context.add_done_callback(is_over)

    def _disconnect(self, second: int) -> None:
        late = {peer for peer, calls in self._due.pop(second).items() if calls}
        if late:
            names = ", ".join(sorted(late))
            logger.warning("gRPC: disconnecting who did not read answers (%d): %.200s", len(late), names)
            asyncio.get_running_loop().run_in_executor(None, close_connections, late, self.port)


def close_connections(peers: Collection[str], port: int) -> None:
    """Close the connections of peers such as `ipv4:127.0.0.1:50000` to a port; gRPC then ends their calls.

    A connection to another port of this process may have the same address at its other end.
    """
    addresses = {host_and_port(peer) for peer in peers}
    for one in _connections():
        if one.getsockname()[1] == port and _address(one) in addresses:
            one.shutdown(socket.SHUT_RDWR)


def close_beyond(share: int, port: int) -> Counter[str]:
    """Close what an address has opened to a port beyond its share of the connections; return how many."""
    held, closed = Counter[str](), Counter[str]()
    for one in _connections():
        if one.getsockname()[1] == port:
            host = _address(one)[0]
            held[host] += 1
            if held[host] > share:
                one.shutdown(socket.SHUT_RDWR)
                closed[host] += 1
    return closed


async def keep_shares(most: int, port: int) -> None:
    """Leave half of the connections that gRPC takes to other addresses, for which it has no option."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(SHARES_SECONDS)
        if len(os.listdir("/dev/fd")) <= most // 2:  # noqa: PTH208 - names alone
            continue
        for host, count in (await loop.run_in_executor(None, close_beyond, most // 2, port)).items():
            logger.warning(
                "gRPC: closed %d connections of %s, beyond its share of %d", count, host, most // 2
            )


def _connections() -> Iterator[socket.socket]:
    """Give the TCP connections of this process, found among its open files.

    A duplicate of a descriptor names the same connection, also where gRPC closes its own meanwhile.
    """
    for file in Path("/dev/fd").iterdir():
        with suppress(OSError):
            descriptor = os.dup(int(file.name))
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                continue
            with socket.socket(fileno=descriptor) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    one.getpeername()  # fails where there is no other end
                    yield one


def host_and_port(peer: str) -> tuple[str, str]:
    """Return the host and the port of a peer."""
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    return host.strip("[]"), port


def _address(one: socket.socket) -> tuple[str, str]:
    """Return the address of the other end, as gRPC writes it."""
    host, port, *_ = one.getpeername()
    parsed = ip_address(host)
    if isinstance(parsed, IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    return str(parsed), str(port)


def measured(data: bytes) -> int:
    """Check what the fields of a message cost, and return how many bytes it takes once parsed.

    A field has two bytes or more, and becomes an object.
    """
    if len(data) <= 2 * MAX_FIELDS:
        return len(data)
    fields, parsed, numbers = count(data)
    if fields > MAX_FIELDS:
        raise InvalidParameter(f"The message has more than {MAX_FIELDS:,} inputs, outputs and parameters.")
    if fields < 0:
        raise MalformedBody("The message cannot be parsed: a field ends behind its end.")
    taken = len(data) + PARSED_BYTES * numbers
    for what, found, most in (
        ("bytes of typed contents and names", parsed, limits.MAX_JSON_BYTES),
        ("bytes of memory for typed numbers", taken, MOST_GROWTH * max(len(data), UNCOUNTED_BYTES)),
    ):
        if found > most:
            raise BodyTooLarge(
                f"The message has {found:,} {what}; the limit is {most:,}. Send more as raw contents."
            )
    return taken


def _parsed(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return deserialize(data)
    except Exception as error:  # protobuf raises several types
        raise MalformedBody(f"The message cannot be parsed: {error!s:.100}.") from error


def count(
    data: bytes | memoryview, limit: int = MAX_FIELDS, path: tuple[int, ...] = ()
) -> tuple[int, int, int]:
    """Count fields, up to more than `limit`, the bytes that are parsed, and the numbers in these, at most.

    A field is a tag, whose three lowest bits are the wire type, and a value. `path`: numbers of the fields in
    which this message is. The first count is -1 if a field ends behind the data.
    """
    data = memoryview(data)
    position = fields = parsed = numbers = 0
    while position < len(data) and fields <= limit:
        tag, position = _varint(data, position)
        kind = tag & 7
        if kind == 0:
            _, position = _varint(data, position)
        elif kind == 2:
            length, position = _varint(data, position)
            start, position = position, position + length
            inner = (*path, tag >> 3)
            if inner in COUNTED and position <= len(data):
                more, bytes_in_it, numbers_in_it = count(data[start:position], limit - fields, inner)
                if more < 0:
                    return -1, parsed, numbers
                fields += more
                parsed += bytes_in_it
                numbers += numbers_in_it
            elif inner not in UNPARSED:
                parsed += length
                if inner in WIDTHS:
                    numbers += length // WIDTHS[inner]
                else:
                    numbers += int(np.count_nonzero(np.frombuffer(data[start:position], np.int8) >= 0))
        else:
            position += {1: 8, 5: 4}.get(kind, len(data))
        fields += 1
    return (fields if position <= len(data) else -1), parsed, numbers


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Read a number of 7 bits a byte, least first, in 10 bytes at most, and return the position behind it."""
    if position < len(data) and (value := data[position]) < 128:
        return value, position + 1
    value = 0
    for place, byte in enumerate(data[position : position + 10]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, position + place + 1
    return value, len(data) + 1
