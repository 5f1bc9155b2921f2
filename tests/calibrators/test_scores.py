"""How scores look, their one conversion to logits, and methods that mix zeros with uniform answers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from boxcal import BoxCalibrator, Calibrator, evaluate, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.checks import check_data
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.maps import mixture as mixture_module
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.mixture import Mixture
from boxcal.calibrators.maps.temperature import TemperatureScaling
from boxcal.calibrators.scores import ScoreLook, as_logits, two_columns
from tests.calibrators.samples import Array, nll_of, softmax

CLASSES = (2, 3, 5, 10, 30, 100)
ROUNDINGS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "2 decimals": ("probabilities", lambda p: p.round(2)),
    "3 decimals": ("probabilities", lambda p: p.round(3)),
    "4 decimals": ("probabilities", lambda p: p.round(4)),
    "float16": ("probabilities", lambda p: p.astype(np.float16)),
    "float32": ("probabilities", lambda p: p.astype(np.float32)),
    "float64": ("probabilities", lambda p: p),
    "whole percent": ("percent", lambda p: (100 * p).round()),
    "percent, 1 decimal": ("percent", lambda p: (100 * p).round(1)),
    "percent": ("percent", lambda p: 100 * p),
}


def logits_of(num_classes: int, spread: float = 3.0, rows: int = 200) -> Array:
    return spread * np.random.default_rng(num_classes).normal(size=(rows, num_classes))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("num_classes", CLASSES)
@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_probabilities_are_recognised_however_rounded(rounding: str, num_classes: int, spread: float) -> None:
    kind, rounded = ROUNDINGS[rounding]
    logits = logits_of(num_classes, spread)
    rows = rounded(softmax(logits))
    assert ScoreLook.of(np.array_split(rows, 3)).kind == kind
    labels = logits.argmax(axis=1)
    serious = [one for one in check_data(check_validation_set(rows, labels)) if one.severity == "serious"]
    assert f"set scores={kind}" in " ".join(one.message for one in serious)
    with pytest.raises(ValueError, match=f'Set scores="{kind}"; if these are logits all the same'):
        BoxCalibrator("ts", classes=np.arange(num_classes)).fit(rows.astype(np.float64), labels)
    found, _ = as_logits(rows, kind)
    np.testing.assert_allclose(softmax(found), rows / rows.sum(axis=1, keepdims=True, dtype=float), atol=1e-6)


@pytest.mark.parametrize("num_classes", CLASSES)
def test_logits_and_sigmoids_are_no_probabilities(num_classes: int) -> None:
    logits = logits_of(num_classes)
    assert ScoreLook.of([logits]).kind is None
    assert ScoreLook.of([np.maximum(logits, 0)]).kind is None
    sigmoids = 1 / (1 + np.exp(-logits_of(num_classes, 2.0)))
    assert ScoreLook.of([sigmoids]).kind == "sigmoids"
    found = check_data(check_validation_set(sigmoids, logits.argmax(axis=1)))
    assert [one.severity for one in found if one.code == "sigmoids"] == ["serious"]


def test_cosines_are_told_to_be_scaled() -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(200) % 10
    cosines = 0.2 + 0.02 * rng.normal(size=(200, 10)) + 0.03 * np.eye(10)[labels]
    (found,) = (one for one in check_data(check_validation_set(cosines, labels)) if one.code == "sigmoids")
    assert "cosines of a contrastive model times its scale, which is 100 for CLIP" in found.message
    assert check_data(check_validation_set(100 * cosines, labels)) == []


def test_real_logits_are_not_taken_for_something_else() -> None:
    """2,000 sets of logits of few rows and classes, of every size and offset."""
    rng = np.random.default_rng(0)
    for _ in range(2000):
        rows, num_classes = rng.integers(20, 200), rng.integers(2, 60)
        logits = rng.exponential(3) * rng.normal(size=(rows, num_classes)) + rng.normal() * 3
        assert ScoreLook.of([np.round(logits, rng.integers(1, 8))]).kind in {None, "sigmoids"}
        assert ScoreLook.of([logits]).refusal() is None


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_a_zero_is_the_same_in_every_type(dtype: Any) -> None:
    found, _ = as_logits(np.array([[0, 0.25, 0.75]], dtype), "probabilities")
    assert found.dtype == np.float64
    assert found[0, 0] == pytest.approx(-87.336544750, abs=1e-9)
    assert found[0, 1:] == pytest.approx([np.log(0.25), np.log(0.75)])


@pytest.mark.parametrize(
    ("row", "kind", "is_read"),
    [
        ([0.99, 0.0], "probabilities", True),
        ([1.0, 0.01], "probabilities", True),
        ([0.33, 0.33, 0.33], "probabilities", True),
        ([0.98, 0.0], "probabilities", False),
        ([0.3, 0.3, 0.3, 0.125], "probabilities", False),
        ([0.01] * 98, "probabilities", True),  # each of 98 classes is off by up to .005
        ([0.2] * 7 + [0.0] * 3, "probabilities", False),
        ([33.0, 33.0, 33.0], "percent", True),
        ([33.0, 33.0, 31.0], "percent", False),
        ([0.5, 0.6], "probabilities", False),
        ([0.0] * 300, "probabilities", False),
    ],
)
def test_sums_may_differ_by_what_rounding_explains(row: list[float], kind: str, is_read: bool) -> None:
    if is_read:
        found, _ = as_logits(np.array([row]), kind)
        np.testing.assert_allclose(np.exp(found[0]), np.maximum(np.array(row) / sum(row), 2.0**-126))
    else:
        with pytest.raises(InvalidDataError, match="sums to"):
            as_logits(np.array([row]), kind)


def test_what_rounding_leaves_beyond_0_and_1_is_read_as_they_are_and_other_numbers_are_named() -> None:
    rows = np.array([[-1e-17, 1.0000000000000002], [1.000005, -5e-6], [0.25, 0.75]])
    found, remarked = as_logits(rows, "probabilities")
    assert remarked == 0
    np.testing.assert_allclose(np.exp(found), [[2.0**-126, 1.0], [1.0, 2.0**-126], [0.25, 0.75]], rtol=1e-12)
    assert ScoreLook.of([rows]).kind == "probabilities"
    half = np.array([[1.001, 0.0]], np.float16)
    assert as_logits(half, "probabilities", precision=2.0**-10)[0][0, 0] == 0
    for row in ([1.00002, 0.0], [-2e-5, 1.0]):
        with pytest.raises(InvalidDataError, match="lies between 0 and 1"):
            as_logits(np.array([row]), "probabilities")
    assert evaluate(rows, [1, 0, 1]).nll == pytest.approx(-np.log(0.75) / 3)
    with pytest.raises(InvalidDataError, match=r"probabilities\[8, 1\] is 1.25; .* between 0 and 1\. Send"):
        as_logits(np.array([[0.0, 1.25]]), "probabilities", 8)
    with pytest.raises(InvalidDataError, match=r"between 0 and 1\. Set scores=percent"):
        as_logits(np.array([[25.0, 75.0], [40.0, 60.0]]), "probabilities")


def test_one_column_is_the_second_of_two_classes() -> None:
    assert two_columns(np.array([0.25]), "probabilities").tolist() == [[0.75, 0.25]]
    assert two_columns(np.array([[25.0]]), "percent").tolist() == [[75.0, 25.0]]
    assert two_columns(np.array([-3.0]), "logits").tolist() == [[0.0, -3.0]]


def votes(rows: int = 1500, trees: int = 10, seed: int = 0) -> tuple[Array, Array]:
    """Probabilities of few votes, so that many are 0, also of true classes."""
    rng = np.random.default_rng(seed)
    shares = softmax(2 * rng.normal(size=(rows, 3)))
    labels = np.array([rng.choice(3, p=row) for row in shares])
    return rng.multinomial(trees, shares) / trees, labels


PROBABILITIES, LABELS = votes()
LOGITS, _ = as_logits(PROBABILITIES, "probabilities")


def test_some_of_many_rows_tell_the_temperature_of_a_mixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 for votes that call true classes impossible, that of `ts` for a network that is too sure."""
    rng = np.random.default_rng(0)
    sure = 9.0 * rng.normal(size=(900, 5))
    labels = np.array([rng.choice(5, p=softmax(row[None] / 6.0)[0]) for row in sure])
    both = [check_validation_set(LOGITS, LABELS), check_validation_set(sure, labels)]
    of_all = [Mixture.of(data, data.effective).parameters for data in both]
    monkeypatch.setattr(mixture_module, "MANY", 1)
    monkeypatch.setattr(mixture_module, "ENOUGH", 200)
    of_some = [Mixture.of(data, data.effective).parameters for data in both]
    assert of_some == of_all
    assert of_all[0]["mixture_temperature"] == 1.0
    assert 5.0 < of_all[1]["mixture_temperature"] < 7.0


