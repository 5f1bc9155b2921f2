"""What the refit path refuses, as leaves of the service's error tree.

BoxcalError
  - UploadStalled            408  nothing came for a while
  + PayloadTooLarge          413
  |   - UploadTooLarge       413  more bytes than the limit, packed or unpacked
  + UnsupportedMediaType     415
  |   - UnknownUploadFormat  415  neither `.npz` nor `.parquet`
  + InvalidRequest           422
  |   - InvalidUpload        422  a validation set that cannot be fitted; names the array, row and value
  |   - UnknownMethod        422  no calibration method has this name
  + Conflict                 409
  |   - FitAlreadyOver       409  too late to cancel
  |   - FitElsewhere         409  another replica runs it
  + Unavailable              503
  |   - FitQueueFull         503  as many fits are waiting as may
  + StorageFull              507  no room for the upload in the data folder

Each says what was sent and what would have been accepted.
"""

from boxcal.app.errors import BoxcalError, InvalidRequest, PayloadTooLarge, Unavailable, UnsupportedMediaType
from boxcal.app.registry.errors import Conflict


class UploadStalled(BoxcalError):
    """Nothing of the upload came for a while, and others wait for its place."""

    status = 408
    type = "upload-stalled"
    title = "The upload stalled"


class UploadTooLarge(PayloadTooLarge):
    """The upload has more bytes than the limit, as sent or unpacked."""

    type = "upload-too-large"
    title = "The upload is too large"


class UnknownUploadFormat(UnsupportedMediaType):
    """The uploaded file is neither `.npz` nor `.parquet`."""

    type = "unknown-upload-format"
    title = "The file format is not supported"


class InvalidUpload(InvalidRequest):
    """The uploaded file holds no validation set that can be fitted."""

    type = "invalid-upload"
    title = "The validation set is not valid"


class UnknownMethod(InvalidRequest):
    """No method has this name, or it reads what the service does not give it."""

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
    """As many fits are waiting as may."""

    type = "fit-queue-full"
    title = "Too many fits are waiting"


class StorageFull(BoxcalError):
    """The data folder has no room for the upload."""

    status = 507
    type = "storage-full"
    title = "The data folder is full"
