"""Calibration mathematics: tensors in, tensors out; no HTTP, no files.

Names are imported when first used, so that a service which only predicts never loads what only fits need.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrators.calibrator import Calibrated as Calibrated
    from calibrators.calibrator import Calibrator as Calibrator
    from calibrators.fitting import FitResult as FitResult
    from calibrators.fitting import fit as fit
    from calibrators.method import methods as methods
    from calibrators.operator import Bounds as Bounds
    from calibrators.operator import box_constrained_softmax as box_constrained_softmax

_HOMES = {
    "Bounds": "calibrators.operator",
    "Calibrated": "calibrators.calibrator",
    "Calibrator": "calibrators.calibrator",
    "FitResult": "calibrators.fitting",
    "Metrics": "calibrators.evaluation.metrics",
    "box_constrained_softmax": "calibrators.operator",
    "evaluate": "calibrators.evaluation.metrics",
    "fit": "calibrators.fitting",
    "methods": "calibrators.method",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_HOMES)
