"""A bucket of object storage that the replicas share, such as `s3://NAME/PREFIX`, by fsspec."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from boxcal.app.http.problems import RegistryUnusable

SCHEME = "s3://"


class Bucket:
    """Folders and files below a prefix; its methods block."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs  # noqa: PLC0415 - an optional package

            found: tuple[Any, str] = url_to_fs(url.rstrip("/"), use_listings_cache=False)
        except ImportError as error:
            raise RegistryUnusable(
                f"BOXCAL_SHARED_DIR is {url}, which needs more packages: pip install 'boxcal[s3]'."
            ) from error
        self._files, self._root = found

    def put(self, folder: Path, name: str) -> None:
        with as_os_errors():
            for file in sorted(folder.rglob("*")):
                if file.is_file():
                    self._files.put_file(str(file), f"{self._root}/{name}/{file.relative_to(folder)}")

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
        """Write one file, whole or not at all."""
        with as_os_errors():
            self._files.pipe_file(f"{self._root}/{name}", data)

    def read(self, name: str) -> bytes:
        """Read one file; FileNotFoundError if there is none."""
        with as_os_errors():
            data: bytes = self._files.cat_file(f"{self._root}/{name}")
            return data

    def remove(self, name: str) -> None:
        """Remove a file or a folder, if there is one."""
        with as_os_errors():
            for path in self._files.find(f"{self._root}/{name}"):
                self._files.rm_file(path)

    def ages(self, name: str) -> dict[str, float]:
        """Return the names in a folder, each with the seconds since its newest file was written."""
        base, ages = f"{self._root}/{name}/", dict[str, float]()
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
