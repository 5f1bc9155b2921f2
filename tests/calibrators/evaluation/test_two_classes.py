"""Two classes: observed to expected events, intercept, slope, Spiegelhalter's test, beside other software."""

import math

import numpy as np
import pytest
from scipy.stats import kstest
from sklearn.linear_model import LogisticRegression

from boxcal.calibrators.evaluation.figure import event_limits
from boxcal.calibrators.evaluation.outcomes import kept_rows, outcomes
from boxcal.calibrators.evaluation.reliability import reliability_svg
from boxcal.calibrators.evaluation.report import cross_fitted_report
from boxcal.calibrators.evaluation.two_classes import EventCalibration, event_calibration, event_curve
from boxcal.calibrators.label_checks import logistic
from tests.calibrators.samples import Floats, Labels


def judged(
    p: Floats, y: Labels, groups: Labels | None = None, weights: Floats | None = None
) -> EventCalibration:
    rows = kept_rows(np.column_stack([1.0 - p, p]))
    found = event_calibration(outcomes(rows, y, (p > 0.5).astype(np.int64), groups, weights=weights))
    assert found is not None
    return found


def drawn(count: int, *, slope: float = 1.0, intercept: float = 0.0, seed: int = 0) -> tuple[Floats, Labels]:
    """Probabilities of rare events, whose log odds are right after a line."""
    rng = np.random.default_rng(seed)
    odds = rng.normal(-2.0, 1.5, count)
    truth = 1.0 / (1.0 + np.exp(-(intercept + slope * odds)))
    return 1.0 / (1.0 + np.exp(-odds)), (rng.random(count) < truth).astype(np.int64)


def test_spiegelhalter_and_the_ratio_by_hand() -> None:
    """Of p = .2, .4, .8 and labels 0, 1, 1: (-.2 * .6 + .6 * .2 - .2 * .6) / sqrt(.0576 + .0096 + .0576)."""
    found = judged(np.array([0.2, 0.4, 0.8]), np.array([0, 1, 1]))
    assert found.z == pytest.approx(-0.12 / math.sqrt(0.1248), abs=1e-12)
    assert found.p_value == pytest.approx(0.734095, abs=1e-5)
    assert found.observed == 2.0
    assert found.expected == pytest.approx(1.4)
    assert found.ratio.value == pytest.approx(1 / 0.7)


def test_slope_is_that_of_scikit_learn_and_the_intercept_that_of_a_bisection() -> None:
    p, y = drawn(3000, slope=0.6, intercept=0.3)
    found, odds = judged(p, y), np.log(p / (1 - p))
    model = LogisticRegression(C=1e12, tol=1e-10).fit(odds[:, None], y)
    assert found.slope.value == pytest.approx(model.coef_[0, 0], abs=1e-5)
    low, high = -5.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (y - 1 / (1 + np.exp(-(odds + middle)))).sum() > 0 else (low, middle)
    assert found.intercept.value == pytest.approx(middle, abs=1e-8)
    assert found.slope.high < 0.75
    assert found.slope.low < 0.6 < found.slope.high


