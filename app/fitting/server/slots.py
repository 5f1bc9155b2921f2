"""Slots for uploads: arriving uploads and fits are limited together, and arriving uploads per client."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from boxcal.app.fitting.disk_errors import disk_errors_as_problems
from boxcal.app.fitting.server.job import Job
from boxcal.app.fitting.server.workspace import Workspace
from boxcal.app.http.problems import FitQueueFull

MAX_WAITING = 8
"""How many fits and arriving uploads may wait beside the fit that runs."""
MAX_PER_CLIENT = 4
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
        if len(self._jobs) + arriving > MAX_WAITING:
            raise FitQueueFull(
                f"{len(self._jobs)} fits are running or waiting and {arriving} uploads are arriving; "
                f"at most {MAX_WAITING} may wait.",
                retry_after=self._seconds_to_a_slot(),
            )
        if self._arriving[client] >= MAX_PER_CLIENT:
            raise FitQueueFull(
                f"{self._arriving[client]} uploads are arriving from {client}; the limit is {MAX_PER_CLIENT}."
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
