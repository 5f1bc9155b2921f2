"""The worked example of CONTRIBUTING.md: one new file is a method."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcal.calibrators import Calibrator, fit, maps, methods
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.method import catalogue, logit_maps

DOCUMENT = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Put the file of the example beside those of the other maps."""
    blocks = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', DOCUMENT.read_text(), flags=re.DOTALL))
    (tmp_path / "offset.py").write_text(blocks["calibrators/maps/offset.py"])
    monkeypatch.setattr(maps, "__path__", [*maps.__path__, str(tmp_path)])
    for known in (logit_maps, catalogue):
        known.cache_clear()
    yield
    sys.modules.pop("boxcal.calibrators.maps.offset", None)
    for known in (logit_maps, catalogue):
        known.cache_clear()


@pytest.mark.usefixtures("offset")
def test_a_method_is_added_by_one_file() -> None:
    assert {"offset", "offset+pb", "offset+pb-mlp", "offset+lb"} <= set(methods())
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(600, 3, generator=generator, dtype=torch.float64)
    shift = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    labels = torch.multinomial((logits + shift).softmax(1), 1, generator=generator)[:, 0]
    result = fit("offset", logits, labels)
    learned = torch.tensor(result.calibrator.spec["parameters"]["offsets"], dtype=torch.float64)
    torch.testing.assert_close(learned - learned.mean(), shift, rtol=0, atol=0.3)
    again = Calibrator.from_bytes(result.calibrator.to_bytes())
    assert torch.equal(again(logits), result.calibrator(logits))
    served = ArrayCalibrator.from_bytes(result.calibrator.to_bytes())
    np.testing.assert_allclose(served(logits.numpy()), again(logits).numpy(), rtol=0, atol=1e-12)
    assert fit("offset+pb", logits, labels).nll <= result.nll + 1e-12
    assert "offset" in fit("auto", logits, labels).choice["cross_validated_nll"]
