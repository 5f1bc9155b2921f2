import math

import numpy as np
import pytest
import torch
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from sklearn.isotonic import IsotonicRegression
from torch import Tensor

from benchmarks.fits import Scores
from boxcal.calibrators import Bounds, Calibrator, array_ops, box_constrained_softmax, fit, methods
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.errors import InvalidDataError, MissingDataError
from boxcal.calibrators.fitting.penalty_search import map_losses
from boxcal.calibrators.fitting.selection import candidates
from boxcal.calibrators.maps.constant_box import box_at
from boxcal.calibrators.maps.ensemble_temperature import EnsembleTemperatureScaling
from boxcal.calibrators.maps.isotonic_loop import isotonic_with_one_more
from boxcal.calibrators.maps.temperature import best_temperature
from boxcal.calibrators.method import parse
from boxcal.calibrators.operator.uniform import SortedRows
from tests.calibrators.samples import Floats, contaminated, drawn, everything, nll_of, overconfident


def box(fraction: float, slack: float, num_classes: int) -> tuple[float, float]:
    lower, upper = box_at(array_ops, np.array(fraction), np.array(slack), num_classes)
    return float(lower), float(upper)


def long_if_slow(method: str) -> object:
    """Give the parameter of a method: joint fits with networks or many parameters take seconds each."""
    base, _, addition = method.partition("+")
    is_slow = (addition == "pb-mlp" and base != "ts") or (addition and base in {"nc", "pts", "dirichlet"})
    return pytest.param(method, marks=pytest.mark.long) if is_slow else method


@pytest.mark.parametrize("method", [long_if_slow(name) for name in methods()])
def test_every_method_lowers_the_loss_reports_it_and_survives_as_bytes(method: str) -> None:
    data = everything(200, 4)
    result = fit(method, data.logits, data.labels, **data.extras())
    assert result.method == method
    calibrator = Calibrator.from_bytes(result.calibrator.to_bytes())
    source = data.source(calibrator)
    assert result.nll == pytest.approx(nll_of(calibrator, source, data.labels), abs=1e-6)
    assert result.nll <= result.certificate.uncalibrated_nll + 1e-12
    if method != "uncalibrated":
        assert result.nll < result.certificate.uncalibrated_nll - 0.01
    if "+" in method and not method.startswith("mix+"):
        assert method.partition("+")[0] in result.certificate.contains
    for name, objective in result.certificate.contains.items():
        assert result.certificate.objective <= objective + 1e-6, name
    assert torch.equal(calibrator(source), result.calibrator(source))
    assert calibrator.spec == result.calibrator.spec
    assert calibrator.to_bytes() == result.calibrator.to_bytes()


@pytest.mark.parametrize("method", ["pb", "ts+pb", "pb-mlp", "lb", "dpb", "matrix", "venn-abers", "ta"])
def test_same_seed_same_bytes(method: str) -> None:
    data = everything(150, 4)
    first, second = (
        fit(method, data.logits, data.labels, seed=3, **data.extras()).calibrator.to_bytes() for _ in range(2)
    )
    assert first == second


@pytest.mark.parametrize(
    ("method", "missing"), [("fc", "features and the head"), ("nc+pb", "inputs and the backbone")]
)
def test_missing_requirements_are_named(method: str, missing: str) -> None:
    logits, labels = contaminated(50, 4)
    with pytest.raises(MissingDataError, match=missing):
        fit(method, logits, labels)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("wrong", [None, 50])
def test_the_temperature_of_many_rows_is_found_from_that_of_some(
    monkeypatch: pytest.MonkeyPatch, wrong: int | None
) -> None:
    """Newton's method ends where it does from afar, also where no row of those is predicted wrongly."""
    logits, labels = drawn(2000, 10, temperature=2.0)
    if wrong is not None:
        labels = logits.argmax(axis=1)
        labels[wrong] = logits[wrong].argmin()
    data = check_validation_set(logits, labels)
    temperature, slope, rounds = best_temperature(data)
    monkeypatch.setattr("boxcal.calibrators.maps.temperature.MANY", 20_000)
    monkeypatch.setattr("boxcal.calibrators.maps.temperature.SOME", 5_000)
    found, remaining, fewer = best_temperature(data)
    assert found == pytest.approx(temperature, rel=1e-12)
    assert abs(remaining) < 1e-13
    assert abs(slope) < 1e-13
    assert fewer <= rounds - (wrong is None)


