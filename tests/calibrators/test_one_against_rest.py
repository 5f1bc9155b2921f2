"""`beta` and `isotonic` fit each class to the optimum."""

import numpy as np
import pytest
from scipy.special import expit, log_softmax, softmax
from sklearn.isotonic import IsotonicRegression

from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.maps.beta import FLOOR, RIDGE, BetaCalibration
from boxcal.calibrators.maps.per_class import IsotonicCalibration
from tests.calibrators.samples import Set

KINDS = ("ordinary", "few", "separable", "extreme", "reversed", "tied")


def sample(kind: str) -> Set:
    rng = np.random.default_rng(len(kind))
    logits = 2.0 * rng.normal(size=(50 if kind == "few" else 400, 3))
    if kind == "tied":
        logits = np.round(logits)
    labels = (logits / 1.7 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    if kind == "separable":
        labels = logits.argmax(axis=1)
    if kind == "reversed":
        labels = logits.argmin(axis=1)
    return (300.0 * logits if kind == "extreme" else logits), labels


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_beta_is_stationary_but_for_weights_at_zero(kind: str, weighted: bool) -> None:
    """The loss is convex, so this is its minimum over weights of at least 0."""
    logits, labels = sample(kind)
    weights = np.random.default_rng(1).integers(1, 4, len(labels)) if weighted else np.ones(len(labels))
    model = BetaCalibration(3)
    model.solve(check_validation_set(logits, labels, sample_weight=weights), lambda _: None)
    counts = weights / weights.mean()
    for k in range(3):
        a, b, c = (values[k] for values in model.parameters.values())
        log_p = np.maximum(log_softmax(logits, axis=1)[:, k], FLOOR)
        log_rest = np.log(np.maximum(-np.expm1(log_p), 1e-16))
        surplus = counts * (expit(a * log_p - b * log_rest + c) - (labels == k))
        gradient = np.array([surplus @ log_p, -surplus @ log_rest, surplus.sum()]) + RIDGE * np.array(
            [a, b, 0]
        )
        size = np.abs(np.array([counts @ log_p, counts @ log_rest, counts.sum()]))
        assert min(a, b) >= 0.0
        for weight, slope, scale in zip((a, b, None), gradient, size, strict=True):
            assert slope >= -1e-5 * scale
            assert weight == 0.0 or slope <= 1e-5 * scale
    if kind == "reversed":
        assert model.parameters["log_weights"].max() == 0.0


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_isotonic_is_scikit_learns(kind: str, weighted: bool) -> None:
    logits, labels = sample(kind)
    weights = np.random.default_rng(1).integers(1, 4, len(labels)) if weighted else None
    model = IsotonicCalibration(3)
    p = softmax(logits, axis=1)
    for k in range(3):
        hits = (labels == k).astype(float)
        places, values = model.curve(p[:, k], hits, weights)
        theirs = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(p[:, k], hits, weights)
        at = np.concatenate([p[:, k], np.linspace(0, 1, 101)])
        np.testing.assert_allclose(np.interp(at, places, values), theirs.predict(at), atol=1e-9)
        assert len(places) <= 2 * len(np.unique(values))
