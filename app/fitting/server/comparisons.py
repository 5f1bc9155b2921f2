"""Compares calibrators and methods on an upload, in a worker of their own: a comparison waits for no fit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.fields import DECLARED
from boxcal.app.fitting.messages import Compared, CompareTask, StoredVersion
from boxcal.app.fitting.server.upload_validation import UploadChecks
from boxcal.app.fitting.server.worker_process import Worker, WorkerFailed
from boxcal.app.http.problems import UnknownMethod
from boxcal.app.registry.activator import Activator, ServedCalibrator
from boxcal.app.registry.records import UNCALIBRATED
from boxcal.app.registry.store import Registry
from boxcal.calibrators.method import reads_of_methods


class Comparisons:
    """Comparisons of this process, one at a time."""

    def __init__(
        self,
        registry: Registry,
        activator: Activator,
        checks: UploadChecks,
        source: BackboneSource,
        *,
        memory_bytes: int,
        worker: Worker,
    ) -> None:
        self._registry = registry
        self._activator = activator
        self._checks = checks
        self._source = source
        self._memory_bytes = memory_bytes
        self._worker = worker

    async def find(self, versions: Sequence[int], methods: Sequence[str]) -> list[ServedCalibrator]:
        known = reads_of_methods()
        for name in methods:
            if name not in known:
                raise UnknownMethod(f"There is no method {name!r:.200}; there are {', '.join(known)}.")
        return [await self._activator.fetch(version) for version in versions]

    async def compare(
        self,
        folder: Path,
        content_type: str,
        versions: Sequence[ServedCalibrator],
        methods: Sequence[str],
    ) -> dict[str, Any]:
        """Check the request body in a folder of `FitJobs.reserve_slot`, and compare on it."""
        known = reads_of_methods()
        others = [(f"the method {name!r}", known[name]) for name in methods]
        others += [(f"version {one.version} ({one.method})", one.reads) for one in versions]
        await self._checks.check(folder, content_type, DECLARED, others)
        stored = [await self._registry.run(self._stored, one) for one in versions]
        task = CompareTask(folder, self._source, stored, list(methods), self._memory_bytes)
        try:
            return (await self._worker.run(task, Compared)).document
        except WorkerFailed as error:
            raise self._checks.refusal(error, "The comparison failed.") from error

    def _stored(self, served: ServedCalibrator) -> StoredVersion:
        if served.version == UNCALIBRATED:
            return StoredVersion(served.version, served.method, None, None)
        known = self._registry.report(served.version).get("sketch")
        return StoredVersion(served.version, served.method, self._registry.artifact(served.version), known)
