"""Artifacts of calibrators as files named by their SHA-256, in the directory that the replicas share.

The replica that records or activates a calibrator writes its file first, so that an activation does not let
every replica fetch the same bytes from the database at once.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from boxcal.app.registry.bucket import Bucket

logger = logging.getLogger("boxcal")

KEPT = 64
FOLDER = "artifacts"


class SharedArtifacts(Protocol):
    """Where replicas read artifacts instead of in the database."""

    def read(self, sha256: str) -> bytes | None:
        """Return the artifact, or None where there is none with this hash."""

    def write(self, sha256: str, data: bytes) -> None:
        """Add one, and remove the oldest beyond `KEPT`."""


class ArtifactFiles:
    """The newest files; a failure is logged, because the database has every artifact."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._root.mkdir(parents=True, exist_ok=True)

    def read(self, sha256: str) -> bytes | None:
        """Return the artifact, or None where there is no file with these bytes."""
        try:
            data = (self._root / sha256).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def write(self, sha256: str, data: bytes) -> None:
        """Add a file, and remove the oldest beyond `KEPT`."""
        path = self._root / sha256
        if path.exists():
            return
        new = self._root / f".{secrets.token_hex(8)}.new"
        try:
            new.write_bytes(data)
            new.replace(path)
            self._trim()
        except OSError as error:
            logger.warning("The artifact %s could not be shared: %s", sha256, error)
            with suppress(OSError):
                new.unlink()

    def _trim(self) -> None:
        dated = []
        for file in self._root.iterdir():
            with suppress(FileNotFoundError):  # another process removed it
                dated.append((file.stat().st_mtime, file))
        for _, file in sorted(dated)[:-KEPT]:
            file.unlink(missing_ok=True)


class ArtifactObjects:
    """The same in a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def read(self, sha256: str) -> bytes | None:
        """Return the artifact, or None where there is no object with these bytes."""
        try:
            data = self._bucket.read(f"{FOLDER}/{sha256}")
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def write(self, sha256: str, data: bytes) -> None:
        """Add an object, and remove the oldest beyond `KEPT`."""
        try:
            ages = self._bucket.ages(FOLDER)
            if sha256 in ages:
                return
            self._bucket.write(f"{FOLDER}/{sha256}", data)
            for name in sorted(ages, key=lambda name: ages[name])[KEPT - 1 :]:
                self._bucket.remove(f"{FOLDER}/{name}")
        except OSError as error:
            logger.warning("The artifact %s could not be shared: %s", sha256, error)
