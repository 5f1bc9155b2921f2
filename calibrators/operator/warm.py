"""Load the compiled loops that a service calls, before its first request."""

import numpy as np

from boxcal.calibrators.operator.ranking import most_probable
from boxcal.calibrators.temperature_fast_path import TemperatureRows, solve_rows


def warm_arrays() -> None:
    """Call what a service calls on arrays: the operator with one box or bounds by class; a ranking."""
    rows = np.zeros((2, 3))
    for upper in (np.full(1, 0.5), np.full(3, 0.5)):
        solve_rows(rows, np.zeros_like(upper), upper)
    TemperatureRows(1.0, 0.0, 1.0, 3).summarised(rows)
    most_probable(np.full(3, 1 / 3), np.full(3, 1 / 3), np.empty(2, np.int64))
