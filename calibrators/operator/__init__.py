"""The box-constrained softmax: the last step of every calibrator, from logits and bounds to probabilities.

Names are imported when first used: the compiled CPU engine does not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boxcal.calibrators.operator.bounds import Bounds as Bounds
    from boxcal.calibrators.operator.bounds import EffectiveBounds as EffectiveBounds
    from boxcal.calibrators.operator.box_softmax import box_constrained_softmax as box_constrained_softmax

_HOMES = {
    "Bounds": "bounds",
    "EffectiveBounds": "bounds",
    "box_constrained_softmax": "box_softmax",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Import a name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
