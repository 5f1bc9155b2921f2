"""A copy of the active calibrator in the data folder, for a start while the registry does not answer."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from pathlib import Path

import orjson

from boxcal.app.http.problems import DamagedArtifact
from boxcal.app.registry.records import BackboneIdentity

logger = logging.getLogger("boxcal")

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
