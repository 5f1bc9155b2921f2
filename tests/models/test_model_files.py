"""ONNX files and exported programs: real files, written here, with and without their declarations."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from boxcal.models.errors import (
    BackboneError,
    UnusableDevice,
    UnusableLabels,
    UnusablePreprocessing,
    UnusableWeights,
)
from boxcal.models.loading import load_backbone
from boxcal.models.onnx_file import weights_alone_quantised
from boxcal.models.preprocessing import ImageClassification

CLASSES = 5
WEIGHT = np.random.default_rng(0).normal(size=(3 * 4 * 4, CLASSES)).astype(np.float32)
GREY_SPEC = {"resize": 4, "crop": 4, "mean": [0.5], "std": [0.5]}
COLOUR_SPEC = {"resize": 4, "crop": 4, "mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.3]}


def write_onnx(
    path: Path,
    *,
    shape: tuple[Any, ...] = ("N", 3, 4, 4),
    dtype: int = TensorProto.FLOAT,
    softmax: bool = False,
    outputs: tuple[str, ...] = ("logits",),
    metadata: dict[str, str] | None = None,
) -> Path:
    """A linear classifier: flatten, multiply, and softmax where asked."""
    features = int(np.prod([size for size in shape[1:] if isinstance(size, int)]))
    weight = numpy_helper.from_array(WEIGHT[:features].astype(helper.tensor_dtype_to_np_dtype(dtype)), "w")
    last = "raw" if softmax else outputs[0]
    nodes = [helper.make_node("Flatten", ["x"], ["flat"]), helper.make_node("MatMul", ["flat", "w"], [last])]
    if softmax:
        nodes.append(helper.make_node("Softmax", ["raw"], [outputs[0]]))
    nodes += [helper.make_node("Identity", [outputs[0]], [name]) for name in outputs[1:]]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", dtype, shape)],
        [helper.make_tensor_value_info(name, dtype, (shape[0], CLASSES)) for name in outputs],
        [weight],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    for key, value in (metadata or {}).items():
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, path)
    return path


def declare(path: Path, **members: Any) -> None:
    path.with_suffix(".json").write_text(json.dumps(members))


def load(path: Path, **options: Any) -> Any:
    return load_backbone(f"{path.suffix[1:]}:{path}", **({"device": "cpu"} | options))


def samples(count: int, shape: tuple[int, ...] = (3, 4, 4)) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("batch_size", ["N", 1, 4])
@pytest.mark.parametrize("count", [1, 2, 4, 9, 40])
def test_any_batch_through_a_free_or_fixed_dimension(
    batch_size: int | str, count: int, tmp_path: Path
) -> None:
    backbone = load(write_onnx(tmp_path / "m.onnx", shape=(batch_size, 3, 4, 4)))
    batch = samples(count)
    torch.testing.assert_close(backbone(batch), batch.flatten(1) @ torch.from_numpy(WEIGHT))
    assert (backbone.name, backbone.labels, backbone.num_classes) == ("onnx:m.onnx", tuple("01234"), 5)
    assert backbone.preprocessing is None


@pytest.mark.parametrize("quantised_inputs", [False, True])
def test_weights_kept_in_8_bits_are_expanded_once_where_inputs_are_floats(
    quantised_inputs: bool, tmp_path: Path
) -> None:
    scale = np.float32(0.03)  # of inputs and weights
    small = np.clip(np.round(WEIGHT / scale), -127, 127).astype(np.int8)
    nodes = [
        helper.make_node("DequantizeLinear", ["small", "scale"], ["w"]),
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("QuantizeLinear", ["flat", "scale", "zero"], ["rounded"]),
        helper.make_node("DequantizeLinear", ["rounded", "scale", "zero"], ["read"]),
        helper.make_node("MatMul", ["read" if quantised_inputs else "flat", "w"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes if quantised_inputs else [nodes[0], nodes[1], nodes[4]],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ("N", 3, 4, 4))],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ("N", CLASSES))],
        [
            numpy_helper.from_array(np.array(value), name)
            for name, value in (("small", small), ("scale", scale), ("zero", np.int8(0)))
        ],
    )
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    assert weights_alone_quantised(onnx.load(path)) is not quantised_inputs
    read = samples(3).flatten(1)
    if quantised_inputs:
        read = (read / float(scale)).round().clamp(-128, 127) * float(scale)
    torch.testing.assert_close(load(path)(samples(3)), read @ torch.from_numpy(small * scale))


def test_half_precision_files_take_and_give_float32(tmp_path: Path) -> None:
    logits = load(write_onnx(tmp_path / "m.onnx", dtype=TensorProto.FLOAT16))(samples(3))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, samples(3).flatten(1) @ torch.from_numpy(WEIGHT), atol=0.05, rtol=0.01)


def test_labels_and_preprocessing_are_declared_beside_the_file(tmp_path: Path) -> None:
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


def test_or_carried_in_its_metadata(tmp_path: Path) -> None:
    metadata = {"labels": json.dumps(list("abcde")), "preprocessing": json.dumps(COLOUR_SPEC), "author": "x"}
    path = write_onnx(tmp_path / "m.onnx", metadata=metadata)
    assert load(path).labels == tuple("abcde")
    assert load(path).preprocessing.crop == 4
    declare(path, labels=list("vwxyz"))
    assert load(path).labels == tuple("vwxyz")


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
    closed_form_gradients = (pixels - spec["mean"]) / spec["std"]
    if expected[0] != 4:
        closed_form_gradients = closed_form_gradients.transpose(2, 0, 1)
    assert np.abs(sample - closed_form_gradients).max() < 1e-5
    assert backbone(torch.from_numpy(sample)[None]).shape == (1, CLASSES)


def test_probabilities_are_not_taken_for_logits(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx", softmax=True)
    with pytest.raises(UnusableWeights, match=r'sums to 1.*declare "outputs": "probabilities"'):
        load(path)
    declare(path, outputs="probabilities")
    torch.testing.assert_close(
        load(path)(samples(3)),
        (samples(3).flatten(1) @ torch.from_numpy(WEIGHT)).log_softmax(1),
        atol=1e-4,
        rtol=1e-4,
    )
    write_onnx(path)
    with pytest.raises(UnusableWeights, match="does not sum to 1, but is declared"):
        load(path)


def test_the_fingerprint_is_of_the_file(tmp_path: Path) -> None:
    one = load(write_onnx(tmp_path / "a.onnx")).fingerprint
    assert load(write_onnx(tmp_path / "b.onnx")).fingerprint == one
    assert load(write_onnx(tmp_path / "c.onnx", metadata={"version": "2"})).fingerprint != one


def test_the_fingerprint_covers_what_is_declared(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx")
    fingerprints = [load(path).fingerprint]
    for declared in (
        {"preprocessing": COLOUR_SPEC},
        {"preprocessing": COLOUR_SPEC | {"std": [0.1, 0.2, 0.4]}},
        {"preprocessing": COLOUR_SPEC | {"interpolation": "nearest"}},
    ):
        declare(path, **declared)
        fingerprints.append(load(path).fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)
    declare(path, labels=list("abcde"), outputs="logits")
    assert load(path).fingerprint == fingerprints[0]


def test_the_fingerprint_covers_external_weights_of_any_name(tmp_path: Path) -> None:
    model = onnx.load(write_onnx(tmp_path / "whole.onnx"))
    path = tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="parameters", size_threshold=0)
    one = load(path).fingerprint
    weights = bytearray((tmp_path / "parameters").read_bytes())
    weights[0] ^= 1
    (tmp_path / "parameters").write_bytes(weights)
    assert load(path).fingerprint != one


def test_the_fingerprint_covers_the_precision() -> None:
    digits = {name: load_backbone("digits", device="cpu", precision=name) for name in ("float32", "bfloat16")}
    assert digits["float32"].fingerprint != digits["bfloat16"].fingerprint


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"label": []}, r"m\.json: label: Extra inputs"),
        ({"labels": ["a"]}, "has 1 labels, but the model has 5"),
        ({"labels": "absent.txt"}, r"absent\.txt cannot be read"),
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
    with pytest.raises((UnusablePreprocessing, UnusableLabels), match=message):
        load(path)


def test_a_declaration_that_is_no_json_is_refused(tmp_path: Path) -> None:
    path = write_onnx(tmp_path / "m.onnx")
    path.with_suffix(".json").write_text("{")
    with pytest.raises(UnusablePreprocessing, match=r"m\.json: the document: Invalid JSON"):
        load(path)


def test_damaged_and_unfit_onnx_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableWeights, match=r"absent\.onnx does not exist"):
        load(tmp_path / "absent.onnx")
    text = tmp_path / "text.onnx"
    text.write_text("this is no model")
    with pytest.raises(UnusableWeights, match=r"text\.onnx is not a usable ONNX model"):
        load(text)
    with pytest.raises(UnusableWeights, match="has the outputs a, b; call the one to serve 'logits'"):
        load(write_onnx(tmp_path / "two.onnx", outputs=("a", "b")))
    assert load(write_onnx(tmp_path / "named.onnx", outputs=("a", "logits"))).num_classes == CLASSES
    with pytest.raises(
        UnusableWeights, match=r"reads inputs of free sizes .* declare a preprocessing in free\.json"
    ):
        load(write_onnx(tmp_path / "free.onnx", shape=("N", 3, "H", "W")))
    path = write_onnx(tmp_path / "m.onnx")
    with pytest.raises(UnusableWeights, match="brings its own weights"):
        load(path, weights="other.pth")
    with pytest.raises(UnusableDevice, match="carries its own precision"):
        load(path, precision="float16")
    with pytest.raises(BackboneError, match=r"reads inputs of shape \(3, 4, 4\), got \(3, 5, 4\)"):
        load(path)(torch.zeros(1, 3, 5, 4))


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(48, CLASSES, bias=False)
        self.layer.weight.data = torch.from_numpy(WEIGHT.T.copy())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x.flatten(1))
        return logits


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("programs")
    several = torch.export.Dim("N", min=1, max=16)
    example = torch.zeros(4, 3, 4, 4)
    torch.export.save(
        torch.export.export(Linear(), (example,), dynamic_shapes=({0: several},)), folder / "free.pt2"
    )
    torch.export.save(torch.export.export(Linear(), (example,)), folder / "fixed.pt2")
    return folder


@pytest.mark.parametrize("name", ["free", "fixed"])
@pytest.mark.parametrize("count", [1, 4, 9, 40])
def test_exported_programs_answer_any_batch(name: str, count: int, programs: Path) -> None:
    backbone = load(programs / f"{name}.pt2")
    torch.testing.assert_close(backbone(samples(count)), samples(count).flatten(1) @ torch.from_numpy(WEIGHT))
    assert backbone.input_shape == (3, 4, 4)
    assert backbone.labels == tuple("01234")


def test_exported_programs_are_declared_like_onnx_files(programs: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.pt2"
    path.write_bytes((programs / "free.pt2").read_bytes())
    declare(path, labels=list("abcde"), preprocessing=COLOUR_SPEC)
    backbone = load(path)
    assert backbone.labels == tuple("abcde")
    assert backbone.preprocessing.input_shape == (3, 4, 4)


class Trap:
    """What runs if a pickle is read without care."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.witness,)


