"""Calibrators as ONNX models: onnxruntime gives the calibrator's own answers."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from boxcal.calibrators import Bounds, Calibrator, fit, methods
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.errors import ExportError
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.network import CENTRED, NetworkMap
from tests.calibrators.filled_maps import filled_calibrator

CLASSES = 5
TABLES = {"isotonic", "venn-abers"}
OFTEN = {"ts+pb", "pts+pb-mlp", "ets+lb", "mix+dirichlet"}
"""The combinations of maps that are not left to the long tests."""


def run(path: Path, **inputs: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    answer: np.ndarray = session.run(None, inputs)[0]
    return answer


def has_onnx_form(method: str) -> bool:
    parts = set(method.split("+"))
    return not parts & TABLES and "nc" not in parts


def rows(count: int, width: int = CLASSES) -> torch.Tensor:
    return 2.0 * torch.randn(count, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in OFTEN or "+" not in name else pytest.mark.long)
        for name in methods()
        if has_onnx_form(name)
    ],
)
def test_onnxruntime_gives_the_same_answers(method: str, tmp_path: Path) -> None:
    calibrator = filled_calibrator(method, CLASSES)
    calibrator.to_onnx(tmp_path / "calibrator.onnx")
    scores = rows(37, calibrator.width)
    answer = run(tmp_path / "calibrator.onnx", **{calibrator.reads: scores.numpy()})
    assert answer.dtype == np.float64
    np.testing.assert_allclose(answer, calibrator(scores).numpy(), rtol=0, atol=1e-6)
    assert np.abs(answer.sum(axis=1) - 1).max() < 1e-12
    if method != "uncalibrated" and calibrator.reads == "logits":
        assert np.abs(answer - scores.double().softmax(1).numpy()).max() > 1e-3


@pytest.mark.parametrize("method", [name for name in methods() if not has_onnx_form(name)])
def test_methods_without_an_onnx_form_are_named(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ExportError, match=method.replace("+", r"\+")):
        filled_calibrator(method, CLASSES).to_onnx(tmp_path / "calibrator.onnx")
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr().out == ""  # torch would write the whole graph


def test_fitted_bounds_yield_to_bounds_that_are_inputs(tmp_path: Path) -> None:
    calibrator = Calibrator("pb", IdentityMap(CLASSES), ConstantBounds.of(CLASSES, 0.05, 0.5), CLASSES)
    calibrator.to_onnx(tmp_path / "calibrator.onnx", request_bounds=True)
    logits = 2.0 * rows(40)
    rng = np.random.default_rng(0)
    lower = (rng.dirichlet(np.ones(CLASSES), 40) * rng.uniform(0, 0.999, (40, 1))).astype(np.float32)
    upper = np.clip(lower + rng.uniform(0, 0.5, (40, CLASSES)), 0, 1).astype(np.float32)
    upper[upper.sum(axis=1) < 1.01] = 1.0
    answer = run(tmp_path / "calibrator.onnx", logits=logits.numpy(), lower=lower, upper=upper)
    bounds = Bounds(torch.from_numpy(lower), torch.from_numpy(upper))
    expected = calibrator.calibrate(logits, bounds)
    assert 0 < expected.relaxed.sum() < 40
    np.testing.assert_allclose(answer, expected.probabilities.numpy(), rtol=0, atol=1e-6)
    assert ((answer >= lower) & (answer <= upper)).all()


@pytest.mark.parametrize("method", ["beta", "ets", "dpb", "sms"])
def test_classes_far_below_the_largest_share_a_lower_bound_as_they_must(method: str, tmp_path: Path) -> None:
    calibrator = filled_calibrator(method, CLASSES)
    calibrator.to_onnx(tmp_path / "calibrator.onnx", request_bounds=True)
    logits = 60.0 * rows(40)
    lower, upper = np.full((40, CLASSES), 0.01, np.float32), np.full((40, CLASSES), 0.6, np.float32)
    answer = run(tmp_path / "calibrator.onnx", logits=logits.numpy(), lower=lower, upper=upper)
    expected = calibrator(logits, Bounds(torch.from_numpy(lower), torch.from_numpy(upper)))
    np.testing.assert_allclose(answer, expected.numpy(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", ["pts", "pts+pb-mlp"])
def test_networks_that_read_centred_logits_are_exported_and_served_alike(method: str, tmp_path: Path) -> None:
    logits = 3 * torch.randn(64, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    calibrator = fit(method, logits, torch.arange(64) % 12).calibrator
    maps = [one for one in (calibrator.logit_map, calibrator.bound_map) if isinstance(one, NetworkMap)]
    assert len(maps) == 1 + ("+" in method)
    for number, one in enumerate(maps):
        one.prepare_network(logits.numpy(), CENTRED)
        one.set_coordinates(0.5 * np.random.default_rng(number).normal(size=one.size))
    expected = calibrator(logits).numpy()
    np.testing.assert_allclose(calibrator(logits + 7.0).numpy(), expected, rtol=0, atol=1e-12)
    calibrator.to_onnx(tmp_path / "calibrator.onnx")
    answer = run(tmp_path / "calibrator.onnx", logits=logits.float().numpy())
    np.testing.assert_allclose(answer, expected, rtol=0, atol=1e-5)
    served = ArrayCalibrator.from_bytes(calibrator.to_bytes())
    np.testing.assert_allclose(served(logits.numpy()), expected, rtol=0, atol=1e-12)


def test_a_row_that_is_not_finite_gives_nan(tmp_path: Path) -> None:
    filled_calibrator("pb", CLASSES).to_onnx(tmp_path / "calibrator.onnx")
    logits = rows(3).numpy()
    logits[1, 2] = np.nan
    answer = run(tmp_path / "calibrator.onnx", logits=logits)
    assert np.isnan(answer[1]).all()
    assert np.isfinite(answer[[0, 2]]).all()
