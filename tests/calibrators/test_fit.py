import math

import numpy as np
import pytest
import torch
from scipy.optimize import approx_fprime
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator

from calibrators import Bounds, Calibrator, box_constrained_softmax, fit, methods
from calibrators.fitting.constant_box import box_at
from calibrators.fitting.joint import JointObjective
from calibrators.logit_maps.dual_bounding import DualProbabilityBounding
from calibrators.logit_maps.temperature import TemperatureScaling
from calibrators.operator.uniform import SortedRows
from tests.calibrators.samples import contaminated, overconfident


def nll_of(calibrator: Calibrator, logits: torch.Tensor, labels: torch.Tensor) -> float:
    return -calibrator(logits).gather(1, labels[:, None]).log().mean().item()


class Logits(ClassifierMixin, BaseEstimator):
    """A classifier whose decision function is its input."""

    def fit(self, X: np.ndarray, y: np.ndarray) -> "Logits":
        self.classes_ = np.unique(y)
        return self

    def decision_function(self, X: np.ndarray) -> np.ndarray:
        return X

    def predict(self, X: np.ndarray) -> np.ndarray:
        return self.classes_[X.argmax(1)]


@pytest.mark.parametrize("method", methods())
def test_every_fit_lowers_the_loss_and_reports_it(method: str) -> None:
    logits, labels = contaminated(400, 5)
    result = fit(method, logits, labels)
    assert result.method == method
    assert result.nll == pytest.approx(nll_of(result.calibrator, logits, labels), abs=1e-9)
    assert result.nll <= result.certificate.uncalibrated_nll + 1e-12
    if method != "uncalibrated":
        assert result.nll < result.certificate.uncalibrated_nll - 0.01


@pytest.mark.parametrize("method", methods())
def test_same_seed_same_bytes(method: str) -> None:
    logits, labels = contaminated(200, 4)
    assert fit(method, logits, labels, seed=3).calibrator.to_bytes() == (
        fit(method, logits, labels, seed=3).calibrator.to_bytes()
    )


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("true_temperature", [0.5, 2.0, 5.0])
def test_temperature_agrees_with_scikit_learn(true_temperature: float) -> None:
    logits, labels = overconfident(3000, 10, temperature=true_temperature)
    X, y = logits.numpy(), labels.numpy()
    theirs = CalibratedClassifierCV(FrozenEstimator(Logits().fit(X, y)), method="temperature").fit(X, y)
    inverse = theirs.calibrated_classifiers_[0].calibrators[0].beta_
    ours = fit("ts", logits, labels).calibrator.logit_map.temperature.item()
    assert ours == pytest.approx(1.0 / inverse, abs=1e-6)


@pytest.mark.parametrize(("num_samples", "num_classes"), [(150, 3), (360, 10), (2000, 40)])
def test_bounds_are_no_worse_than_a_fine_grid(num_samples: int, num_classes: int) -> None:
    logits, labels = contaminated(num_samples, num_classes, seed=num_classes)
    rows = SortedRows(logits, labels)
    side = 120 if num_samples < 1000 else 50
    fractions = [0.0, *np.geomspace(1e-6, 0.999, side)]
    slacks = [0.0, *np.geomspace(1e-6, 0.999, side)]
    lowest = min(rows.nll(*box_at(f, s, num_classes)).value for f in fractions for s in slacks)
    assert fit("pb", logits, labels).nll <= lowest + 1e-6


@pytest.mark.parametrize("method", ["pb", "pb-lower", "pb-upper", "ts+pb", "dpb"])
def test_no_random_start_ends_lower(method: str) -> None:
    logits, labels = contaminated(300, 4, seed=1)
    ours = fit(method, logits, labels).nll
    assert min(fit(method, logits, labels, seed=seed).nll for seed in range(1, 6)) >= ours - 1e-6


