"""Limits of uploads and fits, from the settings of the service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from boxcal.app.settings import limits

if TYPE_CHECKING:
    from boxcal.app.settings.service import Settings


@dataclass(frozen=True, slots=True)
class FitLimits:
    """Limits of uploads and fits.

    Attributes
    ----------
    upload_bytes
        Largest upload, as sent, and largest total of its arrays, as stored.
    memory_bytes
        Memory that a fit may allocate.
    seconds
        Time limit of a fit.
    cores
        On which checks and fits run; None for those of this process.
    """

    upload_bytes: int
    memory_bytes: int
    seconds: float
    cores: frozenset[int] | None = None

    @classmethod
    def of(cls, settings: Settings, cores: frozenset[int] | None = None) -> Self:
        """Return the limits of the service's settings."""
        return cls(limits.MAX_UPLOAD_BYTES, settings.fit_memory_bytes, limits.FIT_SECONDS, cores)
