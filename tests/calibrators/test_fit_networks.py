"""Fits of networks: their gradients, their means, and what few samples make of them."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from boxcal.calibrators import array_ops, fit
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.fitting import fit_method, networks
from boxcal.calibrators.fitting.fitted_method import Fitted
from boxcal.calibrators.fitting.network_validation import (
    DescentRows,
    HeldOutFold,
    NetworkStart,
    cross_validated,
)
from boxcal.calibrators.fitting.objective import Objective, objective_of
from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.logit_bounding import LogitBounding
from boxcal.calibrators.maps.network import NetworkMap, network_outputs, network_reads
from boxcal.calibrators.maps.network_box import InstanceDependentBounds
from boxcal.calibrators.maps.parameterised_temperature import ParameterisedTemperature
from boxcal.calibrators.maps.parameters import Map
from boxcal.calibrators.method import BOUND_MAPS, parse
from tests.calibrators.samples import central_differences, contaminated, nll_of, overconfident


def prepared(method: str, logits: Tensor, labels: Tensor) -> tuple[LogitMap, LogitMap, BoxMap | None]:
    """Give the logit map of a method, the same with what clips it, and its box, ready for a fit."""
    parts, data, size = parse(method), check_validation_set(logits, labels), logits.shape[1]
    logit_map, box = parts.logit_map(size), BOUND_MAPS[parts.bounds](size) if parts.bounds else None
    logit_map.prepare(data)
    if box:
        box.prepare(data.scores)
    return logit_map, Chain(logit_map, LogitBounding(size)) if parts.clipped else logit_map, box


def objective_for(method: str, logits: Tensor, labels: Tensor) -> Objective:
    _, whole, box = prepared(method, logits, labels)
    return objective_of(whole, box, check_validation_set(logits, labels).scores, labels.numpy())


@pytest.mark.parametrize("method", ["pb-mlp", "ts+pb-mlp", "pts"])
def test_a_network_says_how_its_fit_went(method: str) -> None:
    logits, labels = contaminated(400, 5)
    certificate = fit(method, logits, labels).certificate
    assert certificate.saturation is not None
    assert 0.0 <= certificate.saturation < 0.5
    assert certificate.starts > 1
    assert certificate.start_spread >= 0.0
    if certificate.gradient_norm > 1e-4:
        assert any("gradient of" in note for note in certificate.notes)


@pytest.mark.parametrize("method", ["pts", "pts+pb", "pts+pb-mlp", "pts+lb"])
def test_a_pseudo_sample_has_the_second_largest_class_as_its_label(method: str) -> None:
    logits, labels = contaminated(60, 12)
    own, _, _ = prepared(method, logits, labels)
    objective = objective_for(method, logits, labels)
    pseudo = objective.with_pseudo_sample()
    point = 0.3 * np.random.default_rng(0).normal(size=len(objective.limits))
    if method in {"pts+pb", "pts+lb"}:
        point[-2:] = [-1.0, 0.4 if method == "pts+lb" else -0.7]
    assert isinstance(own, ParameterisedTemperature)
    own.set_coordinates(point[: own.size])
    inverse = own.inverse_formula(array_ops, own.parameters, objective.data.scores)[:, 0]
    largest, second = logits.topk(2, dim=1).values.T.numpy()
    cost = (inverse * (largest - second)).mean() / len(labels)
    assert pseudo(point)[0] - objective(point)[0] == pytest.approx(cost, rel=1e-9)
    numeric = central_differences(lambda x: pseudo(x)[0], point)
    np.testing.assert_allclose(pseudo(point)[1], numeric, rtol=1e-5, atol=1e-7)


def easy_and_hard(num_samples: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw logits (N, 5) and labels; 60 % of the samples have a large margin, one in 250 of them is wrong."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(5, (num_samples,), generator=generator)
    easy = torch.rand(num_samples, generator=generator) < 0.6
    logits = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    right = torch.rand(num_samples, generator=generator) < torch.where(easy, 0.995, 0.7)
    shown = torch.where(right, labels, torch.randint(5, (num_samples,), generator=generator))
    logits[torch.arange(num_samples), shown] += torch.where(easy, 9.0, 3.0)
    return logits, labels


@pytest.mark.parametrize(("num_samples", "seed"), [(60, 6), (60, 7), (200, 6)])
def test_networks_of_few_samples_are_not_far_worse_than_one_temperature(num_samples: int, seed: int) -> None:
    # Without the rule of one standard error the first two are 0.11 worse and infinite; without the
    # pseudo-sample the third one is 0.42 worse.
    data, unseen = easy_and_hard(num_samples, seed), easy_and_hard(20_000, 999)
    network, one = (nll_of(fit(method, *data).calibrator, *unseen) for method in ("pts", "ts"))
    assert network < one + 0.01


@pytest.mark.parametrize("num_samples", [200, 2000])
@pytest.mark.parametrize("seed", range(3))
def test_a_network_is_one_temperature_where_that_is_true(num_samples: int, seed: int) -> None:
    data = overconfident(num_samples, 10, temperature=3.0, seed=seed)
    unseen = overconfident(20_000, 10, temperature=3.0, seed=99)
    network, one = (nll_of(fit(method, *data).calibrator, *unseen) for method in ("pts", "ts"))
    assert network == pytest.approx(one, abs=1e-4)


@pytest.mark.parametrize("method", ["pb-mlp", "pts", "ts+pb-mlp", "pts+pb-mlp", "pts+lb", "dirichlet+pb-mlp"])
@pytest.mark.parametrize("varies", [False, True])
def test_answers_between_a_constant_and_networks(method: str, *, varies: bool) -> None:
    """What answers differently from row to row at the plain coordinates too, stays what it is."""
    logits, labels = contaminated(50, 12)
    own, whole, box = prepared(method, logits, labels)
    objective = objective_for(method, logits, labels)
    rng = np.random.default_rng(0)
    plain, point = 0.3 * rng.normal(size=(2, len(objective.limits)))
    maps: list[tuple[Map | None, int]] = [(own, 0), (box, whole.size)]
    networks = [(one, begin) for one, begin in maps if isinstance(one, NetworkMap)]
    for network, begin in networks:
        last, outputs = network.parameters["network.weight_3"].size, network.parameters["network.bias_3"].size
        if not varies:
            plain[begin + network.size - last - outputs : begin + network.size - outputs] = 0.0
    between = objective.between(plain, point, 0.25)
    for network, begin in networks:
        answers = [
            network_outputs(array_ops, network.at(at[begin : begin + network.size]), logits.numpy())
            for at in (plain, between, point)
        ]
        expected = answers[2] if varies else 0.75 * answers[0] + 0.25 * answers[2]
        np.testing.assert_allclose(answers[1], expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(objective.between(plain, point, 1.0), point)
    if not own.is_network:
        np.testing.assert_array_equal(objective.between(plain, point, 0.0)[: own.size], plain[: own.size])


@pytest.mark.parametrize("scale", [1.0, 1e6, 1e290])
def test_a_network_reads_the_logarithm_of_the_surprisal(scale: float) -> None:
    """Its inputs have the size 1, also where the surprisal is large."""
    logits = scale * contaminated(50, 12)[0].numpy()
    network = InstanceDependentBounds(12)
    network.prepare(logits)
    top = np.sort(logits.astype(np.longdouble), axis=1)[:, :1:-1]
    surprisal = np.log(np.exp(top - top[:, :1]).sum(axis=1, keepdims=True)) - (top - top[:, :1])
    read = network_reads(array_ops, network.parameters, logits)
    np.testing.assert_allclose(read, -np.log1p(surprisal).astype(float), rtol=1e-12, atol=1e-15)
    assert np.square(read / network.parameters["network.spread"]).mean() == pytest.approx(1.0)
    assert not network.parameters["network.centre"].any()
    standard = network.reading(array_ops.top_columns(logits)[0])
    np.testing.assert_allclose(standard.T, read / network.parameters["network.spread"], rtol=1e-9)


def test_a_mean_of_networks_answers_their_mean() -> None:
    logits = contaminated(50, 12)[0].numpy()
    network = InstanceDependentBounds(12)
    network.prepare_network(logits, by_entry=True)
    members = [network.started([0.1, float(seed)], seed) for seed in range(3)]
    members = [member + 0.1 * np.sin(np.arange(len(member))) for member in members]
    answers = [network_outputs(array_ops, network.at(member), logits) for member in members]
    wide = network.averaged(members)
    found = network_outputs(array_ops, wide.parameters, logits)
    np.testing.assert_allclose(found, np.mean(answers, axis=0), rtol=1e-12, atol=1e-12)


def test_a_bound_too_small_for_a_gradient_has_an_infinite_loss() -> None:
    logits, labels = contaminated(50, 4)
    objective = objective_for("pb-mlp", 1e6 * logits, labels)
    assert isinstance(objective.bound_map, InstanceDependentBounds)
    point = objective.bound_map.starts_at(np.array([-1.0, -1.0]))[0][0]
    assert math.isfinite(objective(point)[0])
    point[-2] = -740.0  # the lower bound is 1e-322, and its reciprocal infinite
    value, gradient = objective(point)
    assert value == math.inf
    assert not gradient.any()


@pytest.mark.long
def test_joint_fits_begin_where_the_networks_that_they_contain_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fold begins with networks that its unseen rows have a part in."""
    begun: list[Sequence[networks.Place]] = []
    mean_of_networks = networks.mean_of_networks

    def spied(objective: Objective, places: Sequence[networks.Place], *others: Any, **named: Any) -> Any:
        begun.append(places)
        return mean_of_networks(objective, places, *others, **named)

    monkeypatch.setattr(fit_method, "mean_of_networks", spied)
    logits, labels = contaminated(600, 12, share=0.0)
    first, second = logits.topk(2, dim=1).values.T
    wrong = (first - second > 4.0) & (torch.arange(600) % 3 == 0)
    labels[wrong] = (labels[wrong] + 1) % 12
    known: dict[str, Fitted] = {}
    fit_method.fit_checked("pts+pb-mlp", check_validation_set(logits, labels), known=known)
    pts, bounded = known["pts"], known["ts+pb-mlp"]
    assert pts.has_networks
    assert bounded.has_networks
    size = len(pts.members[0])
    own, other = begun[-1]
    for place, ends, skipped, begin in ((own, pts, 0, 0), (other, bounded, 1, size)):
        for points, found in ((place.points, ends.members), (place.folds, ends.folds)):
            assert len(points) == len(found) == 5
            for point, end in zip(points, found, strict=True):
                assert np.array_equal(point[begin:][: len(end) - skipped], end[skipped:])
        assert not any(np.array_equal(fold, member) for fold in ends.folds for member in ends.members)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_progress_of_a_cross_validation_ends_at_1(count: int) -> None:
    logits, labels = contaminated(300, 12)
    objective, fold_of = objective_for("pts", logits, labels), np.arange(300) % 5
    everything = DescentRows.of(objective, np.arange(300))
    folds = [
        HeldOutFold(
            DescentRows.of(objective, np.flatnonzero(fold_of != fold)), objective.rows(fold_of == fold)
        )
        for fold in range(5)
    ]
    points = list(objective.logit_map.starts())
    fractions: list[float] = []
    start = NetworkStart(objective, everything, folds, points, points)
    cross_validated([start] * count, points, None, fractions.append)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert np.diff(fractions).max() <= 0.21