def test_the_map_reads_the_mixture() -> None:
    """With the temperature 2 and the share .1, a probability of 0 of three counts as .1 / 3."""
    mixture = Mixture(3, {"mixture_temperature": 2.0, "mixture_share": 0.1})
    both = Chain(mixture, TemperatureScaling(3, {"temperature": 0.5}))
    calibrator = Calibrator("mix+ts", both, ConstantBounds(3), 3)
    tempered = np.sqrt([0.0, 0.25, 0.75])
    powers = (0.9 * tempered / tempered.sum() + 0.1 / 3) ** 2
    row, _ = as_logits(np.array([[0.0, 0.25, 0.75]]), "probabilities")
    expected = (powers / powers.sum())[None]
    np.testing.assert_allclose(calibrator(torch.from_numpy(row)).numpy(), expected, rtol=1e-12, atol=1e-15)
    on_arrays = ArrayCalibrator.from_bytes(calibrator.to_bytes())
    np.testing.assert_allclose(on_arrays(row), expected, rtol=1e-12, atol=1e-15)
    assert on_arrays.spec["parameters"] == {
        "mixture_temperature": 2.0,
        "mixture_share": 0.1,
        "temperature": 0.5,
        "lower": 0.0,
        "upper": 1.0,
    }
    adjusted = ArrayCalibrator.from_bytes(on_arrays.adjusted(np.zeros(3)).to_bytes())
    np.testing.assert_allclose(adjusted(row), expected, rtol=1e-12, atol=1e-15)


