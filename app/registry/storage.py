"""What replicas share beside the database, in a directory or a bucket, and what each keeps for an outage.

Shared are the artifacts of calibrators, named by their SHA-256, and the validation sets of fits. The replica
that records or activates a calibrator writes its artifact first, so that an activation does not let every
replica fetch the same bytes from the database at once.

The data folder has copies of the active calibrator and of the API keys, for a start while the registry does
not answer.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from boxcal.app.http.problems import DamagedArtifact, InternalError, RegistryUnusable
from boxcal.app.registry.fits import NOBODY
from boxcal.app.registry.records import BackboneIdentity

logger = logging.getLogger("boxcal")

SCHEME = "s3://"
ARTIFACTS = "artifacts/"
SETS = "fits/"
"""Folder of the validation sets in a bucket; in a directory they are beside the artifacts."""
SET = re.compile(r"([0-9a-f]{16})(\.([0-9a-f]{16})?)?")
"""The name of a set: that of a fit and, in a directory, of its owner, if it has one. Others are not ours."""
ARTIFACT = re.compile(r"[0-9a-f]{64}")


def write_whole(path: Path, data: bytes, new: Path, mode: int = 0o666) -> None:
    """Replace a file by way of `new`: it is never seen in part, and outlasts a power cut."""
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        with suppress(OSError):
            new.unlink()
        raise


class SharedDirectory:
    """Files and folders below a directory; the methods of this class and the next block."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        (self._root / ARTIFACTS).mkdir(parents=True, exist_ok=True)

    def put(self, folder: Path, name: str) -> Path:
        """Move a folder here; returns where its files are."""
        return Path(shutil.move(folder, self._root / name))

    def claim(self, pattern: str, name: str) -> Path:
        """Rename the folder that matches a pattern: of several processes, one succeeds."""
        found = next(self._root.glob(pattern), None)
        if found is None:
            raise FileNotFoundError(f"There is no folder {pattern} in {self._root}.")
        return found.rename(self._root / name)

    def write(self, name: str, data: bytes) -> None:
        """Write one file, whole or not at all."""
        path = self._root / name
        write_whole(path, data, path.with_name(f".{secrets.token_hex(8)}.new"))

    def read(self, name: str) -> bytes:
        """Read one file; FileNotFoundError if there is none."""
        return (self._root / name).read_bytes()

    def remove(self, name: str) -> None:
        """Remove a file, if there is one."""
        (self._root / name).unlink(missing_ok=True)

    def remove_folder(self, name: str) -> None:
        """Remove a folder as far as possible; a file is left."""
        shutil.rmtree(self._root / name, ignore_errors=True)

    def ages(self, name: str) -> dict[str, float]:
        """Return the names in a folder, each with the seconds since its last change."""
        folder, ages = self._root / name, dict[str, float]()
        for path in folder.iterdir() if folder.is_dir() else ():
            with suppress(FileNotFoundError):  # another process has removed or claimed it
                ages[path.name] = time.time() - path.stat().st_mtime
        return ages


