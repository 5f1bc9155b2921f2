"""Labels that look independent of the logits: the verdict must hold, be they right or wrong."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.evaluate import _with_true_labels
from boxcal.calibrators.evaluation.outcomes import outcomes
from boxcal.calibrators.evaluation.report import cross_fitted_report
from tests.calibrators.samples import softmax

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


def drawn(temperature: float, share: float, count: int = 800) -> tuple[Floats, Labels, Floats]:
    """Logits, labels of which a share is drawn at random, and the true probabilities."""
    rng = np.random.default_rng(3)
    logits = 3.0 * rng.normal(size=(count, 10))
    truth = softmax(logits)
    labels = (truth.cumsum(axis=1) < rng.random((count, 1))).sum(axis=1).clip(max=9)
    labels = np.where(rng.random(count) < share, rng.integers(0, 10, count), labels)
    return temperature * logits, labels, truth


@pytest.mark.parametrize(("temperature", "severity"), [(0.4, "warning"), (1.2, "serious"), (3.0, "warning")])
def test_labels_that_look_unrelated_are_serious_where_the_verdict_depends_on_them(
    temperature: float, severity: str
) -> None:
    logits, labels, _ = drawn(temperature, 0.06)
    report = cross_fitted_report("ts", logits, labels)
    assert report.is_better
    (found,) = [one for one in report.warnings if one.code == "unrelated_labels"]
    assert found.severity == severity
    assert ("better than those of `uncalibrated` all the same" in found.message) is (severity == "warning")


def test_outcomes_without_unrelated_labels_are_estimated_without_bias() -> None:
    logits, labels, truth = drawn(1.5, 0.2, 40_000)
    scored = outcomes(softmax(logits), labels)
    found = _with_true_labels(scored, 0.2)
    p = softmax(logits)
    expected = {
        "nll": -(truth * np.log(p)).sum(axis=1),
        "brier": ((p - truth) ** 2).sum(axis=1) + (truth * (1 - truth)).sum(axis=1),
        "correct": truth[np.arange(len(p)), scored.predicted],
    }
    for name, values in expected.items():
        error = getattr(found, name) - values
        assert abs(error.mean()) < 4 * error.std() / np.sqrt(len(error)), name
        assert abs((getattr(scored, name) - values).mean()) > 10 * error.std() / np.sqrt(len(error)), name
