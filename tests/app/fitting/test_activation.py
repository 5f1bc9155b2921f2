"""A calibrator is activated only after it is built, checked and recorded."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import generate_latest

from boxcal.app.http.problems import CalibratorNotFound, DamagedArtifact, UnusableCalibrator
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.registry.activator import KEPT, Activator, check
from boxcal.app.registry.records import ActivatePolicy, Decision, FittedCalibrator
from boxcal.app.registry.store import Registry
from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.temperature import TemperatureScaling
from tests.app.fitting.validation_data import DIGITS, overconfident
from tests.app.raising import raises_problem

LOGITS, LABELS = overconfident()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    registry = Registry(f"sqlite:///{tmp_path / 'boxcal.db'}", DIGITS, owner="me")
    yield registry
    registry.close()


def accept(activator: Activator, registry: Registry, artifact: bytes, *, activate: bool) -> int:
    fit_id = str(len(registry.fits.list(1000)))
    fit = registry.fits.add(fit_id, "ts", ActivatePolicy.ALWAYS, 7)
    fitted = FittedCalibrator("ts", artifact, {}, {"warnings": []}, b"", b"", len(LABELS))
    return activator.accept(fit, fitted, lambda _: Decision(activate, "so"))[0]


@pytest.fixture(scope="module")
def artifact() -> bytes:
    return fit("ts", torch.from_numpy(LOGITS), torch.from_numpy(LABELS)).calibrator.to_bytes()


def test_it_starts_with_the_calibrator_that_was_active(registry: Registry, artifact: bytes) -> None:
    telemetry = Telemetry({})
    first = Activator(registry, 10, telemetry)
    assert (first.active.current.version, first.active.current.method) == (0, "uncalibrated")
    accept(first, registry, artifact, activate=True)
    assert first.active.current.version == 1
    assert b'boxcal_calibrator_info{method="ts",version="1"} 1.0' in generate_latest(telemetry.registry)
    assert b'version="0"' not in generate_latest(telemetry.registry)
    again = Activator(registry, 10, telemetry)
    expected = Calibrator.from_bytes(artifact)(torch.from_numpy(LOGITS)).numpy()
    np.testing.assert_array_equal(again.active.current.calibrator(LOGITS), expected)


def test_activating_and_rolling_back_swap_the_reference(registry: Registry, artifact: bytes) -> None:
    activator = Activator(registry, 10, Telemetry({}))
    for _ in range(2):
        accept(activator, registry, artifact, activate=False)
    before = activator.active.current
    assert before.version == 0
    assert activator.activate(2).version == activator.active.current.version == 2
    assert activator.activate(1).version == activator.active.current.version == 1
    assert activator.rollback().version == activator.active.current.version == 2
    assert activator.rollback().version == activator.active.current.version == 0
    assert activator.active.current is before


def test_what_cannot_answer_never_comes_into_force(registry: Registry, artifact: bytes) -> None:
    activator = Activator(registry, 10, Telemetry({}))
    for wrong in (artifact[:-1], b"", Calibrator.uncalibrated(9).to_bytes()):
        with raises_problem(DamagedArtifact):
            accept(activator, registry, wrong, activate=True)
        assert [record.version for record in registry.list()] == [0]
        assert activator.active.current.version == registry.activations.active().version == 0
    with raises_problem(CalibratorNotFound):
        activator.activate(1)


def test_a_calibrator_whose_answers_are_no_probabilities_is_refused() -> None:
    wrong = TemperatureScaling(10, {"temperature": np.nan})
    with pytest.raises((UnusableCalibrator, ValueError)):
        check(ArrayCalibrator("ts", wrong, ConstantBounds(10), 10), 10)


def test_calibrators_used_by_name_are_kept_but_not_without_end(registry: Registry, artifact: bytes) -> None:
    activator = Activator(registry, 10, Telemetry({}))
    for _ in range(KEPT + 2):
        accept(activator, registry, artifact, activate=False)
    assert activator.load(KEPT + 2) is activator.load(KEPT + 2)
    oldest = activator.load(1)
    for version in range(2, KEPT + 3):
        activator.load(version)
    assert activator.load(1) is not oldest
