"""The comparison of calibrators: what counts as an opponent, ties, and a method that a set cannot have."""

import numpy as np
import pytest

from benchmarks.calarena import table, win_rate

ROWS = [
    {"uncalibrated": 0.5, "auto": 0.2, "sms": 0.3, "SMS": 0.3, "TS": 0.4},
    {"uncalibrated": 0.4, "auto": 0.4, "sms": 0.2, "SMS": 0.5, "TS": 0.3},
]


def figures(*without: str) -> dict[str, list[float]]:
    kept = [{name: loss for name, loss in row.items() if name not in without} for row in ROWS]
    rows = [{"losses": row, "seconds": dict.fromkeys(row, 2.0) | {"sms": 1.0}} for row in kept]
    lines = [line.strip("| ").split(" | ") for line in table(rows).splitlines()[2:]]
    return {name: [float(one) for one in rest] for name, *rest in lines}


def test_methods_are_compared_with_calarenas_and_not_with_each_other() -> None:
    """Of six duels with `uncalibrated`, `SMS` and `TS`, `auto` wins four and draws one."""
    assert figures()["auto"] == [0.75, 0.3, 0.1, 0, 2]
    assert figures()["SMS"] == [0.5, 0.4, 0.2, 50, 2]
    # Without any of CalArena's, against `uncalibrated` and `sms`.
    assert figures("SMS", "TS")["auto"][0] == 0.625


def test_a_method_that_fitted_no_set_is_in_no_duel() -> None:
    assert win_rate(np.array([1.0, 2.0]), np.array([[1.0, 3.0], [0.0, np.nan]])) == 0.5
    found = win_rate(np.array([1.0, np.nan]), np.array([[2.0], [3.0]]))
    assert found == pytest.approx(1.0)
