import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.errors import ArtifactError
from boxcal.calibrators.row_statistics import Sketch
from tests.calibrators.samples import contaminated


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def box(lower: float | torch.Tensor, upper: float = 0.9, **others: torch.Tensor) -> dict[str, torch.Tensor]:
    low = lower if isinstance(lower, torch.Tensor) else number(lower)
    return {"bound_map.lower": low, "bound_map.upper": number(upper), **others}


def with_spec(changes: dict[str, object], tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    spec = {"format": "boxcal-calibrator", "version": 2, "method": "pb", "num_classes": 4, **changes}
    return save(box(0.1) if tensors is None else tensors, metadata={"spec": json.dumps(spec)})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "only 0 bytes"),
        (b"\x80\x04\x95 a pickle, say", "no safetensors header"),
        (struct.pack("<Q", 1 << 60) + b"{}", "no safetensors header"),
        (struct.pack("<Q", 2) + b"{}", "no spec"),
        (save({"weight": torch.ones(3)}), "no spec"),
        (save({"weight": torch.ones(3)}, metadata={"spec": "[1]"}), "no JSON object"),
        (with_spec({"format": "other"}), "format is 'other'"),
        (with_spec({"version": 7}), "format version 7; this release reads version 2"),
        (with_spec({"version": 1}), "format version 1; .* new in 0.3.0: fit it again"),
        (with_spec({"version": 3}), "format version 3; .* new in 0.3.0: install a later release"),
        (with_spec({"method": "os.system"}), "no method 'os.system'"),
        (with_spec({"method": 3}), "method is 3"),
        (with_spec({"num_classes": 1}), "num_classes is 1"),
        (with_spec({"num_classes": True}), "num_classes is True"),
        (with_spec({"num_classes": 10**12}), "num_classes is 1000000000000"),
        (with_spec({"fitted_to": 3}), "`fitted_to` is no sketch"),
        (with_spec({"fitted_to": {"hashes": ["x"], "count": 9}}), "`fitted_to` is no sketch"),
        (with_spec({"fitted_to": {"hashes": ["-1"], "count": 9}}), "`fitted_to` is no sketch"),
        (with_spec({"fitted_to": {"hashes": ["1", "2"], "count": 1}}), "`fitted_to` is no sketch"),
        (
            with_spec({"fitted_to": {"hashes": [f"{one:x}" for one in range(257)], "count": 257}}),
            "has 257 hashes; a sketch has 256",
        ),
        (with_spec({}, {"bound_map.lower": number(0.1)}), "'bound_map.upper'.* missing"),
        (with_spec({}, {"bound_map.lower": torch.ones(2).double()}), "shape \\(\\); it is \\(2,\\)"),
        (with_spec({"method": "ts"}), "'logit_map.temperature'"),
        (with_spec({}, box(0.1, x=number(1))), "no tensor 'x'"),
        (with_spec({}, box(0.3)), "no distribution"),
        (with_spec({}, box(0.1, float("nan"))), "finite"),
        (with_spec({}, box(torch.tensor(0.1))), "float64"),
        (with_spec({"method": "ts"}, box(0, 1, **{"logit_map.temperature": number(0)})), "temperature"),
        (
            with_spec({"method": "pb-mlp"}, {"bound_map.network.bias_1": torch.zeros(10**6).double()}),
            "network.centre.*missing",
        ),
    ],
)
def test_what_is_no_calibrator_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        Calibrator.from_bytes(data)


def test_a_calibrator_keeps_hashes_of_its_rows_and_every_truncation_is_refused() -> None:
    logits, labels = contaminated(600, 4)
    fitted = fit("ts+pb", logits, labels).calibrator
    data = fitted.to_bytes()
    read = ArrayCalibrator.from_bytes(data).sketch
    assert read == fitted.sketch == Sketch.of(np.asarray(logits))
    assert ArrayCalibrator.from_bytes(memoryview(data)).sketch == read  # type: ignore[arg-type]
    assert (len(read.hashes), read.count) == (256, 600)
    for length in range(len(data)):
        with pytest.raises(ArtifactError):
            Calibrator.from_bytes(data[:length])


@pytest.mark.parametrize("method", ["ts", "ts+pb", "dirichlet"])
def test_a_damaged_calibrator_is_refused_whichever_bit_has_changed(method: str) -> None:
    """The last bit of a temperature of 2.9 made it 190,305.9, without a word."""
    logits, labels = contaminated(300, 4)
    fitted = fit(method, logits, labels).on_arrays
    data = fitted.to_bytes()
    assert ArrayCalibrator.from_bytes(data).to_bytes() == data
    random = np.random.default_rng(0)
    for place in [len(data) - 1, *random.integers(len(data), size=200)]:
        damaged = bytearray(data)
        damaged[place] ^= 1 << random.integers(8)
        try:
            read = ArrayCalibrator.from_bytes(bytes(damaged))
        except ArtifactError:
            continue
        assert read.to_bytes() == data  # a space in the header, or the name of its format
    damaged = bytearray(data)
    damaged[-1] ^= 1
    with pytest.raises(ArtifactError, match="damaged: its content does not have the SHA-256 that it names"):
        ArrayCalibrator.from_bytes(bytes(damaged))


@pytest.mark.parametrize("method", ["pts", "pb-mlp"])
def test_networks_that_read_what_this_version_does_not_know_are_refused(method: str) -> None:
    logits, labels = contaminated(200, 4)
    data = fit(method, logits, labels).calibrator.to_bytes()
    tensors = load(data)
    (reading,) = (name for name in tensors if name.endswith("normalised"))
    later = with_spec({"method": method}, {**tensors, reading: number(4.0)})
    for read in (Calibrator.from_bytes, ArrayCalibrator.from_bytes):
        with pytest.raises(ArtifactError, match=r"normalised is 4\.0"):
            read(later)
