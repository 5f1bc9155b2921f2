"""Artifacts of calibrators as files, in the directory that the replicas share and in the data folder.

Shared files are named by their SHA-256. The data folder has a copy of the active calibrator, for a start
while the registry does not answer.

The replica that records or activates a calibrator writes its file first, so that an activation does not let
every replica fetch the same bytes from the database at once.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import orjson

from boxcal.app.http.problems import DamagedArtifact
from boxcal.app.registry.bucket import Bucket
from boxcal.app.registry.records import BackboneIdentity

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


FILE_NAME = "active.calibrator"


class LocalCopy:
    """One file: a line of JSON with version, method, backbone and SHA-256, then the artifact."""

    def __init__(self, data_dir: Path, backbone: BackboneIdentity, name: str = FILE_NAME) -> None:
        self._path = data_dir / name
        self._lock = threading.Lock()
        self._written = -1
        self._backbone = [backbone.name, backbone.fingerprint, backbone.labels_sha256]

    def write(self, activation: int, version: int, method: str, artifact: bytes) -> None:
        """Replace the copy, unless it is of a later activation; a failure is logged, nothing else."""
        header = {
            "activation": activation,
            "version": version,
            "method": method,
            "backbone": self._backbone,
            "sha256": hashlib.sha256(artifact).hexdigest(),
        }
        new = self._path.with_suffix(f".{os.getpid()}.new")
        with self._lock:
            if activation < self._written:
                return
            try:
                with new.open("wb") as file:
                    file.write(orjson.dumps(header) + b"\n" + artifact)
                    file.flush()
                    os.fsync(file.fileno())
                new.replace(self._path)
                self._written = activation
            except OSError as error:
                logger.warning("The copy of calibrator %d could not be written: %s", version, error)

    def read(self) -> tuple[int, int, str, bytes] | None:
        """Return activation, version, method and artifact; None where there is no copy for this backbone."""
        try:
            line, _, artifact = self._path.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return None
        try:
            header = orjson.loads(line)
            if header["sha256"] != hashlib.sha256(artifact).hexdigest():
                raise ValueError("the SHA-256 differs")
            if header["backbone"] != self._backbone:
                return None
            return header["activation"], header["version"], header["method"], artifact
        except (ValueError, LookupError, TypeError) as error:
            raise DamagedArtifact(f"{self._path} cannot be read: {error}") from error