class Bucket:
    """The same below a prefix of object storage, such as `s3://NAME/PREFIX`, by fsspec."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415 - an optional package

            found: tuple[Any, str] = url_to_fs(url.rstrip("/"), use_listings_cache=False)
        except ImportError as error:
            raise RegistryUnusable(
                f"BOXCAL_SHARED_DIR is {url}, which needs more packages: pip install 'boxcal[s3]'."
            ) from error
        self._files, self._root = found

    def put(self, folder: Path, name: str) -> Path:
        """Copy a folder into the bucket; returns the folder."""
        with as_os_errors():
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    self._files.put_file(str(file), f"{self._root}/{name}/{file.relative_to(folder)}")
        return folder

    def get(self, name: str, folder: Path) -> None:
        """Copy a folder from the bucket."""
        base = f"{self._root}/{name}/"
        with as_os_errors():
            found = self._files.find(base)
            for path in found:
                local = folder / path.removeprefix(base)
                local.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(path, str(local))
        if not found:
            raise FileNotFoundError(f"There is no folder {name} in {SCHEME}{self._root}.")

    def write(self, name: str, data: bytes) -> None:
        with as_os_errors():
            self._files.pipe_file(f"{self._root}/{name}", data)

    def read(self, name: str) -> bytes:
        with as_os_errors():
            data: bytes = self._files.cat_file(f"{self._root}/{name}")
            return data

    def remove(self, name: str) -> None:
        with as_os_errors():
            for path in self._files.find(f"{self._root}/{name}"):
                self._files.rm_file(path)

    remove_folder = remove

    def ages(self, name: str) -> dict[str, float]:
        base, ages = f"{self._root}/{name}", dict[str, float]()
        with as_os_errors():
            for path, details in self._files.find(base, detail=True).items():
                written: datetime = details["LastModified"]
                first, age = path.removeprefix(base).partition("/")[0], time.time() - written.timestamp()
                ages[first] = min(age, ages.get(first, age))
        return ages


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Convert what a client of object storage raises, which is not all an OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(None, f"the bucket does not answer: {error}") from error


def open_storage(location: Path | str | None) -> SharedDirectory | Bucket | None:
    """Open what replicas share, if they share something; raises BoxcalError."""
    if location is None:
        return None
    if str(location).startswith(SCHEME):
        return Bucket(str(location))
    try:
        return SharedDirectory(Path(location))
    except OSError as error:
        raise InternalError(f"BOXCAL_SHARED_DIR: cannot write to {location}: {error.strerror}") from error


KEPT = 64


class SharedArtifacts:
    """The newest artifacts; a failure is logged, because the database has every artifact."""

    def __init__(self, storage: SharedDirectory | Bucket) -> None:
        self._storage = storage

    def read(self, sha256: str) -> bytes | None:
        """Return the artifact, or None where there is none with these bytes."""
        try:
            data = self._storage.read(ARTIFACTS + sha256)
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == sha256 else None

    def write(self, sha256: str, data: bytes) -> None:
        """Add one, and remove the oldest beyond `KEPT`."""
        try:
            ages = {
                name: age for name, age in self._storage.ages(ARTIFACTS).items() if ARTIFACT.fullmatch(name)
            }
            if sha256 in ages:
                return
            self._storage.write(ARTIFACTS + sha256, data)
            for name in sorted(ages, key=lambda name: ages[name])[KEPT - 1 :]:
                self._storage.remove(ARTIFACTS + name)
        except OSError as error:
            logger.warning("The artifact %s could not be shared: %s", sha256, error)


ORPHAN_SECONDS = 3600.0


class SharedSets:
    """The validation sets of fits, each in a folder, so that a replica can continue the fits of others.

    In a directory, a fit reads the shared folder itself. The name has the fit and its owner, which keeps a
    process that lost a fit from removing the folder of the process that adopted it. In a bucket, the name has
    the fit alone, and a fit reads a local copy: only the process whose fit the registry has recorded as over
    removes the set.
    """

    def __init__(
        self, storage: SharedDirectory | Bucket, owner: str, new_folder: Callable[[str], Path]
    ) -> None:
        self._storage = storage
        self._owner = owner
        self._new_folder = new_folder

    def add(self, folder: Path, *, owned: bool = True) -> Path:
        """Share a checked set; the name of its folder is the fit's id. Returns where a fit reads it."""
        if isinstance(self._storage, SharedDirectory):
            return self._storage.put(folder, f"{folder.name}.{self._owner if owned else NOBODY}")
        self._storage.put(folder, SETS + folder.name)
        if not owned:
            shutil.rmtree(folder, ignore_errors=True)
        return folder

    def claim(self, fit_id: str, former_owner: str) -> Path:
        """Take over the set of an adopted fit."""
        if isinstance(self._storage, SharedDirectory):
            # A released fit has no owner in the registry, and keeps the name of its last one on the disk.
            return self._storage.claim(f"{fit_id}.{former_owner or '*'}", f"{fit_id}.{self._owner}")
        folder = self._new_folder(fit_id)
        try:
            self._storage.get(SETS + fit_id, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def leave(self, folder: Path, *, is_over: bool) -> None:
        """Remove what a fit has read if it is over; another process continues any other."""
        if is_over or isinstance(self._storage, Bucket):
            shutil.rmtree(folder, ignore_errors=True)
        if is_over and isinstance(self._storage, Bucket):
            self._storage.remove_folder(SETS + folder.name)

    def remove(self, fit_id: str) -> None:
        """Remove the set of a fit that has ended in the queue, where no process owned it."""
        self._remove_where(lambda one, _: one == fit_id)

    def sweep(self, unfinished: Collection[str]) -> None:
        """Remove sets older than an hour whose fits have ended."""
        self._remove_where(lambda fit_id, age: age > ORPHAN_SECONDS and fit_id not in unfinished)

    def _remove_where(self, is_over: Callable[[str, float], bool]) -> None:
        """Remove sets; all else that a directory or a prefix holds belongs to others, and stays."""
        prefix = SETS if isinstance(self._storage, Bucket) else ""
        for name, age in self._storage.ages(prefix).items():
            found = SET.fullmatch(name)
            if found and bool(found[2]) == (not prefix) and is_over(found[1], age):
                self._storage.remove_folder(prefix + name)


class LocalCopy:
    """A file in the data folder, for a start while the registry does not answer."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self.path = path
        self._mode = mode
        self._lock = threading.Lock()
        self._written = (-1, b"")  # Number and SHA-256

    def write(self, data: bytes, what: str, number: int = 0) -> None:
        """Replace the copy, unless one with a higher number is there; a failure is logged, nothing else."""
        written = number, hashlib.sha256(data).digest()
        with self._lock:
            if number < self._written[0] or written == self._written:
                return
            try:
                write_whole(self.path, data, self.path.with_suffix(f".{os.getpid()}.new"), self._mode)
            except OSError as error:
                logger.warning("The copy of %s could not be written: %s", what, error)
            else:
                self._written = written

    def read(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except FileNotFoundError:
            return None


FILE_NAME = "active.calibrator"


class CalibratorCopy:
    """A line of JSON with activation, version, method, backbone and SHA-256, then the artifact."""

    def __init__(self, data_dir: Path, backbone: BackboneIdentity, name: str = FILE_NAME) -> None:
        self._copy = LocalCopy(data_dir / name)
        self._backbone = [backbone.name, backbone.fingerprint, backbone.labels_sha256]

    def write(self, activation: int, version: int, method: str, artifact: bytes) -> None:
        """Replace the copy, unless it is of a later activation."""
        header = {
            "activation": activation,
            "version": version,
            "method": method,
            "backbone": self._backbone,
            "sha256": hashlib.sha256(artifact).hexdigest(),
        }
        self._copy.write(orjson.dumps(header) + b"\n" + artifact, f"calibrator {version}", activation)

    def read(self) -> tuple[int, int, str, bytes] | None:
        """Return activation, version, method and artifact; None where there is no copy for this backbone."""
        data = self._copy.read()
        if data is None:
            return None
        line, _, artifact = data.partition(b"\n")
        try:
            header = orjson.loads(line)
            if header["sha256"] != hashlib.sha256(artifact).hexdigest():
                raise ValueError("the SHA-256 differs")
            if header["backbone"] != self._backbone:
                return None
            return header["activation"], header["version"], header["method"], artifact
        except (ValueError, LookupError, TypeError) as error:
            raise DamagedArtifact(f"{self._copy.path} cannot be read: {error}") from error