@pytest.mark.parametrize(("spread", "slope"), [(2.0, 0.2), (4.0, 0.3), (6.0, 0.3), (8.0, 0.05), (1.0, 4.0)])
def test_models_that_are_far_too_sure_have_a_slope(spread: float, slope: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        odds = spread * rng.normal(size=600)
        y = (rng.random(600) < 1.0 / (1.0 + np.exp(-slope * odds))).astype(np.int64)
        found = judged(1.0 / (1.0 + np.exp(-odds)), y).slope.value
        model = LogisticRegression(C=1e12, tol=1e-10).fit(odds[:, None], y)
        assert found == pytest.approx(model.coef_[0, 0], abs=1e-4)


def test_intervals_cover_the_truth_and_the_test_is_uniform() -> None:
    covered, values = np.zeros(3), []
    for seed in range(400):
        found = judged(*drawn(800, seed=seed))
        truths = ((found.ratio, 1.0), (found.intercept, 0.0), (found.slope, 1.0))
        covered += [one.low <= truth <= one.high for one, truth in truths]
        values.append(found.p_value)
    assert (covered / 400 > 0.925).all()
    assert (covered / 400 < 0.975).all()
    assert kstest(values, "uniform").pvalue > 0.001


def test_copies_in_groups_widen_the_intervals() -> None:
    p, y = drawn(500)
    once = judged(p, y)
    fourfold = judged(np.repeat(p, 4), np.repeat(y, 4), np.repeat(np.arange(500), 4))
    weighted = judged(p, y, weights=np.full(500, 1.0))
    for name in ("ratio", "intercept", "slope"):
        one, other = getattr(once, name), getattr(fourfold, name)
        # of t with 499 degrees of freedom, and 500 / 499 of the variance
        wider = 1.96472939 / 1.95996398 * math.sqrt(500 / 499)
        if name == "ratio":
            assert math.log(other.high / other.low) == pytest.approx(
                wider * math.log(one.high / one.low), rel=1e-6
            )
        else:
            assert other.high - other.low == pytest.approx(wider * (one.high - one.low), rel=1e-6)
        assert getattr(weighted, name) == one
    assert abs(fourfold.z) == pytest.approx(abs(once.z), rel=0.2)


def test_few_groups_widen_the_intervals_as_t_does() -> None:
    """Of 8 groups that share their errors, the slope's interval covered 1 in .80 of 800 sets; now in .88."""
    p, y = drawn(400)
    found = judged(p, y, np.arange(400) % 8)
    scores = np.stack([np.ones(400), np.log(p / (1 - p))], 1)
    fitted = logistic(scores, np.zeros(400), y.astype(float), np.ones(400))
    assert fitted is not None
    sums = np.stack([((y - fitted.probabilities)[:, None] * scores)[k::8].sum(0) for k in range(8)])
    sandwich = fitted.covariance @ (sums.T @ sums) @ fitted.covariance
    # 2.364624 is the 97.5 % quantile of t with 7 degrees of freedom
    half = 2.364624 * math.sqrt(8 / 7 * sandwich[1, 1])
    assert found.slope.high - found.slope.value == pytest.approx(half, rel=1e-6)


def test_one_class_separated_classes_and_probabilities_of_0_and_1_are_judged() -> None:
    for labels in ([0, 0, 0, 0], [1, 1, 1, 1]):
        document = judged(np.array([0.1, 0.2, 0.3, 0.9]), np.array(labels)).to_dict()
        assert document["slope"] == document["intercept"] == {"value": None, "low": None, "high": None}
    document = judged(np.array([0.1, 0.2, 0.8, 0.9]), np.array([0, 0, 1, 1])).to_dict()
    assert document["slope"]["value"] is None
    assert document["intercept"]["value"] == pytest.approx(0.0, abs=1e-9)
    found = judged(np.array([0.0, 1.0, 0.3, 0.5]), np.array([1, 1, 0, 1]))
    assert math.isfinite(found.ratio.value)
    assert math.isfinite(found.z)


def test_the_curve_has_bins_of_equal_information_and_each_has_rare_events() -> None:
    """Of 10 samples at .1, 4 at .5 and 10 at .9, p (1 - p) sums to .9, 1 and .9: tenths 1, 5 and 8 of 2.8."""
    p = np.repeat([0.1, 0.5, 0.9], [10, 4, 10])
    y = np.zeros(24)
    y[[0, 10, 11, *range(15, 24)]] = 1.0
    curve = event_curve(p, y, np.ones(24))
    assert [one["count"] for one in curve["bins"]] == [10, 4, 10]
    assert [one["observed"] for one in curve["bins"]] == [0.1, 0.5, 0.9]
    assert [one["probability"] for one in curve["bins"]] == pytest.approx([0.1, 0.5, 0.9], abs=1e-15)
    # Wilson's interval of 1 in 10.
    assert curve["bins"][0]["observed_low"] == pytest.approx(0.017876, abs=1e-6)
    assert curve["bins"][0]["observed_high"] == pytest.approx(0.404150, abs=1e-6)
    edges = curve["histogram"]["edges"]
    assert edges[0] == pytest.approx(0.1)
    assert edges[20] == pytest.approx(0.5)
    assert sum(curve["histogram"]["events"]) == 12
    assert sum(curve["histogram"]["others"]) == 12
    rng = np.random.default_rng(0)
    odds = rng.normal(-5.5, 1.5, 20_000)
    p = 1.0 / (1.0 + np.exp(-odds))
    curve = event_curve(p, (rng.random(20_000) < p).astype(np.float64), np.ones(20_000))
    events = [one["count"] * one["observed"] for one in curve["bins"]]
    assert 200 < sum(events) < 260
    assert min(events) >= 12


def test_a_report_shows_them_before_and_after_in_its_diagram_and_its_page() -> None:
    p, y = drawn(2000, slope=0.5)
    logits = np.column_stack([np.zeros(2000), np.log(p / (1 - p))])
    report = cross_fitted_report("vector", logits, y)
    document, page = report.to_dict(), report._repr_html_()
    events = document["events"]
    assert events["before"]["slope"]["high"] < 0.7
    assert events["after"]["slope"]["low"] < 1.0 < events["after"]["slope"]["high"]
    assert events["after"]["ratio"]["value"] == pytest.approx(1.0, abs=0.02)
    low, high = event_limits(events.values())
    assert 0.0 < low < 0.02
    assert 0.75 < high < 1.0
    assert reliability_svg(document) != reliability_svg({**document, "events": None})
    assert "Observed / expected events" in page
    assert page.count("Calibration slope") == 1
    assert cross_fitted_report("ts", np.tile(logits, 2)[:, :3], y).to_dict()["events"] is None
    separated = np.column_stack([np.zeros(40), np.where(np.arange(40) % 2, 3.0, -3.0)])
    assert "Spiegelhalter" in cross_fitted_report("ts", separated, np.arange(40) % 2)._repr_html_()
