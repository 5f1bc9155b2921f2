"""The one reference that ties the two paths together: refits put a calibrator in, predictions read it out.

A request reads `current` once and uses that object to the end, so that its probabilities and the version it
names belong together whatever is activated meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    version: int
    method: str
    calibrator: Calibrator


class ActiveCalibrator:
    """Holds the active calibrator; replacing it is one assignment, so no reader sees half of two."""

    def __init__(self, served: ServedCalibrator) -> None:
        self._current = served

    @property
    def current(self) -> ServedCalibrator:
        """The active calibrator; read it once per request."""
        return self._current

    def swap(self, new: ServedCalibrator) -> ServedCalibrator:
        """Activate `new` and return the one it replaces, which requests under way may still hold."""
        old, self._current = self._current, new
        return old
