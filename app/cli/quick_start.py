"""What a process that serves does before its other imports, so that it is ready sooner and smaller."""

from __future__ import annotations

import gc
import sys


def prepare() -> None:
    """Stop garbage collection until the service is ready, and load the compiled engine without SciPy.

    Imports leave no garbage, but make collections look at all that they leave. numba imports SciPy's linear
    algebra, which the engine never calls.
    """
    gc.disable()
    hidden = sys.modules.setdefault("scipy", None) is None  # type: ignore[arg-type]
    try:
        from boxcal.calibrators.operator.warm import warm_arrays  # noqa: PLC0415 - not before this

        warm_arrays()
    finally:
        if hidden:
            del sys.modules["scipy"]
