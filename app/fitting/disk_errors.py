"""Errors of the operating system about the data directory, as problems of the request."""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from boxcal.app.http.problems import StorageFull, StorageUnavailable

logger = logging.getLogger("boxcal")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def full_disk_as_problem() -> Iterator[None]:
    """Convert errors of the operating system about a full disk to `StorageFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
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
