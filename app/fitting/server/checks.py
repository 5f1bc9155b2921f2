"""Lets a worker read what strangers upload: validation sets, and tables of labels.

This worker runs nothing else, so that a check never waits for a fit.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from boxcal.app.fitting.backbones import BackboneSummary
from boxcal.app.fitting.disk_errors import disk_errors_as_problems
from boxcal.app.fitting.messages import BODY_FILE, ITEMS_FILE, Checked, CheckTask, Tabled, TableTask
from boxcal.app.fitting.server.worker_process import TaskRefused, Worker, WorkerFailed
from boxcal.app.fitting.server.workspace import Workspace
from boxcal.app.http.problems import (
    BoxcalError,
    InvalidParameter,
    InvalidUpload,
    MalformedBody,
    NotReady,
    StorageFull,
    UnknownMethod,
    UnknownUploadFormat,
    UploadTooLarge,
)
from boxcal.app.settings import limits
from boxcal.calibrators.method import reads_of_methods

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

    async def read_labels(self, table: bytes | bytearray, max_rows: int, max_bytes: int) -> bytes:
        """Let a worker turn a table of labels, Parquet or CSV, into the JSON body of `POST /feedback`."""
        if self._closing.is_set():
            raise NotReady(GOING_DOWN)
        folder: Path | None = None
        try:
            with disk_errors_as_problems():
                folder = await asyncio.to_thread(self._workspace.new_folder, f"labels-{secrets.token_hex(8)}")
                await asyncio.to_thread((folder / BODY_FILE).write_bytes, table)
            task = TableTask(folder, max_rows, max_bytes, CHECK_MEMORY_BYTES + 2 * max_bytes)
            try:
                await self.worker.run(task, Tabled)
            except TaskRefused as error:
                raise TABLE_REFUSALS.get(error.problem, MalformedBody)(str(error)) from error
            except WorkerFailed as error:
                if self._closing.is_set():
                    raise NotReady(GOING_DOWN) from error
                raise MalformedBody(f"The table could not be read. {error}") from error
            with disk_errors_as_problems():
                return await asyncio.to_thread((folder / ITEMS_FILE).read_bytes)
        finally:
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
