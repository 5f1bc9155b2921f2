"""What passes over the line between the service and the process in which fits run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from boxcal.app.fitting.image_sets import BackboneSource, ImageSet
from boxcal.app.fitting.validation_set import ValidationSet
from boxcal.app.registry.records import FittedCalibrator


@dataclass(frozen=True, slots=True)
class FitTask:
    """To the process: what to do.

    Attributes
    ----------
    source
        The backbone, for images.
    against
        Artifact of the active calibrator, which the report compares with; None for `uncalibrated`.
    known
        Sketch of the data that it was fitted to, from its report; None where there is none.
    """

    data: ValidationSet | ImageSet
    source: BackboneSource
    method: str
    against: bytes | None
    known: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Advanced:
    """From the process: the fit is `progress` (0 to 1) through, and doing what `stage` says."""

    progress: float
    stage: str


@dataclass(frozen=True, slots=True)
class Refused:
    """From the process: there is no calibrator; `trace` is for the log, empty where the data are at fault."""

    reason: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class FitOutcome:
    """From the process: the calibrator with its papers, and the report's verdict for the gate."""

    fitted: FittedCalibrator
    is_better: bool
