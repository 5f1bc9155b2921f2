"""Errors of uploads and fits, as leaves of the service's error tree.

BoxcalError
  - UploadStalled            408  the upload came slower than the minimum rate
  + PayloadTooLarge          413
  |   - UploadTooLarge       413  more bytes than the limit, as sent or as stored
  + UnsupportedMediaType     415
  |   - UnknownUploadFormat  415  neither `.npz` nor `.parquet` nor `.zip`
  + InvalidRequest           422
  |   - InvalidUpload        422  a validation set that cannot be fitted; names the array, row and value
  |   - UnknownMethod        422  no calibration method has this name, or what it reads is missing
  + Conflict                 409
  |   - FitAlreadyOver       409  too late to cancel
  |   - FitElsewhere         409  another replica runs it
  + Unavailable              503
  |   - FitQueueFull         503  as many fits are waiting as may
  + StorageFull              507  no space left in the data folder

Each quotes what was sent and what would have been accepted.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from boxcal.app.errors import (
    BoxcalError,
    InvalidParameter,
    InvalidRequest,
    MalformedBody,
    PayloadTooLarge,
    Unavailable,
    UnsupportedMediaType,
)
from boxcal.app.registry.errors import Conflict


class UploadStalled(BoxcalError):
    """The upload came slower than the minimum rate, and others wait for its slot."""

    status = 408
    type = "upload-stalled"
    title = "The upload stalled"


class UploadTooLarge(PayloadTooLarge):
    """The upload has more bytes than the limit, as sent or as stored."""

    type = "upload-too-large"
    title = "The upload is too large"


class UnknownUploadFormat(UnsupportedMediaType):
    """The uploaded file is neither `.npz` nor `.parquet` nor `.zip`."""

    type = "unknown-upload-format"
    title = "The file format is not supported"


class InvalidUpload(InvalidRequest):
    """The uploaded file holds no validation set that can be fitted."""

    type = "invalid-upload"
    title = "The validation set is not valid"


class UnknownMethod(InvalidRequest):
    """No method has this name, or the upload or the backbone does not give what it reads."""

    type = "unknown-method"
    title = "The method cannot be fitted here"


class FitAlreadyOver(Conflict):
    """The fit has ended, so it can no longer be cancelled."""

    type = "fit-already-over"
    title = "The fit is over"


class FitElsewhere(Conflict):
    """Another process that shares the registry runs the fit, and only that one can cancel it."""

    type = "fit-elsewhere"
    title = "Another replica runs the fit"


class FitQueueFull(Unavailable):
    """As many fits are waiting, or as many uploads are arriving, as may."""

    type = "fit-queue-full"
    title = "Too many fits are waiting"


class StorageFull(BoxcalError):
    """The data folder has no space left."""

    status = 507
    type = "storage-full"
    title = "The data folder is full"


REFUSALS: dict[str, type[BoxcalError]] = {
    leaf.type: leaf
    for leaf in (
        MalformedBody,
        UploadTooLarge,
        UnknownUploadFormat,
        InvalidUpload,
        InvalidParameter,
        UnknownMethod,
        StorageFull,
    )
}
"""What the check of an upload may refuse it with, by `type`."""


@contextmanager
def full_disk_as_problem() -> Iterator[None]:
    """Turn the operating system's errors about a full disk into `StorageFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StorageFull(f"No space left in the data folder: {error.strerror}. Try again later.") from error
