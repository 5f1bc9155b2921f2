"""Calibrators on arrays answer as those on tensors, for every method there is, and refuse the same bytes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from boxcal.calibrators import Bounds, Calibrator
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.errors import ArtifactError
from boxcal.calibrators.formulas import BOXES, FORMULAS, HIDDEN
from boxcal.calibrators.method import BOUND_MAPS, LOGIT_MAPS, catalogue, parse_stored
from boxcal.calibrators.monitoring.candidates import adjust
from boxcal.calibrators.parametrised import Parametrised
from boxcal.calibrators.stored import reads_of_methods

Array = np.ndarray[Any, Any]
FEATURES, PLACES = 6, 9
BIT_IDENTICAL = {"uncalibrated", "ts", "pb", "pb-lower", "pb-upper", "ts+pb"}


NUMBERS: dict[str, float | list[float]] = {
    "mixture_weights": [0.5, 0.3, 0.2],
    "logit_lower": -0.2,
    "logit_upper": 0.6,
    "lower": 0.01,
    "upper": 0.45,
}
CENTRED = {"offsets", "adjustment_offsets", "bias_1", "bias_2", "bias_3", "head_bias", "intercept"}
SIGNED = {"weight_1", "weight_2", "weight_3", "head_weight", "turned_weight"}


def filled(name: str, own: Tensor, generator: torch.Generator) -> Tensor:
    """Values that a fit could have produced."""
    noise, last = torch.rand(own.shape, generator=generator, dtype=torch.float64), name.rpartition(".")[2]
    values = noise + 0.3
    if last in NUMBERS:
        values = torch.tensor(NUMBERS[last], dtype=torch.float64)
    elif last == "places":
        values = noise.sort(dim=1).values
    elif last == "values":
        values = 0.1 + 0.9 * noise
    elif last == "weight":
        values = torch.eye(len(own)).double() + 0.2 * (noise - 0.5)
    elif last == "normalised":
        values = (3.0 * noise).round()
    elif last in CENTRED | SIGNED:
        values = (noise - 0.5) * (1.0 if last in CENTRED else 4.0)
    return values


def made(method: str, num_classes: int) -> Calibrator:
    """A calibrator with random parameters."""
    sizes = {
        "head_weight": torch.zeros(num_classes, FEATURES).double(),
        "places": torch.zeros(num_classes, PLACES).double(),
    }
    sizes |= {f"first.{name}": size for name, size in sizes.items()}
    logit_map, bound_map = parse_stored(method).stored_maps(sizes, {}, num_classes)
    generator = torch.Generator().manual_seed(1)
    modules: list[Parametrised] = [logit_map]
    if "pb" in method:
        modules.append(bound_map)
    for module in modules:
        for name, own in module.state_dict().items():
            own.copy_(filled(name, own, generator))
    return Calibrator(method, logit_map, bound_map, num_classes)


def requests(count: int, num_classes: int) -> list[tuple[Array, Array] | None]:
    """No bounds; bounds that fitted ones can meet, and some to which they must yield; bounds of each row."""
    rng = np.random.default_rng(2)
    tight = rng.dirichlet(np.ones(num_classes), count) * 0.95
    return [
        None,
        (np.zeros(num_classes), np.full(num_classes, 0.8)),
        (np.full(num_classes, 0.9 / num_classes), np.full(num_classes, 1.1 / num_classes)),
        (tight, np.minimum(tight + 0.1, 1.0)),
    ]


@pytest.mark.parametrize("method", [*catalogue(), "ts+em", "matrix+pb-mlp+bias"])
def test_arrays_give_the_answers_of_tensors(method: str) -> None:
    for num_classes in (3, 12):
        tensors = made(method, num_classes)
        data = tensors.to_bytes()
        arrays = ArrayCalibrator.from_bytes(data)
        assert arrays.to_bytes() == data
        assert (arrays.method, arrays.reads) == (method, tensors.reads)
        for count in (1, 5):
            rows = np.random.default_rng(count).normal(size=(count, arrays.width)) * 3.0
            for request in requests(count, num_classes):
                bounds = None if request is None else Bounds(*map(torch.from_numpy, request))
                expected = tensors.calibrate(torch.from_numpy(rows), bounds)
                found = arrays.calibrate(rows, request)
                exact = method in BIT_IDENTICAL and request is None
                for one, other in (
                    (found.probabilities, expected.probabilities),
                    (found.logits, expected.logits),
                    (found.box[0], expected.lower),
                    (found.box[1], expected.upper),
                ):
                    np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=0 if exact else 1e-12)
                np.testing.assert_array_equal(found.relaxed, expected.relaxed.numpy())


def shapes_of(module: Parametrised) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def test_formulas_store_what_the_maps_store() -> None:
    sizes = {"K": 12, "T": 10, "D": 1, "P": 0, "H1": HIDDEN, "H2": HIDDEN}
    modules: dict[str, Parametrised] = {one.name: one(12) for one in LOGIT_MAPS}
    modules |= {name: one(12) for name, one in BOUND_MAPS.items() if name in BOXES}
    for name, module in modules.items():
        formula = (FORMULAS | BOXES)[name]
        stated = {
            key: tuple(sizes[size] if isinstance(size, str) else size for size in shape or (1,))
            if shape != ()
            else ()
            for key, shape in formula.shapes.items()
        }
        assert stated == shapes_of(module), name
        assert getattr(module, "reads", "logits") == formula.reads


def test_what_each_method_reads_is_known_without_torch() -> None:
    known = {name: method.logit_map.reads for name, method in catalogue().items()}
    assert list(reads_of_methods().items()) == [("auto", "logits"), *known.items()]
    program = (
        "import sys, boxcal.calibrators.stored as s; s.reads_of_methods(); print('torch' in sys.modules)"
    )
    asked = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=True)
    assert asked.stdout.strip() == "False"


def test_an_adjustment_is_that_of_tensors() -> None:
    tensors, offsets = made("ets+pb", 5), np.linspace(-1.0, 1.0, 5)
    rows = np.random.default_rng(0).normal(size=(4, 5))
    found = ArrayCalibrator.from_bytes(tensors.to_bytes()).adjusted(offsets)
    expected = adjust(tensors, offsets)
    assert found.method == expected.method
    np.testing.assert_allclose(found(rows), expected(torch.from_numpy(rows)).numpy(), rtol=0, atol=1e-12)


def test_the_uncalibrated_one_is_that_of_tensors() -> None:
    assert ArrayCalibrator.uncalibrated(7).to_bytes() == Calibrator.uncalibrated(7).to_bytes()


@pytest.mark.parametrize("method", ["ts", "ets", "lb", "dpb", "isotonic", "pb", "fc"])
def test_bytes_that_tensors_refuse_are_refused(method: str) -> None:
    one = made(method, 4)
    for module in (one.logit_map, one.bound_map):
        for name, own in module.state_dict().items():
            if own.numel() and not name.startswith(("head", "turned", "places")):
                kept = own.clone()
                own.fill_(-7.0)
                with pytest.raises(ArtifactError):
                    ArrayCalibrator.from_bytes(one.to_bytes())
                own.copy_(kept)


def test_nothing_of_this_imports_torch() -> None:
    code = """
import sys
import numpy as np
from boxcal.calibrators.array_calibrator import ArrayCalibrator
ArrayCalibrator.from_bytes(sys.stdin.buffer.read()).calibrate(np.zeros((2, 4)), (np.zeros(4), np.ones(4)))
assert not {"torch", "sklearn"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], input=made("pts+pb-mlp", 4).to_bytes(), check=True)
