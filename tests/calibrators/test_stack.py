"""Stacks: weights beside independent optima, the formula, the stored form, and what `auto` makes of them."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save
from scipy.optimize import minimize

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.data import check_validation_set, fold_masks
from boxcal.calibrators.errors import ArtifactError
from boxcal.calibrators.evaluation import crossfit
from boxcal.calibrators.evaluation.report import report_on
from boxcal.calibrators.evaluation.verdict import sentence
from boxcal.calibrators.fitting import FitResult, selection
from boxcal.calibrators.fitting.api import fit_data
from boxcal.calibrators.fitting.penalty_search import StrengthPath, strongest_of_equals
from boxcal.calibrators.fitting.selection import candidates, mixing_weights, stack_weights
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.linear import VectorScaling
from boxcal.calibrators.maps.mixture import Mixture
from boxcal.calibrators.maps.stack import Component, Stack
from boxcal.calibrators.maps.temperature import TemperatureScaling
from tests.calibrators.samples import Array, drawn, mean_nll
from tests.calibrators.test_onnx_export import run

FOLDS = 5


def shuffled(count: int) -> Array:
    return np.random.default_rng(1).permutation(np.arange(count) % FOLDS)


def two_temperatures(count: int = 4000) -> tuple[Array, Array]:
    """Labels of which half follow the logits, and half the logits over five: a mixture is the truth."""
    rng = np.random.default_rng(3)
    logits = 3.0 * rng.normal(size=(count, 4))
    divisor = np.where(rng.random(count) < 0.5, 1.0, 5.0)[:, None]
    return logits, (logits / divisor + rng.gumbel(size=logits.shape)).argmax(axis=1)


def test_the_weights_of_two_methods_in_closed_form() -> None:
    """3 log(.2 + .6 w) + log(.8 - .6 w) is largest at w = 11 / 12."""
    likelihoods = np.tile([[0.8, 0.2]] * 3 + [[0.2, 0.8]], (2500, 1))
    found = stack_weights(-np.log(likelihoods), shuffled(10_000), np.ones(10_000))
    assert found.all_rows == pytest.approx([11 / 12, 1 / 12], abs=2e-4)  # with a quarter of a sample for each
    exact = mixing_weights(likelihoods, np.ones(10_000), 1e-6)
    assert exact == pytest.approx([11 / 12, 1 / 12], abs=1e-7)


def test_the_prior_counts_as_samples_of_each_method_and_equal_methods_share_theirs() -> None:
    """3 log(.2 + .6 w) + log(.8 - .6 w) + (log(w) + log(1 - w)) / 4 is largest at w = 0.786256."""
    likelihoods = np.array([[0.8, 0.2]] * 3 + [[0.2, 0.8]])
    found = mixing_weights(likelihoods, np.ones(4), 0.25)
    assert found == pytest.approx([0.786256, 0.213744], abs=1e-6)
    assert stack_weights(-np.log(likelihoods), np.arange(4), np.ones(4)).all_rows == pytest.approx(found)
    likelihoods = np.random.default_rng(1).uniform(0.1, 1.0, (300, 2))[:, [0, 1, 1]]
    found = mixing_weights(likelihoods, np.ones(300), 1e-6)
    alone = mixing_weights(likelihoods[:, :2], np.ones(300), 1e-6)
    assert found[0] == pytest.approx(alone[0], abs=1e-6)
    assert found[1] == pytest.approx(found[2], abs=1e-9)


def test_weights_are_the_optimum_that_another_solver_finds() -> None:
    rng = np.random.default_rng(0)
    likelihoods = rng.uniform(0.05, 1.0, (600, 4)) * [1.0, 0.8, 1.0, 0.7]
    counts = rng.uniform(0.2, 2.0, 600)

    def loss(weights: Array) -> float:
        return float(-(counts * np.log(likelihoods @ weights)).sum() / counts.sum())

    found = stack_weights(-np.log(likelihoods), shuffled(600), counts, most=4)
    best: Any = minimize(  # type: ignore[call-overload]
        loss,
        np.full(4, 0.25),
        method="SLSQP",
        bounds=[(0.0, 1.0)] * 4,
        constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1.0},
        options={"ftol": 1e-14},
    )
    assert loss(mixing_weights(likelihoods, counts, 1e-6)) == pytest.approx(best.fun, abs=1e-8)
    assert loss(found.all_rows) - best.fun < 1e-3  # two methods have next to no weight
    assert found.all_rows.sum() == pytest.approx(1.0, abs=1e-12)


def test_a_fold_has_no_part_in_the_weights_that_judge_it() -> None:
    rng = np.random.default_rng(2)
    losses, fold_of = rng.exponential(size=(500, 3)), shuffled(500)
    found = stack_weights(losses, fold_of, np.ones(500), most=3)
    changed = losses.copy()
    changed[fold_of == 2] = rng.exponential(size=((fold_of == 2).sum(), 3))
    again = stack_weights(changed, fold_of, np.ones(500), most=3)
    assert again.by_fold[2] == pytest.approx(found.by_fold[2], abs=1e-3)
    assert again.by_fold[3] != pytest.approx(found.by_fold[3], abs=1e-2)
    own = -np.log((np.exp(-losses) * found.by_fold[fold_of]).sum(axis=1))
    assert found.losses == pytest.approx(own, abs=1e-12)


def test_the_number_of_components_is_limited_and_less_than_a_twentieth_is_left_out() -> None:
    rng = np.random.default_rng(4)
    losses = rng.exponential(size=(3000, 8)) * (0.5 + np.eye(8)[rng.integers(8, size=3000)])
    assert (stack_weights(losses, shuffled(3000), np.ones(3000), most=4).all_rows > 0).sum() == 4
    likelihoods = np.tile([[0.8, 0.2]] * 39 + [[0.5, 0.8]], (250, 1))
    found = mixing_weights(likelihoods, np.ones(10_000), 0.25)
    assert 0.0 < found[1] < 0.05
    kept = stack_weights(-np.log(likelihoods), shuffled(10_000), np.ones(10_000))
    assert kept.all_rows.tolist() == [1.0, 0.0]


def test_a_sample_that_counts_three_times_is_three_samples() -> None:
    rng = np.random.default_rng(5)
    losses, fold_of = rng.exponential(size=(900, 3)), shuffled(900)
    times = np.where(losses[:, 0] < losses[:, 1], 3, 1)
    counted = stack_weights(losses, fold_of, times.astype(np.float64), most=3)
    repeated = stack_weights(
        np.repeat(losses, times, axis=0), np.repeat(fold_of, times), np.ones(times.sum()), most=3
    )
    assert counted.all_rows == pytest.approx(repeated.all_rows, abs=1e-6)
    assert counted.all_rows != pytest.approx(
        stack_weights(losses, fold_of, np.ones(900), most=3).all_rows, abs=0.05
    )


def test_a_strength_is_chosen_by_the_other_folds() -> None:
    logits, labels = drawn(200, 3, temperature=1.0)
    data = check_validation_set(logits + np.array([0.6, -0.6, 0.0]), labels)
    path = StrengthPath(VectorScaling(3), data, fold_masks(data, FOLDS, 0), lambda done: None)
    losses = np.array(path._losses)
    for fold, inside in enumerate(path.masks):
        assert path.nested[fold] == strongest_of_equals(losses[:, ~inside], np.ones((~inside).sum()))
    assert len(set(path.nested)) > 1
    assert path.best == strongest_of_equals(losses, np.ones(200))


def test_the_strongest_penalty_within_a_standard_error_is_chosen() -> None:
    """Differences .31, -.11, .31, -.11: a mean of .1, and a standard error of .105; of .29, -.09: .095."""
    for most, chosen in ((0.31, 0), (0.29, 1)):
        losses = np.array([[most, 0.2 - most, most, 0.2 - most], [0.0, 0.0, 0.0, 0.0]])
        assert strongest_of_equals(losses, np.ones(4)) == chosen
    assert strongest_of_equals(np.array([[0.3, 0.0], [0.0, 0.0]]), np.array([0.0, 9.0])) == 0
    assert strongest_of_equals(np.array([[0.0, 0.0], [1.0, 1.0]]), np.ones(2)) == 0


def stack() -> Stack:
    """A quarter of the logits as they are, and three quarters of the half of them."""
    halved = TemperatureScaling(2, {"temperature": 2.0})
    mixture = Mixture(2, {"mixture_temperature": 1.0, "mixture_share": 0.2})
    parts = [Component("uncalibrated", IdentityMap(2)), Component("mix+ts", Chain(mixture, halved))]
    return Stack(parts, [0.25, 0.75], 0.01)


def calibrator() -> ArrayCalibrator:
    one = stack()
    return ArrayCalibrator(one.method, one, ConstantBounds(2), 2)


def test_a_stack_mixes_probabilities() -> None:
    """Of logits (2, 0): .880797, and with a fifth of the uniform .804638, whose odds' root gives .669908."""
    p = calibrator()(np.array([[2.0, 0.0]]))
    assert p[0, 0] == pytest.approx(0.99 * (0.25 * 0.880797 + 0.75 * 0.669908) + 0.005, abs=1e-6)
    assert calibrator().method == "stack(uncalibrated,mix+ts)"
    plain = Stack([Component("uncalibrated", IdentityMap(2))] * 2, [0.5, 0.5], 0.01)
    found = plain(np.array([[900.0, -900.0]]))  # no class is less probable than the floor says
    assert np.exp(found[0]) == pytest.approx([0.995, 0.005], abs=1e-15)


