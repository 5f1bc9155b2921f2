"""ONNX files: real files, written here, with and without their declarations."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from PIL import Image

from boxcal.models import BackboneError
from boxcal.models.backends.onnx_file import weights_alone_quantised
from boxcal.models.inputs.images import ImageClassification
from boxcal.models.loading.inspection import inspect_model
from boxcal.models.loading.specifications import load_backbone
from tests.models.files import (
    CLASSES,
    COLOUR_SPEC,
    GREY_SPEC,
    WEIGHT,
    declare,
    load,
    node,
    samples,
    save_graph,
    value,
    write_onnx,
)


@pytest.mark.parametrize("batch_size", ["N", 1, 4])
@pytest.mark.parametrize("count", [1, 2, 4, 9, 40])
def test_any_batch_through_a_free_or_fixed_dimension(
    batch_size: int | str, count: int, tmp_path: Path
) -> None:
    backbone = load(write_onnx(tmp_path / "m.onnx", shape=(batch_size, 3, 4, 4)))
    batch = samples(count)
    torch.testing.assert_close(torch.as_tensor(backbone(batch)), batch.flatten(1) @ torch.from_numpy(WEIGHT))
    assert (backbone.name, backbone.labels, backbone.num_classes) == ("onnx:m.onnx", tuple("01234"), 5)
    assert backbone.preprocessing is None


@pytest.mark.parametrize("quantised_inputs", [False, True])
def test_weights_kept_in_8_bits_are_expanded_once_where_inputs_are_floats(
    quantised_inputs: bool, tmp_path: Path
) -> None:
    scale = np.float32(0.03)  # of inputs and weights
    small = np.clip(np.round(WEIGHT / scale), -127, 127).astype(np.int8)
    nodes = [node("DequantizeLinear", "small scale", "w"), node("Flatten", "x", "flat")]
    if quantised_inputs:
        nodes.append(node("QuantizeLinear", "flat scale zero", "rounded"))
        nodes.append(node("DequantizeLinear", "rounded scale zero", "read"))
    nodes.append(node("MatMul", "read w" if quantised_inputs else "flat w", "logits"))
    inputs, outputs = [value("x", "N", 3, 4, 4)], [value("logits", "N", CLASSES)]
    weights: dict[str, Any] = {"small": small, "scale": scale, "zero": np.int8(0)}
    path = save_graph(tmp_path / "m.onnx", nodes, inputs, outputs, **weights)
    assert weights_alone_quantised(onnx.load(path)) is not quantised_inputs
    read = samples(3).flatten(1)
    if quantised_inputs:
        read = (read / float(scale)).round().clamp(-128, 127) * float(scale)
    torch.testing.assert_close(
        torch.as_tensor(load(path)(samples(3))), read @ torch.from_numpy(small * scale)
    )


def test_half_precision_files_take_and_give_float32(tmp_path: Path) -> None:
    logits = torch.as_tensor(load(write_onnx(tmp_path / "m.onnx", dtype=TensorProto.FLOAT16))(samples(3)))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, samples(3).flatten(1) @ torch.from_numpy(WEIGHT), atol=0.05, rtol=0.01)


def test_labels_and_preprocessing_are_declared_beside_the_file_or_in_its_metadata(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx")
    (tmp_path / "names.txt").write_text("a\nb\nc\nd\ne\n")
    declare(path, labels="names.txt", preprocessing=COLOUR_SPEC | {"interpolation": "bicubic"})
    backbone = load(path)
    assert backbone.labels == ("a", "b", "c", "d", "e")
    assert backbone.preprocessing == ImageClassification(
        resize=4, crop=4, mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3), interpolation=Image.Resampling.BICUBIC
    )
    (tmp_path / "mine.txt").write_text("v\nw\nx\ny\nz\n")
    assert load(path, labels=tmp_path / "mine.txt").labels == ("v", "w", "x", "y", "z")
    names = tmp_path / "names.txt"  # of another editor
    names.write_bytes(b"\xef\xbb\xbfcafe\xcc\x81\r\nb\r\nc\r\nd\r\ne\r\n\r\n \r\n")
    assert load(path, labels=names).labels == ("caf\u00e9", "b", "c", "d", "e")
    assert load_backbone("logits", labels=names).labels == ("caf\u00e9", "b", "c", "d", "e")
    metadata = {"labels": json.dumps(list("abcde")), "preprocessing": json.dumps(COLOUR_SPEC), "author": "x"}
    path = write_onnx(tmp_path / "carried.onnx", metadata=metadata)
    assert load(path).labels == tuple("abcde")
    assert load(path).preprocessing.crop == 4
    declare(path, labels=list("vwxyz"))
    assert load(path).labels == tuple("vwxyz")


def test_pixels_are_given_to_a_file_that_reads_uint8(tmp_path: Path) -> None:
    """The file divides them by 100 itself."""
    nodes = [
        node("Cast", "x", "floats", to=TensorProto.FLOAT),
        node("Div", "floats hundred", "scaled"),
        node("Flatten", "scaled", "flat"),
        node("MatMul", "flat w", "logits"),
    ]
    inputs, outputs = [value("x", "N", 4, 4, 3, dtype=TensorProto.UINT8)], [value("logits", "N", CLASSES)]
    path = save_graph(tmp_path / "m.onnx", nodes, inputs, outputs, hundred=np.float32(100), w=WEIGHT)
    tensors = np.arange(96).reshape(2, 4, 4, 3)
    backbone = load(path)
    samples = backbone.inputs.check(tensors)
    np.testing.assert_allclose(backbone(samples), tensors.reshape(2, 48) / 100 @ WEIGHT, atol=1e-5)
    for wrong in (tensors + 0.5, tensors - 1, tensors + 200):
        with pytest.raises(BackboneError, match="other numbers than integers from 0 to 255"):
            backbone.inputs.check(wrong)
    declare(path, preprocessing=COLOUR_SPEC)
    message = r'as uint8; declare "mean": \[0.0, 0.0, 0.0\] and "std": \[0.0039'
    with pytest.raises(BackboneError, match=message):
        load(path)
    declare(path, preprocessing=COLOUR_SPEC | {"mean": [0, 0, 0], "std": [1 / 255] * 3})
    backbone = load(path)
    pixels = np.random.default_rng(1).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    sample = backbone.preprocessing(Image.fromarray(pixels))[None]
    np.testing.assert_allclose(backbone(sample), pixels.reshape(1, 48) / 100 @ WEIGHT, atol=1e-4)
    path.with_suffix(".json").unlink()
    assert inspect_model(path).declaration["preprocessing"]["std"] == [1 / 255] * 3


@pytest.mark.parametrize(
    ("shape", "spec", "expected"),
    [
        (("N", 4, 4, 3), COLOUR_SPEC, (4, 4, 3)),
        (("N", 1, 4, 4), GREY_SPEC, (1, 4, 4)),
        (("N", 4, 4, 1), GREY_SPEC, (4, 4, 1)),
    ],
)
def test_layouts_and_grey_images(
    shape: tuple[Any, ...], spec: dict[str, Any], expected: tuple[int, ...], tmp_path: Path
) -> None:
    path = write_onnx(tmp_path / "m.onnx", shape=shape)
    declare(path, preprocessing=spec)
    backbone = load(path)
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (4, 4, 3), dtype=np.uint8))
    sample = backbone.preprocessing(image)
    assert backbone.input_shape == sample.shape == expected
    pixels = np.atleast_3d(np.asarray(image.convert("L") if len(spec["mean"]) == 1 else image)) / 255
    wanted = (pixels - spec["mean"]) / spec["std"]
    if expected[0] != 4:
        wanted = wanted.transpose(2, 0, 1)
    assert np.abs(sample - wanted).max() < 1e-5
    assert backbone(torch.from_numpy(sample)[None]).shape == (1, CLASSES)


def test_probabilities_are_not_taken_for_logits(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx", softmax=True)
    with pytest.raises(BackboneError, match=r'sums to 1.*declare "outputs": "probabilities"'):
        load(path)
    declare(path, outputs="probabilities")
    expected = (samples(3).flatten(1) @ torch.from_numpy(WEIGHT)).log_softmax(1)
    torch.testing.assert_close(torch.as_tensor(load(path)(samples(3))), expected, atol=1e-4, rtol=1e-4)
    write_onnx(path)
    message = r'does not sum to 1, but is declared to hold probabilities. Declare "outputs": "logits"'
    with pytest.raises(BackboneError, match=message):
        load(path)


def test_the_fingerprint_covers_the_file_and_what_is_declared_but_for_labels(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx", outputs=("logits", "others"))
    fingerprints = [load(path).fingerprint]
    for declared in (
        {"preprocessing": COLOUR_SPEC},
        {"preprocessing": COLOUR_SPEC | {"std": [0.1, 0.2, 0.4]}},
        {"preprocessing": COLOUR_SPEC | {"interpolation": "nearest"}},
        {"output": "others"},
    ):
        declare(path, **declared)
        fingerprints.append(load(path).fingerprint)
    changed = write_onnx(tmp_path / "c.onnx", outputs=("logits", "others"), metadata={"version": "2"})
    fingerprints.append(load(changed).fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)
    again = write_onnx(tmp_path / "again.onnx", outputs=("logits", "others"))
    declare(again, labels=list("abcde"), outputs="logits")
    assert load(again).fingerprint == fingerprints[0]


def test_the_fingerprint_covers_external_weights_of_any_name_and_the_precision(tmp_path: Path) -> None:
    model = onnx.load(write_onnx(tmp_path / "whole.onnx"))
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="parameters", size_threshold=0)
    one = load(path).fingerprint
    weights = bytearray((tmp_path / "parameters").read_bytes())
    weights[0] ^= 1
    (tmp_path / "parameters").write_bytes(weights)
    assert load(path).fingerprint != one
    digits = {name: load_backbone("digits", device="cpu", precision=name) for name in ("float32", "bfloat16")}
    assert digits["float32"].fingerprint != digits["bfloat16"].fingerprint


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"label": []}, r"m\.json: label: Extra inputs"),
        ({"labels": ["a"]}, "has 1 labels, but the model has 5"),
        ({"labels": "absent.txt"}, r"absent\.txt cannot be read"),
        (
            {"labels": "../labels.txt"},
            r"m\.onnx: labels is '\.\./labels\.txt'; it must be the name of a file",
        ),
        ({"outputs": "scores"}, "outputs: Input should be 'logits' or 'probabilities'"),
        ({"preprocessing": {"resize": 4, "mean": [0.5], "std": [0.5]}}, r"preprocessing\.crop: a short side"),
        ({"preprocessing": COLOUR_SPEC | {"std": [0.0, 1.0, 1.0]}}, r"std\.0: .*greater than 0, got 0\.0"),
        ({"preprocessing": COLOUR_SPEC | {"std": [1.0]}}, "mean has 3 numbers and std 1"),
        ({"preprocessing": COLOUR_SPEC | {"crop": 5}}, r"makes 3 x 5 x 5, but the model reads \(3, 4, 4\)"),
        ({"preprocessing": COLOUR_SPEC | {"interpolation": "magic"}}, r"interpolation: .*'magic'"),
    ],
)
def test_wrong_declarations_are_refused(spec: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx")
    declare(path, **spec)
    with pytest.raises(BackboneError, match=message):
        load(path)
    path.with_suffix(".json").write_text("{")
    with pytest.raises(BackboneError, match=r"m\.json: the document: Invalid JSON"):
        load(path)


def test_damaged_and_unfit_onnx_files_are_refused(tmp_path: Path) -> None:
    three = write_onnx(tmp_path / "three.onnx", shape=("N", 3, "H", "W"))  # of three weights a class
    declare(three, preprocessing=COLOUR_SPEC)
    with pytest.raises(BackboneError, match=r"three\.onnx: the trial run failed: .*MatMul"):
        load(three)
    with pytest.raises(BackboneError, match=r"absent\.onnx does not exist"):
        load(tmp_path / "absent.onnx")
    (text := tmp_path / "text.onnx").write_text("this is no model")
    with pytest.raises(BackboneError, match=r"text\.onnx is not a usable ONNX model"):
        load(text)
    with pytest.raises(BackboneError, match="has the outputs a, b; call the one to serve 'logits'"):
        load(write_onnx(tmp_path / "two.onnx", outputs=("a", "b")))
    assert load(write_onnx(tmp_path / "named.onnx", outputs=("a", "logits"))).num_classes == CLASSES
    message = r"reads inputs of free sizes .* declare a preprocessing in free\.json"
    with pytest.raises(BackboneError, match=message):
        load(write_onnx(tmp_path / "free.onnx", shape=("N", 3, "H", "W")))
    path = write_onnx(tmp_path / "m.onnx")
    with pytest.raises(BackboneError, match="brings its own weights"):
        load(path, weights="other.pth")
    with pytest.raises(BackboneError, match="carries its own precision"):
        load(path, precision="float16")
    with pytest.raises(BackboneError, match=r"reads inputs of shape \(3, 4, 4\), got \(3, 5, 4\)"):
        load(path)(torch.zeros(1, 3, 5, 4))
