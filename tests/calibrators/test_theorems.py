"""The paper's propositions and theorems, on random instances and by exact enumeration."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from boxcal.calibrators import box_constrained_softmax, fit
from tests.calibrators.samples import Floats, everything


def rows(count: int, classes: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3.0 * torch.randn(count, classes, generator=generator, dtype=torch.float64)


def boxes(count: int, classes: int, *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """One uniform box (a, b) per row, with a <= 1/K <= b, tight and loose ones: (N, 1) each."""
    room = torch.rand(2, count, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return room[0] ** 2 / classes, 1 / classes + (1 - 1 / classes) * room[1] ** 2


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
def test_probability_bounding_keeps_the_predicted_label(classes: int) -> None:
    """Proposition on PB: the argmax of f is always among those of f_PB."""
    logits = rows(500, classes)
    answer = box_constrained_softmax(logits, *boxes(500, classes))
    of_label = answer.gather(1, logits.argmax(dim=1, keepdim=True))
    assert (of_label == answer.amax(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_an_upper_bound_above_one_over_k_plus_one_keeps_the_top_k(k: int) -> None:
    """The same proposition: exactly, but for classes that tie at the lower bound, which it leaves out."""
    classes, count = 12, 500
    logits, (lower, _) = rows(count, classes), boxes(count, classes)
    upper = (
        1 / (k + 1) + 1e-6 + torch.linspace(0, 1 - 1 / (k + 1) - 1e-6, count, dtype=torch.float64)[:, None]
    )
    answer = box_constrained_softmax(logits, lower, upper)
    ordered = answer.gather(1, logits.argsort(dim=1, descending=True))
    kth, next_one = ordered[:, k - 1 : k], ordered[:, k : k + 1]
    assert (ordered[:, :k].amin(dim=1, keepdim=True) >= ordered[:, k:].amax(dim=1, keepdim=True)).all()
    assert ((kth > next_one) | (kth == lower)).all()
    assert (kth > next_one).double().mean() > 0.5


@pytest.mark.parametrize("classes", [2, 5, 50])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_a_uniform_box_is_a_softmax_of_clipped_logits(classes: int, temperature: float) -> None:
    """Proposition on LB: c = τ log(a Z) and C = τ log(b Z) clip the logits to the same answer."""
    logits, (lower, upper) = rows(300, classes), boxes(300, classes)
    answer = box_constrained_softmax(logits, lower, upper, temperature=temperature)
    free = (answer > lower) & (answer < upper)
    kept = free.any(dim=1)
    assert kept.double().mean() > 0.5
    first = free.double().argmax(dim=1, keepdim=True)
    log_z = (logits / temperature - answer.log()).gather(1, first)
    clipped = logits.clamp(temperature * (lower.log() + log_z), temperature * (upper.log() + log_z))
    wanted = (clipped / temperature).softmax(dim=1)
    assert torch.allclose(answer[kept], wanted[kept], rtol=0, atol=1e-12)


def test_feature_clipping_shifts_the_logits() -> None:
    """Proposition on FC: g - W S_c(z), with S_c(u) = argmin over v of |v - u|² / 2 + c |v|."""
    data = everything(300, 4)
    calibrator = fit("fc", data.logits, data.labels, **data.extras()).calibrator
    radius = calibrator.spec["parameters"]["radius"]
    weight, _ = data.head
    assert (data.features.abs() > radius).any()
    mapped = calibrator.logit_map(data.features)
    wanted = data.logits - torch.nn.functional.softshrink(data.features, radius) @ weight.T
    assert torch.allclose(mapped, wanted - wanted.mean(dim=1, keepdim=True), atol=1e-12)


@pytest.mark.parametrize("temperature", [2.5, torch.linspace(0.5, 3.0, 200, dtype=torch.float64)[:, None]])
def test_temperature_is_a_scale_and_offsets_do_not_matter(temperature: float | Tensor) -> None:
    logits, (lower, upper) = rows(200, 8), boxes(200, 8)
    answer = box_constrained_softmax(logits, lower, upper, temperature=temperature)
    assert torch.allclose(answer, box_constrained_softmax(logits / temperature, lower, upper), atol=1e-14)
    moved = box_constrained_softmax(logits - 7.0, lower, upper, temperature=temperature)
    assert torch.allclose(answer, moved, atol=1e-14)


def true_calibration_error(predicted: Floats, chance: Floats, weight: Floats) -> float:
    """TCE = E|f - P(Y = 1 | f)| of a classifier with finitely many predictions, exactly."""
    values, group = np.unique(predicted, return_inverse=True)
    mass = np.bincount(group, weight)
    observed = np.bincount(group, weight * chance) / mass
    return float((mass * np.abs(values - observed)).sum())


@pytest.mark.parametrize("seed", range(10))
def test_bounds_reduce_the_true_calibration_error_of_an_overconfident_classifier(seed: int) -> None:
    """Theorem on when PB works: underconfident below a0 and overconfident above b0, by ε or more.

    There P(Y=1 | f) >= ε, so bounds up to a* = min(a0, ε) and from b* = 1 - min(1 - b0, ε) on serve.
    """
    rng = np.random.default_rng(seed)
    low_edge, high_edge = rng.uniform(0.05, 0.3), rng.uniform(0.7, 0.95)
    margin = min(rng.uniform(0.02, 0.2), low_edge, 1 - high_edge)
    f = np.unique(np.round(rng.beta(0.4, 0.4, 400), 6)).clip(1e-6, 1 - 1e-6)
    chance = np.clip(f + rng.normal(0, 0.05, len(f)), 0, 1)
    chance = np.where(f <= low_edge, np.maximum(chance, f + margin), chance)
    chance = np.where(f >= high_edge, np.minimum(chance, f - margin), chance)
    weight = rng.dirichlet(np.ones(len(f)))
    logits = torch.from_numpy(np.column_stack([np.log(f) - np.log1p(-f), np.zeros(len(f))]))
    before = true_calibration_error(f, chance, weight)
    risk = -(weight * (chance * np.log(f) + (1 - chance) * np.log1p(-f))).sum()
    for share in (0.1, 0.5, 1.0):
        lower, upper = share * min(low_edge, margin), 1 - share * min(1 - high_edge, margin)
        bounded = box_constrained_softmax(logits, lower, upper)[:, 0].numpy()
        held = (f < max(lower, 1 - upper)) | (f > 1 - max(lower, 1 - upper))
        assert held.any()
        bounded = np.where(held, bounded, f)  # what no bound holds is unchanged, but for rounding
        assert true_calibration_error(bounded, chance, weight) < before
        log_loss = -(weight * (chance * np.log(bounded) + (1 - chance) * np.log1p(-bounded))).sum()
        assert log_loss < risk


def test_without_its_condition_the_theorem_fails() -> None:
    """A calibrated classifier is made worse by bounds that bind."""
    f = np.linspace(0.01, 0.99, 99)
    logits = torch.from_numpy(np.column_stack([np.log(f) - np.log1p(-f), np.zeros(99)]))
    bounded = box_constrained_softmax(logits, 0.1, 0.9)[:, 0].numpy()
    weight = np.full(99, 1 / 99)
    assert true_calibration_error(f, f, weight) == pytest.approx(0.0, abs=1e-12)
    assert true_calibration_error(bounded, f, weight) > 0.005
    assert math.isclose(bounded.min(), 0.1)
