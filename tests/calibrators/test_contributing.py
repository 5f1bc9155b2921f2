"""The worked example of CONTRIBUTING.md: one new file and one new line are a method."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from boxcal.calibrators import Calibrator, fit, method, methods
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.logit_maps.linear import VectorScaling

DOCUMENT = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_a_method_is_added_by_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', DOCUMENT.read_text(), flags=re.DOTALL))
    path = tmp_path / "offset.py"
    path.write_text(blocks["calibrators/logit_maps/offset.py"])
    spec = importlib.util.spec_from_file_location("boxcal.calibrators.logit_maps.offset", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (line,) = ast.parse(f"[{blocks['calibrators/method.py']}]", mode="eval").body.elts  # type: ignore[attr-defined]
    place = method.LOGIT_MAPS.index(VectorScaling)
    added = (*method.LOGIT_MAPS[:place], getattr(module, line.id), *method.LOGIT_MAPS[place:])
    monkeypatch.setattr(method, "LOGIT_MAPS", added)

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
