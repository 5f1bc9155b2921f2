"""The one reference that ties the two paths together: refits put a calibrator in, predictions read it out.

A request reads `current` once and uses that object to the end, so that its probabilities and the version it
names belong together whatever is activated meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from boxcal.calibrators.calibrator import Calibrator


@dataclass(frozen=True, slots=True)
class ServedCalibrator:
    """A calibrator as the service uses it: checked, warmed, and tied to its version in the registry.

    Attributes
    ----------
    version
        Its number in the registry; 0 is `uncalibrated`.
    method
        The name it was fitted under, such as ``ts+pb``.
    calibrator
        The map from logits to probabilities.
    reads
        What the calibrator takes: `logits`, `features` or `inputs`.
    """

    version: int
    method: str
    calibrator: Calibrator
    reads: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", self.calibrator.reads)


class ActiveCalibrator:
    """Holds the active calibrator; replacing it is one assignment, so no reader sees half of two.

    Attributes
    ----------
    current
        The active calibrator; read it once per request.
    """

    def __init__(self, served: ServedCalibrator) -> None:
        self.current = served

    def swap(self, new: ServedCalibrator) -> ServedCalibrator:
        """Activate `new` and return the one it replaces, which requests under way may still hold."""
        old, self.current = self.current, new
        return old
