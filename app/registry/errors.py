"""What the registry refuses, as leaves of the service's error tree.

BoxcalError
  + NotFound                404
  |   - CalibratorNotFound  404  no calibrator has this version
  |   - FitNotFound         404  no fit has this id
  |   - NoReport            404  version 0 was never fitted: no report, no image
  + Conflict                409  what is asked contradicts what is recorded
  |   - ForeignCalibrator   409  the calibrator was fitted to another backbone
  |   - NothingToRollBack   409  no activation came before the active one
  + RegistryUnusable        500  the database cannot be used by this release
  - DamagedArtifact         500  the recorded bytes are not those that were recorded

Each names the version, the fit or the backbone it is about.
"""

from boxcal.app.errors import BoxcalError, NotFound


class CalibratorNotFound(NotFound):
    """No calibrator has this version."""

    type = "calibrator-not-found"
    title = "No such calibrator"


class FitNotFound(NotFound):
    """No fit has this id."""

    type = "fit-not-found"
    title = "No such fit"


class NoReport(NotFound):
    """The calibrator was never fitted, so it has neither report nor image."""

    type = "no-report"
    title = "The calibrator has no report"


class Conflict(BoxcalError):
    """What is asked contradicts what is recorded."""

    status = 409
    type = "conflict"
    title = "The request contradicts the record"


class ForeignCalibrator(Conflict):
    """The calibrator was fitted to the logits of another backbone."""

    type = "foreign-calibrator"
    title = "The calibrator belongs to another backbone"


class NothingToRollBack(Conflict):
    """No activation came before the active one."""

    type = "nothing-to-roll-back"
    title = "There is nothing to roll back to"


class RegistryUnusable(BoxcalError):
    """The database cannot be used by this release."""

    type = "registry-unusable"
    title = "The registry cannot be used"


class DamagedArtifact(BoxcalError):
    """The bytes in the registry are not the ones that were recorded."""

    type = "damaged-artifact"
    title = "The recorded calibrator is damaged"
