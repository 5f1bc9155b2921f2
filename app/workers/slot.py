"""The place of a serving process among those of one service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Slot:
    """One of the serving processes.

    Attributes
    ----------
    index
        0 is the process that runs the fits and folds the feedback log for all.
    count
        How many processes serve.
    folder
        Where they leave their metrics for each other.
    cores
        Those of the service, of which this process may have a part; None where that is not known.
    """

    index: int
    count: int
    folder: Path
    cores: frozenset[int] | None = None

    @property
    def leads(self) -> bool:
        """Whether this process does what one process does for all."""
        return self.index == 0
