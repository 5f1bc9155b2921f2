"""What the calibration mathematics refuses: every error quotes the offending row, class, sum or value.

CalibrationError (ValueError)
  x InvalidDataError      logits, probabilities or labels that no calibrator can be fitted to or applied to
  x UnknownMethodError    a method name that is not one of `methods()`
  x MissingDataError      a method that needs features, a head, inputs or a backbone, without them
  x ArtifactError         bytes that are not a calibrator, or a damaged one
"""


class CalibrationError(ValueError):
    """Root of the errors that a caller can cause."""


class InvalidDataError(CalibrationError):
    """Logits or labels of a wrong shape, with a value that is not finite, or with a label out of range."""


class UnknownMethodError(CalibrationError):
    """No calibration method has this name; the message lists those that exist."""


class MissingDataError(CalibrationError):
    """The method reads something besides logits, and it was not given."""


class ArtifactError(CalibrationError):
    """The bytes are not a calibrator's artifact, or they are damaged."""
