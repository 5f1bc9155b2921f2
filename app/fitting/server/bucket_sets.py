"""Validation sets in a bucket that the replicas share; a fit works on a local copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from boxcal.app.fitting.server.shared import ORPHAN_SECONDS
from boxcal.app.registry.bucket import Bucket

FOLDER = "fits"


class BucketSets:
    """The folders of fits in the bucket, each named after its fit.

    Only the process whose fit the registry has recorded as over removes one, so a process that lost a fit
    takes nothing from the process that adopted it.
    """

    def __init__(self, bucket: Bucket, new_folder: Callable[[str], Path]) -> None:
        self._bucket = bucket
        self._new_folder = new_folder

    def add(self, folder: Path, *, owned: bool = True) -> Path:
        """Copy a checked validation set into the bucket; a set that others fit is not needed here."""
        self._bucket.put(folder, f"{FOLDER}/{folder.name}")
        if not owned:
            shutil.rmtree(folder, ignore_errors=True)
        return folder

    def claim(self, fit_id: str, former_owner: str) -> Path:
        """Copy the validation set of an adopted fit."""
        folder = self._new_folder(fit_id)
        try:
            self._bucket.get(f"{FOLDER}/{fit_id}", folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def leave(self, folder: Path, *, is_over: bool) -> None:
        """Remove the local copy and, if the fit is over, the folder in the bucket."""
        shutil.rmtree(folder, ignore_errors=True)
        if is_over:
            self._bucket.remove(f"{FOLDER}/{folder.name}")

    def sweep(self, unfinished: Collection[str]) -> None:
        """Remove folders older than an hour whose fits have ended."""
        for fit_id, age in self._bucket.ages(FOLDER).items():
            if age > ORPHAN_SECONDS and fit_id not in unfinished:
                self._bucket.remove(f"{FOLDER}/{fit_id}")
