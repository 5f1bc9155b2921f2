"""Compares calibrators and methods on an upload, in a worker of their own: a comparison waits for no fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
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
from boxcal.calibrators.method import no_method, reads_of_methods


@dataclass(eq=False)
class Comparisons:
    """Comparisons of this process, one at a time."""

    registry: Registry
    activator: Activator
    checks: UploadChecks
    source: BackboneSource
    _: KW_ONLY
    memory_bytes: int
    worker: Worker

    async def find(self, versions: Sequence[int], methods: Sequence[str]) -> list[ServedCalibrator]:
        known = reads_of_methods()
        for name in methods:
            if name not in known:
                raise UnknownMethod(f"There is {no_method(name, known)}.")
        return [await self.activator.fetch(version) for version in versions]

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
        await self.checks.check(folder, content_type, DECLARED, others)
        stored = [await self.registry.run(self._stored, one) for one in versions]
        task = CompareTask(folder, self.source, stored, list(methods), self.memory_bytes)
        try:
            return (await self.worker.run(task, Compared)).document
        except WorkerFailed as error:
            raise self.checks.refusal(error, "The comparison failed.") from error

    def _stored(self, served: ServedCalibrator) -> StoredVersion:
        if served.version == UNCALIBRATED:
            return StoredVersion(served.version, served.method, None, None)
        known = self.registry.report(served.version).get("sketch")
        return StoredVersion(served.version, served.method, self.registry.artifact(served.version), known)