def test_many_rows_are_mapped_and_judged_as_at_once() -> None:
    """Blocks of rows and threads change no bit."""
    logits, labels = drawn(20_000, 5, temperature=2.0)
    mixture = fit("mix+ts", logits, labels).on_arrays.logit_map
    data = check_validation_set(logits, labels)
    assert (data.scores == logits.astype(np.float64) - array_ops.mean(logits.astype(np.float64))).all()
    at_once = mixture(data.scores)
    assert (mixture.over(data.scores) == at_once).all()
    losses = -array_ops.log_softmax(at_once)[np.arange(20_000), labels]
    assert (map_losses(mixture, data.scores, data.labels) == losses).all()


@pytest.mark.parametrize("true_temperature", [0.5, 2.0, 5.0])
def test_temperature_agrees_with_scikit_learn(true_temperature: float) -> None:
    logits, labels = overconfident(3000, 10, temperature=true_temperature)
    X, y = logits.numpy(), labels.numpy()
    theirs = CalibratedClassifierCV(FrozenEstimator(Scores().fit(X, y)), method="temperature").fit(X, y)
    inverse = theirs.calibrated_classifiers_[0].calibrators[0].beta_
    ours = fit("ts", logits, labels).calibrator.spec["parameters"]["temperature"]
    assert ours == pytest.approx(1.0 / inverse, abs=1e-6)


@pytest.mark.parametrize(
    ("num_samples", "num_classes", "share"),
    [(150, 3, 0.1), (360, 10, 0.1), (2000, 40, 0.1), pytest.param(3000, 10, 0.002, marks=pytest.mark.long)],
)
def test_bounds_are_no_worse_than_a_fine_grid(num_samples: int, num_classes: int, share: float) -> None:
    logits, labels = contaminated(num_samples, num_classes, share=share, seed=num_classes)
    rows = SortedRows(logits, labels)
    side = 80 if num_samples < 1000 else 50
    fractions = [0.0, *np.geomspace(1e-6, 0.999, side)]
    slacks = [0.0, *np.geomspace(1e-6, 0.999, side)]
    lowest = min(rows.nll(*box(f, s, num_classes)).value for f in fractions for s in slacks)
    assert fit("pb", logits, labels).nll <= lowest + 1e-6


@pytest.mark.parametrize("method", ["pb", "pb-upper", "ts+pb", "dpb"])
def test_no_random_start_ends_lower(method: str) -> None:
    logits, labels = contaminated(300, 4, seed=1)
    ours = fit(method, logits, labels).nll
    assert min(fit(method, logits, labels, seed=seed).nll for seed in range(1, 4)) >= ours - 1e-6


def test_one_sided_bounds_leave_the_other_side_open() -> None:
    logits, labels = contaminated(500, 5)
    lower, upper = (
        fit(method, logits, labels).calibrator.fitted_bounds or (math.nan, math.nan)
        for method in ("pb-lower", "pb-upper")
    )
    assert 0.0 < lower[0] < 0.2 < upper[1] < 1.0
    assert (upper[0], lower[1]) == (0.0, 1.0)


def test_bounds_that_help_nothing_are_vacuous_and_said_to_be() -> None:
    logits, labels = overconfident(2000, 5, temperature=0.5)
    result = fit("pb", logits, labels)
    assert result.calibrator.fitted_bounds is None
    assert result.certificate.on_boundary == ("lower", "upper")
    assert "hold nothing back" in result.certificate.notes[0]


@pytest.mark.long
def test_a_joint_fit_leaves_a_vacuous_start() -> None:
    """Where constant bounds gain nothing behind a temperature, a network of bounds still can."""
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(1200, 10, generator=generator, dtype=torch.float64)
    unsure = logits.amax(1) - logits.mean(1) < 6.0
    softened = torch.where(unsure[:, None], logits / 8.0, logits)
    labels = torch.multinomial(softened.softmax(1), 1, generator=generator)[:, 0]
    assert fit("ts+pb-mlp", logits, labels).nll < fit("ts+pb", logits, labels).nll - 0.01


def test_a_mixture_of_one_part_is_that_part_however_small_its_probabilities() -> None:
    logits = torch.tensor([[0.0, -20.0, -50.0]], dtype=torch.float64)
    mixture = EnsembleTemperatureScaling(3)
    mixture = mixture.moved(mixture.tempered(math.log(0.01))[0])
    torch.testing.assert_close(mixture(logits), 100.0 * logits, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["ets+lb", "dirichlet+lb"])
