"""Receives what strangers upload, validation sets and tables of labels, and lets a worker read it.

The body is streamed into a file, and nothing in it is parsed here. Its size is limited, its space on the disk
is reserved as it arrives, and it must arrive at a minimum rate and within a time, because it holds one of a
few slots: arriving uploads and fits are limited together, and arriving uploads per client. The worker that
reads it runs nothing else, so that a check never waits for a fit.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import ClientDisconnect

from boxcal.app.fitting.backbones import BackboneSummary
from boxcal.app.fitting.messages import BODY_FILE, ITEMS_FILE, Checked, CheckTask, Tabled, TableTask
from boxcal.app.fitting.resources import disk_errors_as_problems
from boxcal.app.fitting.server.runner import Job
from boxcal.app.fitting.server.worker_process import TaskRefused, Worker, WorkerFailed
from boxcal.app.fitting.server.workspace import Workspace
from boxcal.app.http.problems import (
    BoxcalError,
    FitQueueFull,
    InvalidParameter,
    InvalidUpload,
    MalformedBody,
    NotReady,
    StorageFull,
    UnknownMethod,
    UnknownUploadFormat,
    UnsupportedMediaType,
    UploadStalled,
    UploadTooLarge,
)
from boxcal.app.settings import limits
from boxcal.calibrators.method import reads_of_methods

WRITE_BYTES = 2**20
CONTENT_TYPES = ("multipart/form-data", "application/json")
RATE_SECONDS, RATE_BYTES = 10.0, 10 * 2**14
"""Within each 10 s an upload must bring 160 KiB, or end."""
PATIENCE_SECONDS, WHOLE_RATE = 600.0, 2**18
"""The whole upload takes at most ten minutes, and a second more for each 256 KiB: a gigabyte, 78 minutes."""


async def receive(
    headers: Mapping[str, str], stream: AsyncGenerator[bytes, None], path: Path, max_bytes: int
) -> None:
    """Write the body to `path` as it arrives."""
    kind = headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() not in CONTENT_TYPES:
        raise UnsupportedMediaType(
            f"An upload is {' or '.join(CONTENT_TYPES)}, got {kind or 'no content type'!r}."
        )
    length = headers.get("content-length", "")
    announced = int(length) if length.isdecimal() else 0
    if announced > max_bytes:
        raise UploadTooLarge(f"The upload has {announced:,} bytes; the limit is {max_bytes:,}.")
    with disk_errors_as_problems(), path.open("wb", buffering=0) as file:
        descriptor, size, buffer = file.fileno(), 0, bytearray()
        seconds = PATIENCE_SECONDS + (announced or max_bytes) / WHOLE_RATE
        async for piece in _at_minimum_rate(stream, seconds):
            buffer += piece
            if size + len(buffer) > max_bytes:
                raise UploadTooLarge(f"The upload has more than {max_bytes:,} bytes, which is the limit.")
            if len(buffer) >= WRITE_BYTES:
                size += await asyncio.to_thread(_append, descriptor, size, buffer)
                buffer = bytearray()
        size += await asyncio.to_thread(_append, descriptor, size, buffer)
        os.ftruncate(descriptor, size)


def _append(descriptor: int, size: int, piece: bytearray) -> int:
    """Write a piece at the end; its space is reserved first."""
    if piece:
        os.posix_fallocate(descriptor, size, len(piece))
    view = memoryview(piece)
    while view:
        view = view[os.pwrite(descriptor, view, size + len(piece) - len(view)) :]
    return len(piece)


async def _at_minimum_rate(
    stream: AsyncGenerator[bytes, None], seconds: float
) -> AsyncGenerator[bytes, None]:
    loop = asyncio.get_running_loop()
    size = brought = 0
    deadline, end = loop.time() + RATE_SECONDS, loop.time() + seconds
    while True:
        try:
            async with asyncio.timeout_at(min(deadline, end)):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            if loop.time() >= end:
                raise UploadStalled(
                    f"The upload brought {size:,} bytes in {seconds:,.0f} s, and did not end."
                ) from error
            raise UploadStalled(
                f"The upload brought {brought:,} bytes in {RATE_SECONDS:g} s, after {size - brought:,}; "
                f"the minimum is {RATE_BYTES:,}."
            ) from error
        except ClientDisconnect as error:
            raise MalformedBody(f"The upload broke off after {size:,} bytes.") from error
        size, brought = size + len(piece), brought + len(piece)
        if brought >= RATE_BYTES:
            brought, deadline = 0, loop.time() + RATE_SECONDS
        yield piece


UNKNOWN_SECONDS = 5.0
LONGEST_SECONDS = 300.0


class UploadSlots:
    """Slots for uploads, each with a folder."""

    def __init__(self, workspace: Workspace, jobs: Mapping[str, Job]) -> None:
        self._workspace = workspace
        self._jobs = jobs
        self._arriving: Counter[str] = Counter()

    @asynccontextmanager
    async def reserve(self, client: str) -> AsyncIterator[Path]:
        """Reserve a slot and a folder while an upload arrives and is checked.

        The folder is removed at the end, unless it belongs to a fit by then.
        """
        arriving = self._arriving.total()
        if len(self._jobs) + arriving > limits.MAX_WAITING_FITS:
            raise FitQueueFull(
                f"{len(self._jobs)} fits are running or waiting and {arriving} uploads are arriving; "
                f"at most {limits.MAX_WAITING_FITS} may wait.",
                retry_after=self._seconds_to_a_slot(),
            )
        # A client takes half of what the others leave, so that slow uploads of few leave places to more.
        own = self._arriving[client]
        if own and own >= (most := (limits.MAX_WAITING_FITS + 1 - len(self._jobs) - arriving + own) // 2):
            raise FitQueueFull(
                f"{own} uploads are arriving from {client}; the limit is {most}, half of the free places."
            )
        self._arriving[client] += 1
        folder = None
        try:
            with disk_errors_as_problems():
                folder = await asyncio.to_thread(self._workspace.new_folder, secrets.token_hex(8))
            yield folder
        finally:
            self._arriving[client] -= 1
            self._arriving += Counter()  # removes clients without uploads
            if folder is not None and folder.name not in self._jobs:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _seconds_to_a_slot(self) -> int:
        """Estimate when the running fit ends."""
        estimates = (job.seconds_left() for job in self._jobs.values())
        seconds = next((left for left in estimates if left is not None), UNKNOWN_SECONDS)
        return max(1, round(min(seconds, LONGEST_SECONDS)))


CHECK_MEMORY_BYTES = 256 * 2**20
"""Memory of a check beside the arrays; most of it is address space that threads of libraries reserve."""
GOING_DOWN = "The service is shutting down and takes no more fits."
TABLE_REFUSALS = {one.type: one for one in (MalformedBody, InvalidParameter, UploadTooLarge, StorageFull)}
"""What reading a table of labels can refuse."""
REFUSALS = {one.type: one for one in (*TABLE_REFUSALS.values(), UnknownUploadFormat, UnknownMethod)}
"""What the check of an upload can refuse, besides an invalid one."""


class UploadChecks:
    """Checks of uploads in a worker."""

    def __init__(
        self,
        workspace: Workspace,
        summary: BackboneSummary,
        closing: asyncio.Event,
        worker: Worker,
    ) -> None:
        self._workspace = workspace
        self._summary = summary
        self._closing = closing
        self.worker = worker

    async def check(
        self, folder: Path, content_type: str, fields: tuple[str, ...], others: Sequence[tuple[str, str]]
    ) -> Checked:
        """Check the body of an upload in a folder, and store its arrays there."""
        task = CheckTask(
            folder,
            content_type,
            self._summary,
            reads_of_methods(),
            fields,
            list(others),
            limits.MAX_UPLOAD_BYTES,
            CHECK_MEMORY_BYTES + 2 * limits.MAX_UPLOAD_BYTES,
        )
        try:
            return await self.worker.run(task, Checked)
        except WorkerFailed as error:
            raise self.refusal(error, "The file could not be read.") from error

    def refusal(self, error: WorkerFailed, what: str) -> BoxcalError:
        """Return what to raise where a worker has not done what an upload needs."""
        if isinstance(error, TaskRefused):
            return REFUSALS.get(error.problem, InvalidUpload)(str(error))
        return NotReady(GOING_DOWN) if self._closing.is_set() else InvalidUpload(f"{what} {error}")

    async def read_labels(self, table: bytes, add: Callable[[list[Any]], None]) -> None:
        """Let a worker turn a table of labels, Parquet or CSV, into items as in a JSON body.

        `add`: called in a thread with some items at a time, so that they are never all in memory.
        """
        if self._closing.is_set():
            raise NotReady(GOING_DOWN)
        folder: Path | None = None
        try:
            with disk_errors_as_problems():
                folder = await asyncio.to_thread(self._workspace.new_folder, f"labels-{secrets.token_hex(8)}")
                await asyncio.to_thread((folder / BODY_FILE).write_bytes, table)
            task = TableTask(
                folder,
                limits.MAX_LABELS,
                limits.MAX_BODY_BYTES,
                limits.MAX_JSON_BYTES,
                CHECK_MEMORY_BYTES + 2 * limits.MAX_BODY_BYTES,
            )
            try:
                await self.worker.run(task, Tabled)
            except TaskRefused as error:
                raise TABLE_REFUSALS.get(error.problem, MalformedBody)(str(error)) from error
            except WorkerFailed as error:
                if self._closing.is_set():
                    raise NotReady(GOING_DOWN) from error
                raise MalformedBody(f"The table could not be read. {error}") from error
            with disk_errors_as_problems():
                await asyncio.to_thread(_read_lines, folder / ITEMS_FILE, add)
        finally:
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _read_lines(file: Path, add: Callable[[list[Any]], None]) -> None:
    with file.open("rb") as lines:
        for line in lines:
            add(orjson.loads(line))
