"""Errors of fits and of the check of an upload, as leaves of the service's error tree.

BoxcalError
  + UnsupportedMediaType     415
  |   - UnknownUploadFormat  415  none of the formats that `/fit` reads
  + InvalidRequest           422
  |   - InvalidUpload        422  an invalid validation set; the detail quotes the array, row and value
  |   - UnknownMethod        422  unknown method, or its requirements are missing
  + Conflict                 409
  |   - FitAlreadyOver       409  the fit has ended and cannot be cancelled
  |   - FitElsewhere         409  another replica runs the fit
  + Unavailable              503
      - FitQueueFull         503  too many fits or uploads

Each message quotes the offending value and the accepted values.
"""

from boxcal.app.fitting.disk_errors import StorageFull, UploadTooLarge
from boxcal.app.http.problems import (
    BoxcalError,
    InvalidParameter,
    InvalidRequest,
    MalformedBody,
    Unavailable,
    UnsupportedMediaType,
)
from boxcal.app.registry.errors import Conflict


class UnknownUploadFormat(UnsupportedMediaType):
    """The uploaded file has none of the formats that `/fit` reads."""

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

TABLE_REFUSALS: dict[str, type[BoxcalError]] = {
    leaf.type: leaf for leaf in (MalformedBody, InvalidParameter, UploadTooLarge, StorageFull)
}
"""Errors that reading a table of labels can return, by `type`."""
