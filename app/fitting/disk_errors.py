"""Errors of an arriving upload and of the data directory, as leaves of the service's error tree.

BoxcalError
  - UploadStalled            408  the upload is slower than the minimum rate
  + PayloadTooLarge          413
  |   - UploadTooLarge       413  more bytes than the limit, as sent or as stored
  + Unavailable              503
  |   - StorageUnavailable   503  the data directory cannot be written
  - StorageFull              507  no space left in the data directory
"""

import errno
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from boxcal.app.http.problems import BoxcalError, PayloadTooLarge, Unavailable

logger = logging.getLogger("boxcal")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UploadStalled(BoxcalError):
    """The upload is slower than the minimum rate."""

    status = 408
    type = "upload-stalled"
    title = "Upload stalled"


class UploadTooLarge(PayloadTooLarge):
    """The upload has more bytes than the limit, as sent or as stored."""

    type = "upload-too-large"
    title = "Upload too large"


class StorageUnavailable(Unavailable):
    """The data directory cannot be written; the server log has the reason."""

    type = "storage-unavailable"
    title = "Storage unavailable"


class StorageFull(BoxcalError):
    """The data directory has no space left."""

    status = 507
    type = "storage-full"
    title = "Insufficient storage"


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
