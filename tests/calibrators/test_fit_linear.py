"""`vector`, `sms`, `matrix`, `dirichlet`: their regularisation, and logits of any scale."""

import pytest
import torch
from torch import Tensor

from boxcal.calibrators import fit
from boxcal.calibrators.errors import InvalidDataError
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


@pytest.mark.parametrize("method", ["ts", "pts", "ts+pb", *LINEAR])
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
