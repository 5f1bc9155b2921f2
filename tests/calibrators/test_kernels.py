"""The compiled loops of fits, also of tempered rows, against the operator and autograd; the descents."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import qmc

from boxcal.calibrators import array_ops, box_constrained_softmax
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.fitting.clip_limits import SortedLogits
from boxcal.calibrators.fitting.descent import MOST_EVEN, _steps, best_of
from boxcal.calibrators.fitting.dual_loss import DualLoss, fit_shift
from boxcal.calibrators.fitting.objective import objective_of
from boxcal.calibrators.fitting.rows import TemperedRows, dense_loss
from boxcal.calibrators.maps.dual_bounding import DualProbabilityBounding
from boxcal.calibrators.maps.ensemble_temperature import EnsembleTemperatureScaling
from boxcal.calibrators.maps.logit_bounding import LogitBounding
from boxcal.calibrators.operator.uniform import SortedRows
from tests.calibrators.samples import overconfident


@pytest.mark.parametrize("num_classes", [2, 3, 10, 200])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_loss_in_a_box_and_its_derivatives(num_classes: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    count = 300
    logits = torch.randn(count, num_classes, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(num_classes, (count,), generator=generator)
    room = torch.rand(2, count, generator=generator, dtype=torch.float64) ** 4
    room[:, :20] = 0.0
    room[0, 20:40] = 1.0 - 1e-12
    room[1, 40:60] = 1.0 - 1e-12
    lower = room[0] / num_classes
    upper = 1.0 - (1.0 - 1.0 / num_classes) * room[1]
    leaves = [part.clone().requires_grad_() for part in (logits, lower, upper)]
    p = box_constrained_softmax(leaves[0], *(bound[:, None].expand_as(logits) for bound in leaves[1:]))
    losses = -p.gather(1, labels[:, None])[:, 0].log()
    torch.autograd.backward(losses.sum())
    ours = dense_loss(logits.numpy(), labels.numpy(), lower.numpy(), upper.numpy())
    usual = losses.detach().numpy() < 600.0
    np.testing.assert_allclose(ours[0][usual], losses.detach().numpy()[usual], rtol=1e-9, atol=1e-12)
    smooth = usual & (np.arange(count) >= 60)
    for mine, leaf in zip(ours[1:], leaves, strict=True):
        assert leaf.grad is not None
        np.testing.assert_allclose(mine[smooth], leaf.grad.numpy()[smooth], rtol=1e-6, atol=1e-9)


def test_losses_of_logits_far_apart_are_finite() -> None:
    logits = np.array([[0.0, -1e4, -2e4], [1e4, 0.0, 5e3], [-1e4, -1e4, -1e4]])
    for lower, upper in ((0.0, 1.0), (0.0, 0.5), (0.3, 0.9), (1 / 3, 1.0), (0.0, 1 / 3)):
        box = (np.full(3, lower), np.full(3, upper))
        losses, *derivatives = dense_loss(logits, np.array([2, 1, 0]), *box)
        assert np.isfinite(losses).all()
        assert all(np.isfinite(derivative).all() for derivative in derivatives)


@pytest.mark.parametrize("num_classes", [2, 10, 300])
def test_loss_of_clipped_logits_and_its_derivatives(num_classes: int) -> None:
    generator = torch.Generator().manual_seed(num_classes)
    logits = torch.randn(200, num_classes, generator=generator, dtype=torch.float64) * 4.0
    labels = torch.randint(num_classes, (200,), generator=generator)
    prepared = SortedLogits(logits.numpy(), labels.numpy())
    general = objective_of(LogitBounding(num_classes), None, logits.numpy(), labels.numpy())
    for lower, share in ((-1.0, 1.0), (-0.6, 0.2), (-0.3, 0.21), (0.1, 0.2), (-0.7, 0.3), (0.0, 0.0)):
        value, gradient = prepared(np.array([lower, share]))
        expected, slopes = general(np.array([lower, share]))
        assert value == pytest.approx(expected, abs=1e-12)
        if share > 0.0:
            np.testing.assert_allclose(gradient, slopes, atol=1e-10)


def test_dual_bounding_in_float32_and_its_quick_search() -> None:
    data = check_validation_set(*overconfident(2500, 30))
    mapping = DualProbabilityBounding(30)
    exact = DualLoss(data.scores, data.labels)
    general = objective_of(mapping, None, data.scores, data.labels)
    for start in mapping.starts():
        value, gradient = exact(start)
        assert value == pytest.approx(general(start)[0], abs=1e-12)
        np.testing.assert_allclose(gradient, general(start)[1], atol=1e-12)
        value, gradient = exact.in_float32()(start)
        assert value == pytest.approx(exact(start)[0], abs=1e-6)
        np.testing.assert_allclose(gradient, exact(start)[1], atol=1e-6)
    large = DualLoss(data.scores * 1e4, data.labels)
    start = mapping.starts()[0]
    assert large.in_float32()(start)[0] == large(start)[0]
    quick = fit_shift(mapping, data, seed=0, thorough=True, tick=lambda fraction: None)
    assert quick.value == exact(quick.coordinates)[0]
    assert quick.value <= best_of(exact, mapping.starts(), mapping.limits(), perturbations=4).value + 1e-5


@pytest.mark.parametrize("num_classes", [2, 10, 300])
def test_ets_by_the_probabilities_of_labels_alone(num_classes: int) -> None:
    """The loss and the gradient are those of the whole rows, also where a label is all but impossible."""
    generator = torch.Generator().manual_seed(num_classes)
    logits = (torch.randn(200, num_classes, generator=generator, dtype=torch.float64) * 9.0).numpy()
    labels = torch.randint(num_classes, (200,), generator=generator).numpy()
    weights = np.linspace(0.5, 1.5, 200)
    mapping = EnsembleTemperatureScaling(num_classes)
    quick, whole = (objective_of(mapping, None, logits, labels, weights) for _ in range(2))
    whole.is_of_labels, whole.precomputed = False, mapping.precompute(logits)
    points = [*mapping.starts(), np.array([0.7, 1.0, 0.0, 0.0]), np.array([-0.5, 0.0, 1.0, 0.0])]
    for point in points:
        for a, b in ((quick, whole), (quick.rows(np.arange(0, 200, 3)), whole.rows(np.arange(0, 200, 3)))):
            assert a(point)[0] == pytest.approx(b(point)[0], rel=1e-12)
            np.testing.assert_allclose(a(point)[1], b(point)[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("size", "share"), [(1, 0.1), (2, 0.25), (3, 0.3), (MOST_EVEN, 0.75)])
def test_directions_are_more_even_than_random_numbers(size: int, share: float) -> None:
    def uneven(steps: np.ndarray) -> float:
        assert np.abs(steps).max() <= 1.0
        return float(qmc.discrepancy((steps + 1.0) / 2.0))

    ours = [uneven(_steps(64, size, seed)) for seed in range(10)]
    others = [uneven(np.random.default_rng(seed).uniform(-1, 1, (64, size))) for seed in range(10)]
    assert np.mean(ours) < share * np.mean(others)


@pytest.mark.parametrize("size", [MOST_EVEN, MOST_EVEN + 1, 10_000])
def test_a_descent_takes_memory_in_proportion_to_its_coordinates(size: int) -> None:
    def squares(point: np.ndarray) -> tuple[float, np.ndarray]:
        return float(point @ point), 2.0 * point

    tracemalloc.start()
    found = best_of(squares, [np.ones(size)], perturbations=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.value < 1e-12
    assert peak < 20e6 + 8_000 * size


def test_a_start_that_stays_far_above_another_ones_end_is_given_up() -> None:
    """A narrow valley, in which descents from afar take hundreds of iterations."""
    factors = np.geomspace(1e-6, 1e3, 60)

    def valley(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(factors @ (x * x)), 2.0 * factors * x

    far, near = np.full(60, 100.0), np.full(60, 1e-6)
    alone, after = best_of(valley, [far]), best_of(valley, [near, far])
    assert after.evaluations < alone.evaluations / 2
    assert after.value <= alone.value
    assert after.starts_agreeing == 1
    assert best_of(valley, [far, near]).evaluations >= alone.evaluations


N = 300


def drawn(classes: int, scale: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Logits, labels, and a temperature's reciprocal and a box for each row; some boxes hold nothing."""
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(N, classes))
    lower = np.where(rng.random(N) < 0.3, 0.0, rng.random(N) / classes)
    upper = np.where(rng.random(N) < 0.3, 1.0, 1.0 / classes + (1.0 - 1.0 / classes) * rng.random(N))
    return logits, rng.integers(classes, size=N), np.exp(0.5 * rng.normal(size=N)), lower, upper


