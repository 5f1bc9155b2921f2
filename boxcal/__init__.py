"""boxcal: calibrated classifier probabilities inside hard bounds.

The public names are loaded on first use, so `import boxcal` needs neither torch nor the server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boxcal.app.client import AsyncBoxcalClient, BoxcalClient
    from boxcal.calibrators import (
        Bounds,
        BoxCalibratedClassifier,
        BoxCalibrator,
        Calibrated,
        Calibrator,
        FitResult,
        Metrics,
        box_constrained_softmax,
        evaluate,
        fit,
        methods,
    )

__all__ = [
    "AsyncBoxcalClient",
    "Bounds",
    "BoxCalibratedClassifier",
    "BoxCalibrator",
    "BoxcalClient",
    "Calibrated",
    "Calibrator",
    "FitResult",
    "Metrics",
    "box_constrained_softmax",
    "evaluate",
    "fit",
    "methods",
]

CLIENTS = ("AsyncBoxcalClient", "BoxcalClient")


def __getattr__(name: str) -> Any:
    """Import the module of a public name when the name is first read."""
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - slower to import than all of this

        return version("boxcal")
    if name not in __all__:
        raise AttributeError(f"module 'boxcal' has no attribute {name!r}")
    module = import_module("boxcal.app.client" if name in CLIENTS else "boxcal.calibrators")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
