"""Errors of this package; every message quotes the offending row, class, sum or value.

CalibrationError (ValueError)
  x InvalidDataError      logits, probabilities or labels that are not valid
  x UnknownMethodError    a method name that is not one of `methods()`
  x MissingDataError      a method without the features, head, inputs or backbone that it requires
  x ArtifactError         bytes that are not a calibrator, or are damaged
  x ExportError           a calibrator that has no form in the format asked for

UserWarning
  x ValidationDataWarning what is probably wrong with validation data

Which known name an unknown one probably means, for error messages.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class CalibrationError(ValueError):
    """Base class of the errors that a caller can cause."""


class InvalidDataError(CalibrationError):
    """Logits or labels have the wrong shape, a value that is not finite, or a label out of range."""


class UnknownMethodError(CalibrationError):
    """No calibration method has this name; the message lists the valid names."""


class MissingDataError(CalibrationError):
    """The method requires more than logits, and it was not given."""


class ArtifactError(CalibrationError):
    """The bytes are not a calibrator's artifact, or they are damaged."""


class ExportError(CalibrationError):
    """The calibrator has no form in the format asked for."""


class ValidationDataWarning(UserWarning):
    """Validation data are probably not what the service will receive; the message starts with a code."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`, or None."""
    return next(iter(difflib.get_close_matches(name[:100], list(known)[:10_000], n=1)), None)


def hint(name: str, known: Iterable[str], then: str = "") -> str:
    """Return `; did you mean '...'?` for the nearest known name, or nothing; and what `then` says."""
    close = nearest(name, known)
    if close is None:
        return then and f"; {then}"
    return f"; did you mean {close!r}?{then and f' {then[0].upper()}{then[1:]}'}"