@pytest.mark.parametrize("classes", [2, 7, 130])
@pytest.mark.parametrize("scale", [0.1, 4.0, 60.0, 1000.0])
def test_losses_are_those_of_the_operator(classes: int, scale: float) -> None:
    """Logits up to thousands apart: weights of most classes are zero."""
    logits, labels, inverse, lower, upper = drawn(classes, scale)
    rows = TemperedRows(SortedRows(logits, labels))
    scores = np.ascontiguousarray(logits * inverse[:, None])
    losses, by_scores, by_lower, by_upper = dense_loss(scores, labels, lower, upper)
    by_inverse = (by_scores * logits).sum(axis=1)
    for _ in range(2):  # the second time from the cuts of the first
        answer = rows.losses(inverse, lower, upper)
        for own, expected in zip(answer, (losses, by_inverse, by_lower, by_upper), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-9 * max(1.0, scale))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_few_columns_are_reduced_as_numpy_does(dtype: type[np.floating[Any]]) -> None:
    rng = np.random.default_rng(0)
    for columns in range(1, 12):
        rows = (rng.normal(size=(1000, columns)) * 10.0 ** rng.uniform(-8, 8, (1000, columns))).astype(dtype)
        rows[0, -1], rows[1, 0] = np.inf, np.nan
        np.testing.assert_array_equal(array_ops.row_max(rows), rows.max(axis=1, keepdims=True))
        np.testing.assert_array_equal(array_ops.row_sum(rows), rows.sum(axis=1, keepdims=True))
