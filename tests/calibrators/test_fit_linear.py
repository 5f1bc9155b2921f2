"""`vector`, `sms`, `matrix`, `dirichlet`: their objective, their regularisation, and logits of any scale."""

import numpy as np
import pytest
import torch
from torch import Tensor

from boxcal.calibrators import fit
from boxcal.calibrators.bound_maps.constant import ConstantBounds
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.fitting.closed_form_gradients import objective_of
from boxcal.calibrators.fitting.joint import JointObjective
from boxcal.calibrators.fitting.linear_in_box import LinearInBox
from boxcal.calibrators.fitting.linear_loss import LinearLoss, LinearPart
from boxcal.calibrators.logit_maps.linear import LinearMap
from boxcal.calibrators.method import BOUND_MAPS, parse
from tests.calibrators.samples import nll_of, overconfident

LINEAR = ("vector", "sms", "matrix", "dirichlet")


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
def test_the_fast_objective_is_that_of_the_map(method: str) -> None:
    logits, labels = confused(40, seed=0)
    data = check_validation_set(logits, labels)
    mapping = parse(method).logit_map(5)
    assert isinstance(mapping, LinearMap)
    mapping.prepare(data)
    mapping.strength = 3.0
    part = LinearPart(tuple(next(mapping.parameters()).shape), mapping.penalty_factors)
    fast = LinearLoss(mapping.columns(data.scores), data.labels.numpy(), part)
    slow = JointObjective(mapping, None, data.scores, data.labels)
    point = mapping.starts()[0].numpy() + np.random.default_rng(0).normal(0.0, 0.3, mapping.size)
    assert fast(point)[0] == pytest.approx(slow(point)[0], rel=1e-12)
    np.testing.assert_allclose(fast(point)[1], slow(point)[1], atol=1e-12)


@pytest.mark.parametrize(("bounds", "variant"), [("pb", 0), ("pb-mlp", 0), ("pb-mlp", 1), ("pb-mlp", 2)])
@pytest.mark.parametrize("method", LINEAR)
def test_the_closed_form_in_a_box_is_that_of_autograd(method: str, bounds: str, variant: int) -> None:
    data = check_validation_set(*overconfident(300, 12), sample_weight=torch.linspace(0.5, 1.5, 300))
    mapping, box = parse(method).logit_map(12), BOUND_MAPS[bounds](12)
    assert isinstance(mapping, LinearMap)
    mapping.prepare(data)
    box.prepare(data.scores)
    box = box.variants(data.scores)[variant]
    maps = mapping, box, data.scores, data.labels, data.weights
    some = torch.arange(0, 300, 2)
    rng = np.random.default_rng(0)
    for quick, slow in (
        (objective_of(*maps), JointObjective(*maps)),
        (objective_of(*maps).rows(some), JointObjective(*maps).rows(some)),
    ):
        assert type(quick) is LinearInBox
        for scale in (0.0, 0.1, 0.5):
            start = np.concatenate([mapping.starts()[0], box.coordinates_of(ConstantBounds(12, 0.01, 0.6))])
            point = start + np.minimum(scale * rng.normal(size=len(start)), 0.9)
            value, gradient = slow(point)
            assert quick(point)[0] == pytest.approx(value, rel=1e-12)
            np.testing.assert_allclose(quick(point)[1], gradient, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", LINEAR)
def test_structure_is_found_and_holds_on_unseen_data(method: str) -> None:
    unseen = confused(4000, seed=1)
    scaled = nll_of(fit("ts", *confused(2000, seed=0)).calibrator, *unseen)
    assert nll_of(fit(method, *confused(2000, seed=0)).calibrator, *unseen) < scaled - 0.005


@pytest.mark.parametrize("method", LINEAR)
def test_fifty_samples_of_twenty_classes_do_no_harm(method: str) -> None:
    logits, labels = overconfident(50, 20, temperature=2.0)
    unseen = overconfident(4000, 20, temperature=2.0, seed=1)
    scaled = nll_of(fit("ts", logits, labels).calibrator, *unseen)
    assert nll_of(fit(method, logits, labels).calibrator, *unseen) < scaled + 0.1


@pytest.mark.parametrize("method", ["ts", "pts", "ts+pb", "vector+pb", *LINEAR])
@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_scale_of_the_logits_changes_nothing(method: str, factor: float) -> None:
    logits, labels = confused(300, seed=2)
    usual, scaled = (fit(method, values, labels) for values in (logits, logits * factor))
    assert scaled.nll == pytest.approx(usual.nll, abs=1e-6)
    torch.testing.assert_close(
        scaled.calibrator(logits * factor), usual.calibrator(logits), rtol=0, atol=1e-4
    )


@pytest.mark.parametrize("method", ["uncalibrated", "matrix", "lb"])
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


def test_a_strength_at_the_edge_of_its_grid_is_remarked_on() -> None:
    logits, labels = overconfident(300, 4, temperature=2.0)
    certificate = fit("dirichlet", logits, labels).certificate
    assert "strength" in certificate.on_boundary
    assert any("strongest regularisation tried" in note for note in certificate.notes)
