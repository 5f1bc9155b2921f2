"""Errors of the registry, as leaves of the service's error tree.

BoxcalError
  + NotFound                404
  |   - CalibratorNotFound  404  no calibrator has this version
  |   - FitNotFound         404  no fit has this id
  |   - CalibratorPruned    410  its artifact and report were deleted
  |   - NoReport            404  version 0 was never fitted: no report, no diagram
  + Conflict                409  the request conflicts with the registry
  |   - ForeignCalibrator   409  the calibrator was fitted to another backbone
  |   - NothingToRollBack   409  there is no earlier activation
  |   - FitLost             409  this process may no longer change the fit
  |   - TooFewPredictions   409  too few predictions for an estimate of the class frequencies
  + Unavailable             503
  |   + RegistryUnavailable 503  the database does not answer
  |   |   - RegistryFull    507  the disk of the database is full
  + RegistryUnusable        500  this release cannot use the database
  - DamagedArtifact         500  the stored artifact does not match its checksum

Each message names the version, the fit or the backbone.
"""

from boxcal.app.http.problems import BoxcalError, NotFound, Unavailable


class CalibratorNotFound(NotFound):
    """No calibrator has this version."""

    type = "calibrator-not-found"
    title = "Calibrator not found"


class FitNotFound(NotFound):
    """No fit has this id."""

    type = "fit-not-found"
    title = "Fit not found"


class CalibratorPruned(NotFound):
    """The artifact and the report of the calibrator were deleted."""

    status = 410
    type = "calibrator-pruned"
    title = "Calibrator pruned"


class NoReport(NotFound):
    """The calibrator has no report: it was never fitted."""

    type = "no-report"
    title = "No report"


class Conflict(BoxcalError):
    """The request conflicts with the registry."""

    status = 409
    type = "conflict"
    title = "Conflict"


class ForeignCalibrator(Conflict):
    """The calibrator was fitted to another backbone."""

    type = "foreign-calibrator"
    title = "Calibrator of another backbone"


class NothingToRollBack(Conflict):
    """There is no earlier activation to roll back to."""

    type = "nothing-to-roll-back"
    title = "Nothing to roll back"


class FitLost(Conflict):
    """The fit has ended, or another process or attempt owns it; nothing was changed."""

    type = "fit-lost"
    title = "The fit belongs to another process"


class RegistryUnavailable(Unavailable):
    """The database does not answer; what is active in memory still serves."""

    type = "registry-unavailable"
    title = "The registry does not answer"

    def __init__(self, detail: str, *, retry_after: int = 2) -> None:
        super().__init__(detail, retry_after=retry_after)


class RegistryFull(RegistryUnavailable):
    """The disk of the database is full; nothing was changed."""

    status = 507
    type = "storage-full"
    title = "Insufficient storage"


class RegistryUnusable(BoxcalError):
    """The database cannot be used by this release."""

    type = "registry-unusable"
    title = "Registry unusable"


class DamagedArtifact(BoxcalError):
    """The stored artifact does not match its checksum."""

    type = "damaged-artifact"
    title = "Damaged artifact"


class TooFewPredictions(Conflict):
    """Too few predictions are kept for an estimate of the class frequencies."""

    type = "too-few-predictions"
    title = "Too few predictions"
