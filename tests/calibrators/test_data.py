import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.errors import InvalidDataError, UnknownMethodError
from boxcal.calibrators.evaluation.report import report_on
from tests.calibrators.samples import everything

GOOD = np.zeros((4, 3))
LABELS = np.array([0, 1, 2, 0])


def changed(row: int, column: int, value: float) -> np.ndarray:
    logits = GOOD.copy()
    logits[row, column] = value
    return logits


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (changed(2, 1, math.nan), LABELS, "row 2, class 1 is nan"),
        (changed(3, 0, math.inf), LABELS, "row 3, class 0 is inf"),
        (
            np.ma.masked_equal(changed(2, 1, 5.0), 5.0),
            LABELS,
            "logits has masked values: leave these rows out",
        ),
        (GOOD, np.ma.masked_equal(LABELS, 2), "labels has masked values"),
        (np.zeros(4), LABELS, r"shape \(N, K\), not \(4,\)"),
        (np.zeros((4, 1)), np.zeros(4, int), "K = 1"),
        (GOOD[:1], LABELS[:1], "N = 1"),
        (GOOD, LABELS[:3], "4 rows of logits but 3 labels"),
        (GOOD, LABELS[:, None], r"shape \(N,\), not \(4, 1\)"),
        (GOOD, np.eye(3)[LABELS], r"not \(4, 3\); of a one-hot encoding take `argmax\(axis=1\)`"),
        (GOOD, np.array([0, 1, 3, 0]), "indices 0 to 2; row 2 is 3$"),
        (GOOD, LABELS + 1, "row 2 is 3; they go from 1: subtract 1"),
        (GOOD, np.array([0, -1, 2, 0]), "row 1 is -1"),
        (GOOD, np.array([0, 1, 0.5, 0]), "row 2 is 0.5"),
        (GOOD, np.array([0, 1, 2, math.nan]), "row 3 is nan"),
        (GOOD, np.array(["a", "b", "c", "d"]), "numbers, not <U1: class indices, 0 to 2; `fit` takes names"),
        ([[1.0, 2.0], [3.0]], [0, 1], "not a rectangular array"),
    ],
)
def test_data_that_no_fit_can_use_is_refused(logits: object, labels: object, message: str) -> None:
    with pytest.raises(InvalidDataError, match=message):
        fit("ts", logits, labels)


@pytest.mark.parametrize("method", ["vector", "auto"])
def test_copies_of_one_row_leave_nothing_to_judge_a_fit_on(method: str) -> None:
    logits, labels = torch.arange(3.0).repeat(40, 1), [0] * 40
    with pytest.raises(InvalidDataError, match="all 40 rows are copies of one; a fit is judged on rows"):
        fit(method, logits, labels)
    with pytest.raises(InvalidDataError, match="all 40 rows are copies of one"):
        report_on("ts", check_validation_set(logits, labels))


def test_an_unknown_method_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        UnknownMethodError, match=r"^no method 'tss'; did you mean 'ts'\? There are auto, unc"
    ):
        fit("tss", GOOD, LABELS)
    with pytest.raises(UnknownMethodError, match=r"^no method 'magic'; there are auto, uncalibrated, fc, ta"):
        fit("magic", GOOD, LABELS)
    with pytest.raises(UnknownMethodError, match=r"^no method 'None'; there are auto, uncalibrated"):
        fit(None, GOOD, LABELS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^budget_seconds is nan, not at least 0$"):
        fit("auto", GOOD, LABELS, budget_seconds=float("nan"))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Temperature Scaling", "ts"),
        ("temperature", "ts"),
        ("TS+PB", "ts+pb"),
        ("matrix_scaling", "matrix"),
        ("Platt scaling", "vector"),
        ("sigmoid", "vector"),
        ("Dirichlet-Calibration", "dirichlet"),
    ],
)
def test_a_name_of_another_library_is_understood(name: str, meant: str) -> None:
    with pytest.raises(UnknownMethodError, match=rf"did you mean '{re.escape(meant)}'\?"):
        fit(name, GOOD, LABELS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_floating_dtype_is_taken(dtype: torch.dtype) -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=dtype)
    assert math.isfinite(fit("pb", logits, torch.tensor([0, 1, 1])).nll)


@pytest.mark.parametrize("method", ["fc", "ta", "ta+lb"])
def test_a_calibrator_refuses_another_width(method: str) -> None:
    data = everything(60, 3)
    calibrator = fit(method, data.logits, data.labels, **data.extras()).calibrator
    with pytest.raises(InvalidDataError, match=r"features of shape \(N, 9\), not \(5, 3\)"):
        calibrator(torch.zeros(5, 3))
    with pytest.raises(InvalidDataError, match=r"shape \(N, 3\), not \(2, 4\)"):
        Calibrator.uncalibrated(3)(torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"features": np.zeros((3, 2))}, r"features must have shape \(4, D\), not \(3, 2\)"),
        ({"features": np.full((4, 2), math.nan)}, r"features must be finite; the entry at \(0, 0\) is nan"),
        (
            {"features": np.zeros((4, 2)), "head": (np.zeros((3, 5)), np.zeros(3))},
            r"weight must have shape \(3, 2\), not \(3, 5\)",
        ),
        ({"inputs": np.zeros((5, 1, 2, 2))}, "4 rows of logits but 5 inputs"),
        ({"sample_weight": [1.0, 1.0, 1.0, -1.0]}, "row 3 is -1.0"),
        ({"sample_weight": [1.0, 1.0, 1.0, math.nan]}, "row 3 is nan"),
        ({"sample_weight": [0.0] * 4}, "must not be zero for every sample"),
        ({"sample_weight": [1.0]}, "must have shape"),
        ({"groups": ["a", "b", "c"]}, "shape"),
        ({"groups": ["one"] * 4}, "all samples belong to the group 'one'"),
        ({"groups": [1.0, 1.0, 1.0, math.nan]}, "row 3"),
        ({"groups": ["a", "b", None, "c"]}, "groups must be numbers or texts; row 2 is None"),
    ],
)
def test_what_comes_beside_logits_must_fit(extras: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidDataError, match=message):
        fit("ts", GOOD, LABELS, **extras)


def test_bounds_that_are_none_are_refused() -> None:
    wrong: Any = (0.1, 0.5)
    with pytest.raises(TypeError, match=r"bounds must be boxcal\.Bounds\(lower, upper\), not tuple"):
        fit("ts", GOOD, LABELS).calibrator(torch.from_numpy(GOOD), wrong)
