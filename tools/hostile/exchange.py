"""Sends a case on a connection of its own, and judges what comes back and when."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httptools

from tools.hostile.cases import Case

GRACE_SECONDS = 1.0
FAULTS = (503, 504, 507)
"""Statuses from 500 on that the service may answer with, where the route documents them."""
PROBLEM = ("application/problem+json", "application/json")
"""Content types of problems; below `/v2` it is the second, which clients of the protocol expect."""


@dataclass(slots=True)
class Answer:
    """One complete response."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class Answers:
    """Collects the responses on a connection; `httptools` calls its methods.

    Parameters
    ----------
    have_bodies
        False if the request is a HEAD.
    """

    def __init__(self, have_bodies: bool) -> None:
        self._have_bodies = have_bodies
        self.complete: list[Answer] = []
        self._answer = Answer()
        self._parser = httptools.HttpResponseParser(self)
        self.feed = self._parser.feed_data

    def on_header(self, name: bytes, value: bytes) -> None:
        self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if not self._have_bodies:
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        self._answer.body += body

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        if self._answer.status >= 200:
            self.complete.append(self._answer)
        self._answer = Answer()


class Broken(Exception):
    """The service did what it must not; the message says what."""


async def exchange(address: tuple[str, int], case: Case, seconds: float | None = None) -> list[Answer]:
    """Send a case and return the responses.

    Parameters
    ----------
    seconds
        In which time the service must answer or close; by default the time of the case.

    Raises
    ------
    Broken
        No answer, or one too late; a response that is not HTTP.
    """
    limit = (case.seconds if seconds is None else seconds) + GRACE_SECONDS
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(*address)
    answers = Answers(have_bodies=not case.data.startswith(b"HEAD "))
    try:
        writer.write(case.data)
        if case.leaves:
            with suppress(ConnectionError, TimeoutError):
                async with asyncio.timeout(0.01):
                    await writer.drain()
            return []
        reading = asyncio.create_task(_read(reader, answers, case.answers or 1))
        for _ in range(math.ceil(limit)):
            # One by one: where the machine stands still, that is one second.
            await asyncio.wait([reading], timeout=1)
            if reading.done():
                break
        else:
            reading.cancel()
            raise Broken(f"{len(answers.complete)} answers in {limit:g} s")
        try:
            end = reading.result()
        except httptools.HttpParserError as error:
            raise Broken(f"an answer is no HTTP: {error}") from None
        if case.answers and not answers.complete:
            raise Broken(f"{end} after {time.monotonic() - began:.3f} s, before an answer was complete")
        return answers.complete
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader, answers: Answers, count: int) -> str:
    """Feed the responses until they are complete; say how the connection ended, and after how many bytes."""
    received = 0
    try:
        while len(answers.complete) < count and (data := await reader.read(1 << 16)):
            received += len(data)
            answers.feed(data)
    except ConnectionResetError:
        return f"reset with {received} bytes received,"
    return f"closed with {received} bytes received,"


def judge(case: Case, answers: list[Answer], document: Mapping[str, Any]) -> None:
    """Check the statuses and the problems.

    Raises
    ------
    Broken
        An answer is missing, or is a failure of the service.
    """
    if len(answers) < case.answers and not any(a.headers.get("connection") == "close" for a in answers):
        raise Broken(f"{len(answers)} answers to {case.answers} requests")
    for path, answer in zip(case.paths * len(answers), answers, strict=False):
        if answer.status < 500:
            continue
        operations = document["paths"].get(path, {})
        documented = {code for operation in operations.values() for code in operation["responses"]}
        if answer.status not in FAULTS or (documented and str(answer.status) not in documented):
            raise Broken(f"{answer.status}: {answer.body[:500]!r}")
    for answer in answers:
        if answer.status >= 400 and answer.body and answer.headers.get("content-type") in PROBLEM:
            problem = json.loads(answer.body)
            if problem["status"] != answer.status or not problem["detail"]:
                raise Broken(f"a problem that describes nothing: {problem}")
