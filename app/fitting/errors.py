"""Errors of `/fit` and `/fits`, as leaves of the service's error tree.

BoxcalError
  - UploadStalled            408  no data arrived for a while
  + PayloadTooLarge          413
  |   - UploadTooLarge       413  more bytes than the limit, compressed or uncompressed
  + UnsupportedMediaType     415
  |   - UnknownUploadFormat  415  not `.npz`, `.parquet` or `.zip`
  + InvalidRequest           422
  |   - InvalidUpload        422  an invalid validation set; the detail quotes the array, row and value
  |   - UnknownMethod        422  unknown method, or its requirements are missing
  + Conflict                 409
  |   - FitAlreadyOver       409  the fit has ended and cannot be cancelled
  |   - FitElsewhere         409  another replica runs the fit
  + Unavailable              503
  |   - FitQueueFull         503  the queue of fits is full
  + StorageFull              507  the data directory has no space for the upload

Each message quotes the offending value and the accepted values.
"""

from boxcal.app.errors import BoxcalError, InvalidRequest, PayloadTooLarge, Unavailable, UnsupportedMediaType
from boxcal.app.registry.errors import Conflict


class UploadStalled(BoxcalError):
    """No data of the upload arrived for a while."""

    status = 408
    type = "upload-stalled"
    title = "Upload stalled"


class UploadTooLarge(PayloadTooLarge):
    """The upload has more bytes than the limit, compressed or uncompressed."""

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
    """No method has this name, or its requirements are missing."""

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
    """The queue of fits is full."""

    type = "fit-queue-full"
    title = "Fit queue full"


class StorageFull(BoxcalError):
    """The data directory has no space for the upload."""

    status = 507
    type = "storage-full"
    title = "Insufficient storage"
