"""The folder for validation sets on their way to a fit, and the proof of which processes are alive.

Each process has a folder of its own and holds a lock on a file in it for as long as it lives; the kernel lets
go of it however the process ends. So the next start knows which folders a killed process left behind, removes
them, and can tell the registry whose fits nobody works on any more.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

LOCK_NAME = ".alive"
OURS = re.compile(r"[0-9a-f]{16}")
"""Names of the folders of processes: `work` may be a folder that others use."""


class Workspace:
    """A folder of this process's own under `<data_dir>/work`; a context manager."""

    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir / "work"
        self.root.mkdir(parents=True, exist_ok=True)
        self.name = secrets.token_hex(8)
        self.folder = self.root / self.name
        with self._alone():
            self.folder.mkdir()
            self._lock = os.open(self.folder / LOCK_NAME, os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def sweep(self) -> set[str]:
        """Remove what dead processes left behind, and name the living ones, this one among them."""
        with self._alone():
            return _sweep(self.root)

    def new_folder(self, name: str) -> Path:
        """Make a folder for one upload; whoever asks removes it."""
        folder = self.folder / name
        folder.mkdir()
        return folder

    def close(self) -> None:
        """Remove the folder with all that is in it."""
        with self._alone():
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep two processes from making and sweeping folders at the same moment."""
        with (self.root / ".sweep").open("w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            yield


def _sweep(root: Path) -> set[str]:
    """Remove what dead processes left, and name the living."""
    living = set()
    for folder in [entry for entry in root.iterdir() if entry.is_dir() and OURS.fullmatch(entry.name)]:
        if _is_locked(folder / LOCK_NAME):
            living.add(folder.name)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return living


def _is_locked(path: Path) -> bool:
    try:
        with path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