def test_request_bounds_project_the_mixture() -> None:
    """The KL projection keeps the odds of classes inside the box: (.7, .2, .1) under .5 is (.5, 1/3, 1/6)."""
    mixture = Stack([Component("uncalibrated", IdentityMap(3))] * 2, [0.5, 0.5], 1e-14)
    one = ArrayCalibrator(mixture.method, mixture, ConstantBounds(3), 3)
    p = one.calibrate(np.log([[0.7, 0.2, 0.1]]), (np.zeros(3), np.full(3, 0.5))).probabilities
    assert p[0] == pytest.approx([0.5, 1 / 3, 1 / 6], abs=1e-12)


def test_a_stored_stack_answers_alike_on_arrays_tensors_and_onnx(tmp_path: Path) -> None:
    one, logits = calibrator(), np.random.default_rng(0).normal(size=(50, 2)) * 3
    again = ArrayCalibrator.from_bytes(one.to_bytes())
    assert np.array_equal(again(logits), one(logits))
    assert again.to_bytes() == one.to_bytes()
    tensors = Calibrator.from_bytes(one.to_bytes())
    np.testing.assert_allclose(tensors(torch.from_numpy(logits)).numpy(), one(logits), rtol=0, atol=1e-14)
    tensors.to_onnx(tmp_path / "stack.onnx")
    answer = run(tmp_path / "stack.onnx", logits=logits.astype(np.float32))
    np.testing.assert_allclose(answer, one(logits), rtol=0, atol=1e-6)


