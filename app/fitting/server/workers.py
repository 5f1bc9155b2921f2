"""The worker processes of the service, which all its models share: a task names its model."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

from boxcal.app.fitting.server.worker_process import Worker

CHECK_SECONDS = 120.0
COMPARE_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Workers:
    """One process each for checks, fits and comparisons, so that none waits for another kind.

    Attributes
    ----------
    turn
        Held by the fit that runs.
    """

    checks: Worker
    fits: Worker
    comparisons: Worker
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, fit_seconds: float, cores: Collection[int] | None = None) -> Self:
        """Return workers with the time limit of a fit; their processes start with the first task.

        They run on `cores`, or on those of this process.
        """
        seconds = (CHECK_SECONDS, fit_seconds, COMPARE_SECONDS)
        checks, fits, comparisons = (Worker(limit, cores) for limit in seconds)
        return cls(checks, fits, comparisons)
