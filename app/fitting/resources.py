"""Full disks as problems of the request, and the memory that a worker may take."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from boxcal.app.http.problems import FULL_DISK, StorageFull, StorageUnavailable

logger = logging.getLogger("boxcal")


@contextmanager
def full_disk_as_problem() -> Iterator[None]:
    """Convert errors of the operating system about a full disk to `StorageFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise StorageFull(
            f"No space left in the data directory: {error.strerror}. Try again later."
        ) from error


@contextmanager
def disk_errors_as_problems() -> Iterator[None]:
    """Convert errors of the operating system to `StorageFull` or `StorageUnavailable`; log the latter."""
    try:
        with full_disk_as_problem():
            yield
    except OSError as error:
        logger.error("An upload was rejected, because the data directory cannot be written: %s", error)
        raise StorageUnavailable(
            f"The data directory cannot be written: {error.strerror}. Try again later.", retry_after=10
        ) from error


def limit_memory(allowance: int | None) -> None:
    """Let this process map `allowance` bytes beyond what it has mapped now; None for no limit.

    The libraries that are loaded map gigabytes of their own, so only what follows counts. Beyond the limit
    (RLIMIT_AS) allocations fail.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [_mapped() + allowance] if allowance is not None else []
    limits += [hard] if hard != resource.RLIM_INFINITY else []
    resource.setrlimit(resource.RLIMIT_AS, (min(limits, default=hard), hard))


def limit_files(size: int) -> None:
    """Let each file that this process writes, its output among them, have at most `size` bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