def test_clipped_log_probabilities_contain_clipped_logits(method: str) -> None:
    """Logit bounding reads both less the largest of their row."""
    certificate = fit(method, *contaminated(60, 4)).certificate
    assert list(certificate.contains) == [method.removesuffix("+lb"), "ts+lb"]
    assert certificate.objective <= min(certificate.contains.values()) + 1e-12


@pytest.mark.parametrize("seed", [9, 23, 47])
def test_a_mixture_in_a_box_is_no_worse_than_the_temperature_it_contains(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn(500, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    logits = 1.05 * logits + 0.5 * torch.randn(500, 5, generator=generator, dtype=torch.float64)
    assert fit("ets+pb", logits, labels).nll <= fit("ts+pb", logits, labels).nll + 1e-12


@pytest.mark.parametrize("num_samples", [2, 3, 7])
def test_a_handful_of_samples_is_enough_for_an_answer(num_samples: int) -> None:
    logits, labels = contaminated(num_samples, 3, seed=1)
    result = fit("auto", logits, labels)
    assert result.nll <= result.certificate.uncalibrated_nll + 1e-12
    assert result.calibrator(logits).isfinite().all()


def test_auto_tries_large_methods_only_with_samples_enough_for_them() -> None:
    logits, labels = overconfident(3100, 20, temperature=1.0)
    offered = [set(candidates(check_validation_set(logits[:n], labels[:n]))) for n in (90, 600, 3100)]
    assert offered[0] == {"uncalibrated", "ts", "mix+ts", "ets"}
    assert offered[1] == {"uncalibrated", "ts", "ets", "mix+vector", "sms", "mix+sms", "dirichlet"}
    wider = check_validation_set(*overconfident(3100, 21, temperature=1.0))
    assert "dirichlet" not in candidates(wider)
    logits, labels = overconfident(400, 100)
    some = check_validation_set(logits[labels != 2], labels[labels != 2])  # of others none is there by chance
    assert {name for name in candidates(some) if parse(name).is_per_class} == {"mix+vector"}


def test_auto_tries_sms_without_a_mixture_from_100_samples_on() -> None:
    logits, labels = overconfident(100, 3, temperature=1.0)
    offered = [set(candidates(check_validation_set(logits[:n], labels[:n]))) for n in (99, 100)]
    assert offered[0] - offered[1] == {"mix+ts"}
    assert offered[1] - offered[0] == {"sms"}


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
    answer = calibrator.calibrate(logits, Bounds(upper=torch.tensor(0.5)))
    assert answer.probabilities.dtype == torch.float64
    assert (answer.probabilities <= 0.5).all()
    assert (answer.probabilities >= fitted[0]).all()
    assert not answer.relaxed.any()
    lower = torch.tensor([fitted[1] / 2 + 0.5, 0.0, 0.0, 0.0], dtype=torch.float64)
    tight = calibrator.calibrate(logits, Bounds(lower=lower))
    assert (tight.probabilities[:, 0] >= lower[0]).all()
    torch.testing.assert_close(calibrator(logits), box_constrained_softmax(logits, *fitted), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["ts", "ts+pb", "ets+lb", "dirichlet", "mix+sms", "auto"])
def test_answers_are_differentiable_in_the_logits(method: str) -> None:
    logits, labels = contaminated(400, 4)
    calibrator = fit(method, logits, labels).calibrator
    given = logits[:3].clone().requires_grad_()
    assert torch.equal(calibrator(given).detach(), calibrator(logits[:3]))
    assert torch.autograd.gradcheck(calibrator, (given,))
    assert torch.autograd.gradcheck(lambda rows: calibrator(rows, Bounds(0.05, 0.6)), (given,))
    with torch.no_grad():
        assert not calibrator(given).requires_grad
    of_a_table = fit("isotonic", logits, labels).calibrator
    assert not of_a_table(given).requires_grad


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_one_more_sample_joins_as_in_a_fit_from_scratch(seed: int, label: float) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 40))
    counts = rng.integers(1, 4, size)
    sums = rng.binomial(counts, np.linspace(0.1, 0.9, size))
    answers = isotonic_with_one_more(counts.astype(float), sums.astype(float), label)
    assert len(answers) == 2 * size + 1
    for index, answer in enumerate(answers):
        score = (index - 1) / 2
        scores = np.append(np.arange(size), score)
        fitted = IsotonicRegression().fit(
            scores, np.append(sums / counts, label), sample_weight=np.append(counts, 1)
        )
        assert answer == pytest.approx(fitted.predict([score])[0], abs=1e-12)