def test_the_mixture_has_the_temperature_of_ts() -> None:
    """An overconfident network keeps its differences: only what N samples cannot tell from 0 is cut off."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(4000, 3))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    parameters = fit("mix+sms", 50.0 * logits, labels).calibrator.spec["parameters"]
    assert parameters["mixture_temperature"] == pytest.approx(50.0, rel=0.05)
    assert parameters["mixture_share"] == 1 / 4001


@pytest.mark.parametrize("method", ["ts", "vector", "sms"])
def test_it_is_better_where_true_classes_have_probability_0(method: str) -> None:
    later, truth = votes(seed=1)
    rows = torch.from_numpy(as_logits(later, "probabilities")[0])
    plain, mixed = (
        nll_of(fit(name, LOGITS, LABELS).calibrator, rows, torch.from_numpy(truth))
        for name in (method, f"mix+{method}")
    )
    assert mixed < plain - 0.05


def test_a_mixture_that_gains_nothing_leaves_the_logits_as_they_are() -> None:
    logits = np.log([[0.7, 0.3], [0.3, 0.7]] * 10)
    found = fit("mix+ts", logits, np.array([0, 1] * 7 + [1, 0] * 3))
    assert found.nll == found.certificate.uncalibrated_nll
    assert found.calibrator.spec["parameters"]["mixture_share"] == 0.0
    np.testing.assert_allclose(found.on_arrays(logits), np.exp(logits), rtol=0, atol=1e-15)