def test_one_sided_bounds_leave_the_other_side_open() -> None:
    logits, labels = contaminated(500, 5)
    lower = fit("pb-lower", logits, labels).calibrator.fitted_bounds
    upper = fit("pb-upper", logits, labels).calibrator.fitted_bounds
    assert lower is not None
    assert upper is not None
    assert 0.0 < lower[0] < 0.2
    assert lower[1] == 1.0
    assert upper[0] == 0.0
    assert 0.2 < upper[1] < 1.0


def test_bounds_that_help_nothing_are_vacuous_and_said_to_be() -> None:
    logits, labels = overconfident(2000, 5, temperature=0.5)
    result = fit("pb", logits, labels)
    assert result.calibrator.fitted_bounds is None
    assert result.certificate.on_boundary == ("lower", "upper")
    assert "hold nothing back" in result.certificate.notes[0]


def test_joint_fit_is_no_worse_than_its_parts() -> None:
    logits, labels = contaminated(1000, 10, seed=2)
    joint = fit("ts+pb", logits, labels).nll
    assert joint <= fit("ts", logits, labels).nll + 1e-12
    assert joint <= fit("pb", logits, labels).nll + 1e-7


@pytest.mark.parametrize("with_box", [False, True])
@pytest.mark.parametrize("logit_map", [TemperatureScaling, DualProbabilityBounding])
def test_gradients_are_exact(
    logit_map: type[TemperatureScaling] | type[DualProbabilityBounding], with_box: bool
) -> None:
    logits, labels = contaminated(50, 4)
    objective = JointObjective(logit_map(4), with_box, logits, labels)
    start = logit_map(4).starts()[-1].numpy()
    point = np.concatenate([start + 0.01, [math.log(0.08), math.log(0.11)] if with_box else []])
    numeric = approx_fprime(point, lambda x: objective(x)[0], 1e-7)
    np.testing.assert_allclose(objective(point)[1], numeric, atol=1e-5)


def test_a_joint_fit_survives_logits_of_ten_thousand() -> None:
    logits, labels = contaminated(100, 6)
    result = fit("ts+pb", logits * 2500.0, labels)
    assert math.isfinite(result.nll)
    assert result.nll < math.log(6) + 0.1


def test_auto_improves_an_overconfident_network_on_unseen_data() -> None:
    logits, labels = overconfident(1500, 5, temperature=3.0)
    unseen, truth = overconfident(4000, 5, temperature=3.0, seed=9)
    result = fit("auto", logits, labels)
    assert result.method != "uncalibrated"
    assert nll_of(result.calibrator, unseen, truth) < nll_of(Calibrator.uncalibrated(5), unseen, truth) - 0.1


def test_auto_leaves_a_calibrated_network_alone() -> None:
    logits, labels = overconfident(1000, 5, temperature=1.0)
    assert fit("auto", logits, labels).method == "uncalibrated"


def test_progress_rises_to_one_and_its_exception_ends_the_fit() -> None:
    logits, labels = contaminated(300, 4)
    seen: list[tuple[float, str]] = []
    fit("auto", logits, labels, progress=lambda fraction, stage: seen.append((fraction, stage)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0

    def stop(fraction: float, stage: str) -> None:
        if fraction > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit("auto", logits, labels, progress=stop)


def test_request_bounds_meet_the_fitted_ones() -> None:
    logits, labels = contaminated(400, 4)
    calibrator = fit("pb", logits, labels).calibrator
    fitted = calibrator.fitted_bounds
    assert fitted is not None
    answer = calibrator.calibrate(logits, Bounds(0.0, 0.5))
    assert answer.probabilities.dtype == torch.float64
    assert (answer.probabilities <= 0.5).all()
    assert (answer.probabilities >= fitted[0]).all()
    assert not answer.relaxed.any()
    lower = torch.tensor([fitted[1] / 2 + 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    tight = calibrator.calibrate(logits, Bounds(lower, 1.0))
    assert (tight.probabilities[:, 0] >= lower[0]).all()
    torch.testing.assert_close(calibrator(logits), box_constrained_softmax(logits, *fitted), rtol=0, atol=0)
