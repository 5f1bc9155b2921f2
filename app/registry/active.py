"""The active calibrator: fits and activations replace it, predictions read it.

A request reads `current` once and uses that object to the end, so that its probabilities and the version it
names belong together, whatever is activated meanwhile.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from boxcal.calibrators.array_calibrator import ArrayCalibrator


@dataclass(frozen=True, slots=True)
class ServedCalibrator:
    """A calibrator, checked and warmed, with its version in the registry."""

    version: int  # Its number in the registry; 0 is `uncalibrated`
    method: str  # The name it was fitted under, such as ``ts+pb``
    calibrator: ArrayCalibrator  # The map from logits to probabilities
    reads: str = field(init=False)  # What the calibrator takes: `logits`, `features` or `inputs`

    def __post_init__(self) -> None:
        object.__setattr__(self, "reads", self.calibrator.reads)


class ActiveCalibrator:
    def __init__(self, served: ServedCalibrator, activation: int = 0) -> None:
        self.current = served
        self.activation = activation
        self._lock = threading.Lock()

    def swap(self, new: ServedCalibrator, activation: int) -> bool:
        """Activate `new`, unless a later activation came first; returns whether it did.

        Threads may come here in another order than the registry committed their activations in.
        """
        with self._lock:
            if activation <= self.activation:
                return False
            self.current, self.activation = new, activation
            return True