def test_a_stack_is_adjusted_to_other_class_frequencies() -> None:
    adjusted = calibrator().adjusted(np.array([0.0, 1.0]))
    assert adjusted.method == "stack(uncalibrated,mix+ts)+em"
    again = ArrayCalibrator.from_bytes(adjusted.to_bytes())
    logits = np.array([[1.0, -1.0]])
    expected = calibrator()(logits) * [1.0, np.e]
    np.testing.assert_allclose(again(logits), expected / expected.sum(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_map.stack_weights": np.array([0.5, 0.6])}, "must be non-negative and sum to 1"),
        ({"logit_map.stack_weights": np.array([1.0])}, r"should have shape \(2,\); it is \(1,\)"),
        ({"logit_map.stack_floor": np.array(1.0)}, "the stack's floor is 1.0"),
        ({"logit_map.1.first.mixture_share": np.array(1.0)}, "the share of a mixture is 1.0"),
        ({"logit_map.1.second.temperature": np.array(-1.0)}, "temperature must be positive"),
        ({"logit_map.1.second.temperature": None}, "'logit_map.1.second.temperature' should have shape"),
        ({"logit_map.0.temperature": np.array(1.0)}, "has no tensor 'logit_map.0.temperature'"),
    ],
)
def test_a_stored_stack_is_checked(change: dict[str, Any], message: str) -> None:
    data = calibrator().to_bytes()
    tensors = {name: value for name, value in (load(data) | change).items() if value is not None}
    length = int.from_bytes(data[:8], "little")
    spec = data[8 : 8 + length].decode()
    metadata = {"spec": json.loads(spec)["__metadata__"]["spec"]}
    with pytest.raises(ArtifactError, match=message):
        ArrayCalibrator.from_bytes(save(tensors, metadata))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *((name, "no") for name in ("stack(ts,pb)", "stack(stack(ts),ts)", "stack()", "stack")),
        *((name, "no") for name in ("stack(fc,ts)", "stack(ts+lb)")),
        ("stack(ts,ts)+lb", r"no stack is followed by '\+lb"),
        ("stack(ts,ts)+ts", r"no stack is followed by '\+ts"),
        ("stack(ts,ts)+pts+pts", r"no stack is followed by '\+pts"),
        ("stack(ts,ts)pts", "no stack is followed by 'pts"),
    ],
)
def test_names_that_are_no_stack(name: str, message: str) -> None:
    data = calibrator().to_bytes().replace(b"stack(uncalibrated,mix+ts)", name.ljust(26).encode())
    with pytest.raises(ArtifactError, match=message):
        ArrayCalibrator.from_bytes(data)