def by_definition(seen: Floats, hits: Floats, new: float) -> float:
    """Refit with the new sample twice, once for each label (Vovk, Petej and Fedorova 2015)."""
    values = []
    for label in (0.0, 1.0):
        fitted = IsotonicRegression().fit(np.append(seen, new), np.append(hits, label))
        values.append(float(fitted.predict([new])[0]))
    return values[1] / (1.0 - values[0] + values[1])


@pytest.mark.parametrize("levels", [4, 64])
def test_tied_probabilities_are_one_value(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    p = torch.randint(0, levels, (150, 1), generator=generator) / (levels - 1.0)
    probabilities = torch.cat([p, 1.0 - p], dim=1).double().clamp(1e-12, 1.0 - 1e-12)
    labels = (torch.rand(150, generator=generator) > 0.2 + 0.6 * p[:, 0]).long()
    logits = probabilities.log()
    found = fit("venn-abers", logits, labels).calibrator(logits).numpy()
    seen = logits.softmax(1).numpy()
    floor = 1.0 / seen.size
    expected = np.array(
        [[by_definition(seen[:, k], (labels.numpy() == k) * 1.0, row[k]) for k in range(2)] for row in seen]
    ).clip(floor, 1.0)
    np.testing.assert_allclose(found, expected / expected.sum(1, keepdims=True), atol=1e-9)


LINEAR = ("vector", "sms", "matrix", "dirichlet", "polynomial")


def confused(num_samples: int, *, seed: int) -> tuple[Tensor, Tensor]:
    """Logits that are twice too large and in which two of five classes are exchanged in part."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    mixing = torch.eye(5, dtype=torch.float64)
    mixing[0, 1], mixing[1, 0] = 0.5, 0.3
    offsets = torch.tensor([0.5, 0.0, -0.5, 0.0, 0.0], dtype=torch.float64)
    labels = torch.multinomial((logits @ mixing.T + offsets).softmax(1), 1, generator=generator)[:, 0]
    return 2.0 * logits, labels


@pytest.mark.parametrize("method", LINEAR)
def test_structure_holds_on_unseen_data_and_fifty_samples_of_twenty_classes_do_no_harm(method: str) -> None:
    for data, unseen, most in (
        (confused(2000, seed=0), confused(4000, seed=1), -0.005),
        (overconfident(50, 20), overconfident(4000, 20, seed=1), 0.1),
    ):
        ours, scaled = (nll_of(fit(name, *data).calibrator, *unseen) for name in (method, "ts"))
        assert ours < scaled + most


@pytest.mark.parametrize(
    ("method", "factor"), [("ts", 1e-6), ("ts+pb", 1e-6), *((name, 1e6) for name in ("ts", "pts", *LINEAR))]
)
def test_the_scale_of_the_logits_changes_nothing(method: str, factor: float) -> None:
    logits, labels = confused(300, seed=2)
    usual, scaled = (fit(method, values, labels) for values in (logits, logits * factor))
    assert scaled.nll == pytest.approx(usual.nll, abs=1e-6)
    torch.testing.assert_close(
        scaled.calibrator(logits * factor), usual.calibrator(logits), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("method", ["uncalibrated", "matrix", "lb", "mix+ts"])
def test_logits_beyond_all_scales_are_refused(method: str) -> None:
    logits, labels = confused(50, seed=3)
    with pytest.raises(InvalidDataError, match="fits take 1e-100 to 1e\\+100"):
        fit(method, logits * 1e290, labels)


@pytest.mark.parametrize("method", LINEAR)
def test_extreme_logits_end_no_higher_than_their_temperature(method: str) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = 2e4 * torch.rand(400, 6, generator=generator, dtype=torch.float64) - 1e4
    labels = torch.multinomial((logits / 3000.0).softmax(1), 1, generator=generator)[:, 0]
    result = fit(method, logits, labels)
    assert result.certificate.objective <= fit("ts", logits, labels).nll + 1e-9
    assert result.certificate.gradient_norm < 1e-4
