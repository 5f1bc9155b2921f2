"""Errors of uploads and fits, as leaves of the service's error tree.

BoxcalError
  - UploadStalled            408  the upload is slower than the minimum rate
  + PayloadTooLarge          413
  |   - UploadTooLarge       413  more bytes than the limit, as sent or as stored
  + UnsupportedMediaType     415
  |   - UnknownUploadFormat  415  not `.npz`, `.parquet` or `.zip`
  + InvalidRequest           422
  |   - InvalidUpload        422  an invalid validation set; the detail quotes the array, row and value
  |   - UnknownMethod        422  unknown method, or its requirements are missing
  + Conflict                 409
  |   - FitAlreadyOver       409  the fit has ended and cannot be cancelled
  |   - FitElsewhere         409  another replica runs the fit
  + Unavailable              503
  |   - FitQueueFull         503  too many fits or uploads
  + StorageFull              507  no space left in the data directory

Each message quotes the offending value and the accepted values.
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
    """The upload is slower than the minimum rate."""

    status = 408
    type = "upload-stalled"
    title = "Upload stalled"


class UploadTooLarge(PayloadTooLarge):
    """The upload has more bytes than the limit, as sent or as stored."""

    type = "upload-too-large"
    title = "Upload too large"


class UnknownUploadFormat(UnsupportedMediaType):
    """The uploaded file is not `.npz`, `.parquet` or `.zip`."""

    type = "unknown-upload-format"
    title = "Unsupported file format"


class InvalidUpload(InvalidRequest):
    """The uploaded file contains no valid validation set."""

    type = "invalid-upload"
    title = "Invalid validation set"


class UnknownMethod(InvalidRequest):
    """No method has this name, or the upload or backbone does not provide its requirements."""

    type = "unknown-method"
    title = "Unsupported method"


class FitAlreadyOver(Conflict):
    """The fit has ended and cannot be cancelled."""

    type = "fit-already-over"
    title = "Fit already ended"


class FitElsewhere(Conflict):
    """Another replica runs the fit; only that replica can cancel it."""

    type = "fit-elsewhere"
    title = "Fit runs elsewhere"


class FitQueueFull(Unavailable):
    """Too many fits are waiting, or too many uploads are arriving."""

    type = "fit-queue-full"
    title = "Fit queue full"


class StorageFull(BoxcalError):
    """The data directory has no space left."""

    status = 507
    type = "storage-full"
    title = "Insufficient storage"


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
"""Errors that the check of an upload can return, by `type`."""


@contextmanager
def full_disk_as_problem() -> Iterator[None]:
    """Convert errors of the operating system about a full disk to `StorageFull`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StorageFull(
            f"No space left in the data directory: {error.strerror}. Try again later."
        ) from error