def altered(source: Path, target: Path, changes: dict[str, bytes]) -> Path:
    """A copy of an archive with some entries replaced or added, by their names below the root folder."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        root = old.namelist()[0].partition("/")[0]
        for entry in old.namelist():
            if entry.partition("/")[2] not in changes:
                new.writestr(entry, old.read(entry))
        for name, content in changes.items():
            new.writestr(f"{root}/{name}", content)
    return target


def test_pickles_in_exported_programs_are_never_read(programs: Path, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    stream = io.BytesIO()
    torch.save((Trap(witness),), stream)
    with zipfile.ZipFile(programs / "free.pt2") as files:
        entry = next(name for name in files.namelist() if name.endswith("model_weights_config.json"))
        config = json.loads(files.read(entry))
    for payload in config["config"].values():
        payload["use_pickle"] = True
    traps: dict[str, dict[str, bytes]] = {
        "sample_inputs": {"data/sample_inputs/model.pt": stream.getvalue()},
        "constant": {"data/constants/opaque_obj_0": pickle.dumps(Trap(witness))},
        "weights": {"data/weights/model.pt": stream.getvalue()},
        "compiled": {"data/aotinductor/model/a.so": b"\x7fELF"},
        "config": {
            "data/weights/model_weights_config.json": json.dumps(config).encode(),
            "data/weights/weight_0": stream.getvalue(),
        },
    }
    for name, changes in traps.items():
        path = altered(programs / "free.pt2", tmp_path / f"{name}.pt2", changes)
        with pytest.raises(UnusableWeights, match=str(path)):
            load(path)
        assert not witness.exists()
    unchanged = altered(programs / "free.pt2", tmp_path / "unchanged.pt2", {})
    assert load(unchanged).num_classes == CLASSES


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("spelling", [str, str.upper])
@pytest.mark.parametrize("is_first", [True, False])
def test_entries_with_one_name_are_refused_before_torch_reads_them(
    programs: Path, tmp_path: Path, spelling: Callable[[str], str], *, is_first: bool
) -> None:
    """A check of one of them says nothing about the one that torch reads; it ignores case."""
    witness, path = tmp_path / "witness", tmp_path / "twice.pt2"
    with zipfile.ZipFile(programs / "free.pt2") as old, zipfile.ZipFile(path, "w") as new:
        name = next(name for name in old.namelist() if name.endswith("data/weights/weight_0"))
        root, _, rest = name.partition("/")
        another = (f"{root}/{spelling(rest)}", pickle.dumps(Trap(witness)))
        if is_first:
            new.writestr(*another)
        for entry in old.namelist():
            new.writestr(entry, old.read(entry))
        if not is_first:
            new.writestr(*another)
    with pytest.raises(UnusableWeights, match="has 2 entries named"):
        load(path)
    assert not witness.exists()


def test_damaged_exported_programs_are_refused(programs: Path, tmp_path: Path) -> None:
    whole = (programs / "free.pt2").read_bytes()
    for name, content in (("text", b"no zip"), ("cut", whole[: len(whole) // 2]), ("empty", b"")):
        path = tmp_path / f"{name}.pt2"
        path.write_bytes(content)
        with pytest.raises(UnusableWeights, match=rf"{name}\.pt2 is not a readable \.pt2 archive"):
            load(path)
    with pytest.raises(UnusableWeights, match=r"absent\.pt2 does not exist"):
        load(tmp_path / "absent.pt2")
    broken = altered(programs / "free.pt2", tmp_path / "broken.pt2", {"models/model.json": b"{}"})
    with pytest.raises(UnusableWeights, match=r"broken\.pt2 is not a program of this torch"):
        load(broken)