def test_auto_mixes_where_a_mixture_is_the_truth_and_its_report_fits_nothing_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No temperature can be both; `ets` mixes raw and softened probabilities, and is the truth."""
    mixed = fit("auto", *two_temperatures())
    logits, labels = two_temperatures(40_000)
    loss = {
        name: float(-np.log(one(logits)[np.arange(len(labels)), labels]).mean())
        for name, one in (("auto", mixed.on_arrays), ("ts", fit("ts", logits, labels).on_arrays))
    }
    assert loss["auto"] < loss["ts"] - 0.004
    assert mixed.choice["why"].count("nats below the unchanged logits") == 1
    assert sum(row["weight"] for row in mixed.choice["candidates"]) == pytest.approx(1.0)
    monkeypatch.delattr(crossfit, "fit_set")
    data = check_validation_set(*two_temperatures())
    report = report_on(mixed.method, data, unseen=mixed.unseen)
    assert report.is_better
    assert report.folds == FOLDS
    gain = report.difference["nll"].value
    assert gain == pytest.approx(-mixed.choice["gain"], abs=1e-5)  # the gain is that of floored losses
    masks = np.array([mask for mask, _ in mixed.unseen])  # what judges a fold has not seen it
    assert (masks.sum(axis=0) == 1).all()
    whole = mixed.on_arrays.spec["parameters"]
    assert all(one.spec["parameters"] != whole for _, one in mixed.unseen)


def test_methods_with_parameters_per_class_have_a_floor() -> None:
    """Beside 1,000 samples a tenth of one is spread over the classes: nothing is below .1 / 1001 / 3."""
    logits, labels = drawn(1000, 3, temperature=1.0)
    result = fit("auto", logits + np.array([1.0, -1.0, 0.0]), labels)
    assert result.method == "stack(mix+vector,sms,mix+sms,mix+polynomial)"
    assert result.on_arrays.spec["parameters"]["floor"] == pytest.approx(0.1 / 1001)
    p = result.on_arrays(np.array([[900.0, 0.0, -900.0]]))
    assert 0.1 / 1001 / 3 <= p.min() < 1e-3


def close_and_clear(rows: int, num_classes: int, seed: int) -> tuple[Array, ...]:
    """Give logits, labels and the logits of the truth.

    Logits are right where the two largest are close, and three times too large in all other rows.
    """
    rng = np.random.default_rng(seed)
    logits = 3.0 * rng.normal(size=(rows, num_classes))
    ordered = np.sort(logits, axis=1)
    true = logits / np.where(ordered[:, -1] - ordered[:, -2] > 1.0, 3.0, 1.0)[:, None]
    return logits, (true + rng.gumbel(size=true.shape)).argmax(axis=1), true


@pytest.fixture(scope="module")
def tempered() -> FitResult:
    return fit("auto", *close_and_clear(1000, 50, seed=3)[:2])


@pytest.mark.filterwarnings("ignore:unrelated_labels")
def test_a_network_follows_where_rows_need_temperatures_of_their_own(
    tempered: FitResult, tmp_path: Path
) -> None:
    """The best temperature of all rows is .2 nats above the truth; the network comes within .05."""
    logits, labels, true = close_and_clear(20_000, 50, seed=4)
    best = min(mean_nll(logits / one, labels) for one in np.linspace(1.0, 3.0, 21))
    assert best > mean_nll(true, labels) + 0.17
    assert mean_nll(np.log(tempered.on_arrays(logits)), labels) < mean_nll(true, labels) + 0.05
    assert tempered.method.endswith("+pts")
    assert tempered.choice["chosen"] == tempered.method
    assert "`pts` after it lowers the NLL by another 0." in tempered.choice["why"]
    stored = tempered.on_arrays.to_bytes()
    again = ArrayCalibrator.from_bytes(stored)
    assert again.to_bytes() == stored
    assert np.array_equal(again(logits[:50]), tempered.on_arrays(logits[:50]))
    Calibrator.from_bytes(stored).to_onnx(tmp_path / "stack.onnx")
    answer = run(tmp_path / "stack.onnx", logits=logits[:50].astype(np.float32))
    np.testing.assert_allclose(answer, again(logits[:50].astype(np.float32)), rtol=0, atol=1e-6)
    adjusted = ArrayCalibrator.from_bytes(again.adjusted(np.zeros(50)).to_bytes())
    assert adjusted.method == f"{tempered.method}+em"
    np.testing.assert_allclose(adjusted(logits[:50]), again(logits[:50]), rtol=0, atol=1e-14)


def test_the_network_is_judged_by_rows_that_it_has_not_seen(tempered: FitResult) -> None:
    data = check_validation_set(*close_and_clear(1000, 50, seed=3)[:2])
    maps = [tempered.on_arrays.logit_map, *(one.logit_map for _, one in tempered.unseen)]
    networks = {one.second.parameters["network.bias_3"].item() for one in maps if isinstance(one, Chain)}
    assert len(networks) == 1 + FOLDS
    report = report_on(tempered.method, data, unseen=tempered.unseen)
    assert report.is_better
    assert report.difference["nll"].value == pytest.approx(-tempered.choice["gain"], abs=1e-4)


@pytest.mark.filterwarnings("ignore:unrelated_labels")
def test_each_fold_has_the_network_that_has_not_seen_it() -> None:
    """Some labels of one fold mean nothing: only its own network was not told to be less sure for them."""
    logits, labels, _ = close_and_clear(2000, 50, seed=3)
    masks = fold_masks(check_validation_set(logits, labels), FOLDS, 0)
    strange = np.flatnonzero(masks[1])[:150]
    labels[strange] = np.random.default_rng(0).integers(0, 50, 150)
    found = fit_data("auto", check_validation_set(logits, labels))
    assert all(np.array_equal(inside, mask) for (inside, _), mask in zip(found.unseen, masks, strict=True))
    maps = [one.logit_map for _, one in found.unseen]
    sharpness = [np.ptp(one.second(logits), axis=1).mean() for one in maps if isinstance(one, Chain)]
    assert np.argmax(sharpness) == 1
    assert sharpness[1] > 1.05 * sorted(sharpness)[-2]


@pytest.mark.filterwarnings("ignore:unrelated_labels")
def test_ets_helps_many_classes_where_labels_mean_nothing() -> None:
    """It mixes in the uniform distribution, which no other candidate does."""
    rng = np.random.default_rng(0)
    logits, strange = 3 * rng.normal(size=(1500, 60)), rng.random(1500) < 0.1
    labels = (logits / 1.7 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    labels[strange] = rng.integers(0, 60, int(strange.sum()))
    (ets,) = [one for one in fit("auto", logits, labels).choice["candidates"] if one["method"] == "ets"]
    assert ets["status"] == "compared"
    assert ets["weight"] > 0.2


def test_ets_of_many_classes_is_left_out_where_its_first_fold_is_behind() -> None:
    data = check_validation_set(*drawn(500, 50))
    folds = selection._Folds(data, fold_masks(data, FOLDS, 0), 0)
    own = folds.fit("ets", lambda done: None).losses
    for ahead, is_promising in ((0.5, False), (-0.5, True)):
        others = {"ts": selection.CrossFitted(own - ahead + 0.1 * np.cos(np.arange(500)), [])}
        assert folds.is_promising("ets", others) is is_promising


@pytest.mark.filterwarnings("ignore:unrelated_labels")
def test_no_network_follows_fewer_classes_or_without_time_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that shows one second more at each look: the last candidate begins after 2 M - 1."""
    fewer = fit("auto", *close_and_clear(1000, 49, seed=3)[:2])
    assert not fewer.method.endswith("pts")
    data = check_validation_set(*close_and_clear(1000, 50, seed=3)[:2])
    monkeypatch.setattr(selection, "time", SimpleNamespace(process_time=count().__next__))
    late = fit_data("auto", data, budget_seconds=2 * len(candidates(data)))
    assert not late.method.endswith("pts")
    assert "was used up before pts after the mixture;" in late.warnings[0].message


@pytest.mark.parametrize(("num_classes", "seed"), [(3, 0), (50, 1)])
def test_logits_that_are_right_stay_and_are_reported_unchanged(num_classes: int, seed: int) -> None:
    data = check_validation_set(*drawn(1000, num_classes, temperature=1.0, seed=seed))
    result = fit_data("auto", data)
    assert result.method == "uncalibrated"
    report = report_on(result.method, data, unseen=result.unseen)
    assert report.changed_labels == 0
    assert sentence(report.to_dict()) == "No clear gain: NLL does not change."


@pytest.mark.parametrize("sets", [8, pytest.param(400, marks=pytest.mark.long)])
def test_no_null_set_is_called_better(sets: int) -> None:
    """Logits that are right: of no set does the report say that what `auto` makes of it is better."""
    better = []
    for seed in range(sets):
        data = check_validation_set(*drawn(400, 3, temperature=1.0, seed=seed))
        result = fit_data("auto", data, seed=seed)
        if result.method != "uncalibrated":
            better.append(report_on(result.method, data, unseen=result.unseen).is_better)
    assert sum(better) == 0
