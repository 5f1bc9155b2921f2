"""Calibration mathematics: tensors in, tensors out; no HTTP, no files.

Names are imported when first used, so that a service which only predicts never loads what only fits need.
"""

if __name__ != "boxcal.calibrators":  # the folder itself, from the folder of the project
    raise ImportError("import boxcal.calibrators: 'calibrators' would be a second copy of it")

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boxcal.calibrators.calibrator import Calibrated as Calibrated
    from boxcal.calibrators.calibrator import Calibrator as Calibrator
    from boxcal.calibrators.estimator import BoxCalibratedClassifier as BoxCalibratedClassifier
    from boxcal.calibrators.estimator import BoxCalibrator as BoxCalibrator
    from boxcal.calibrators.fitting import FitResult as FitResult
    from boxcal.calibrators.fitting import fit as fit
    from boxcal.calibrators.method import methods as methods
    from boxcal.calibrators.operator import Bounds as Bounds
    from boxcal.calibrators.operator import box_constrained_softmax as box_constrained_softmax

_HOMES = {
    "Bounds": "boxcal.calibrators.operator",
    "BoxCalibratedClassifier": "boxcal.calibrators.estimator",
    "BoxCalibrator": "boxcal.calibrators.estimator",
    "Calibrated": "boxcal.calibrators.calibrator",
    "Calibrator": "boxcal.calibrators.calibrator",
    "FitResult": "boxcal.calibrators.fitting",
    "Metrics": "boxcal.calibrators.evaluation.metrics",
    "box_constrained_softmax": "boxcal.calibrators.operator",
    "evaluate": "boxcal.calibrators.evaluation.metrics",
    "fit": "boxcal.calibrators.fitting",
    "methods": "boxcal.calibrators.method",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        if find_spec("numba") is None:  # some would miss it no sooner than they compute
            raise ModuleNotFoundError(name="numba")
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "boxcal").startswith("boxcal"):
            raise
        extra = "serve" if error.name == "torch" else "calibrators"
        hint = f"boxcal.{name} needs the package {error.name}: pip install 'boxcal[{extra}]'"
        raise ModuleNotFoundError(hint, name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_HOMES)
