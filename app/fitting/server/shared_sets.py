"""Validation sets in a directory that the replicas share, so that each can continue fits of the others.

Validation sets in a bucket that the replicas share; a fit works on a local copy.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from boxcal.app.registry.bucket import Bucket
from boxcal.app.registry.fits import NOBODY

ORPHAN_SECONDS = 3600.0


class SharedSets:
    """The folders of fits in the shared directory, each named after its fit and the process that owns it.

    The owner in the name keeps a process that lost a fit from removing the folder of the process that
    adopted it.
    """

    def __init__(self, root: Path, owner: str) -> None:
        self._root = root.absolute()
        self._owner = owner
        self._root.mkdir(parents=True, exist_ok=True)

    def add(self, folder: Path, *, owned: bool = True) -> Path:
        """Move a checked validation set into the shared directory; the name of its folder is the fit's id."""
        return Path(shutil.move(folder, self._path(folder.name, self._owner if owned else NOBODY)))

    def claim(self, fit_id: str, former_owner: str) -> Path:
        """Take over the folder of an adopted fit."""
        # A released fit has no owner in the registry, and keeps the name of its last one on the disk.
        pattern = f"{fit_id}.{former_owner or '*'}"
        found = next(self._root.glob(pattern), None)
        if found is None:
            raise FileNotFoundError(f"There is no folder {pattern} in {self._root}.")
        return found.rename(self._path(fit_id, self._owner))

    def leave(self, folder: Path, *, is_over: bool) -> None:
        """Remove the folder of a fit that is over; another process continues any other."""
        if is_over:
            shutil.rmtree(folder, ignore_errors=True)

    def sweep(self, unfinished: Collection[str]) -> None:
        """Remove folders older than an hour whose fits have ended."""
        for folder in self._root.glob("*.*"):
            with suppress(FileNotFoundError):  # another process has removed or claimed it
                is_old = time.time() - folder.stat().st_mtime > ORPHAN_SECONDS
                if is_old and folder.name.partition(".")[0] not in unfinished:
                    shutil.rmtree(folder, ignore_errors=True)

    def _path(self, fit_id: str, owner: str) -> Path:
        return self._root / f"{fit_id}.{owner}"


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
