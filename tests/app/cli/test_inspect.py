"""`boxcal inspect` prints the declaration with which a model is served, and saves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, load, save

from boxcal.app.cli.inspect import inspect
from boxcal.app.cli.output import UsageError, escape, write_json
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.models import BackboneError
from boxcal.models.loading.inspection import inspect_model
from boxcal.models.loading.specifications import load_backbone
from tests.app.cli.conftest import Boxcal
from tests.models.files import linear, node, save_graph, value, write_onnx
from tests.models.test_libraries import of_text as text_of_transformers
from tests.models.test_onnx_exports import of_columns, of_lightgbm, of_scikit_learn, of_text

HOSTILE = """
import os, socket, sys, types
from dataclasses import dataclass
from pathlib import Path
from boxcal.app.cli.inspect import main

@dataclass
class Found:
    notes: list[str]

def attempt(name, act, *arguments):
    try:
        act(*arguments)
    except (OSError, MemoryError) as error:
        return f"{name}: {type(error).__name__}"
    return f"{name}: done"

def hostile(path):
    import numpy as np
    beside, folder, secret, memory = path.with_name("weights"), Path(sys.argv[2]), *sys.argv[3:]
    attempts = [
        attempt("beside", beside.read_bytes),
        attempt("temporary", (folder / "new").write_bytes, b""),
        attempt("secret", Path(secret).read_bytes),
        attempt("environment", Path(f"/proc/{os.getppid()}/environ").read_bytes),
        attempt("write", beside.write_bytes, b""),
        attempt("socket", socket.socket),
        attempt("fork", os.fork),
        attempt("memory", np.empty, int(memory), np.uint8),
        attempt("long file", (folder / "long").write_bytes, bytes(2**24 + 1)),
    ]
    return Found(attempts)

sys.modules["boxcal.models.loading.inspection"] = types.SimpleNamespace(inspect_model=hostile)
main(Path(sys.argv[1]), Path(sys.argv[2]))
"""
MODELS: dict[str, tuple[Callable[[Path], Any], dict[str, Any]]] = {
    "image": (
        lambda path: write_onnx(path, shape=("N", 3, 4, 4)),
        {"outputs": "logits", "labels": list("01234")},
    ),
    "probabilities": (lambda path: write_onnx(path, softmax=True), {"outputs": "probabilities"}),
    "one sigmoid": (
        lambda path: linear(path, "Sigmoid", 1),
        {"output": "scores", "activation": "sigmoid", "outputs": "probabilities", "labels": ["0", "1"]},
    ),
    "scikit-learn": (
        lambda path: of_scikit_learn(path, zipmap=True),
        {"output": "output_probability", "outputs": "probabilities", "labels": ["cat", "dog", "emu"]},
    ),
    "wide images": (
        lambda path: write_onnx(path, shape=("N", 3, 2, 6)),
        {"preprocessing": {"resize": [2, 6], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}},
    ),
    "columns": (of_columns, {"features": ["height", "age", "city"], "labels": ["0", "1", "2"]}),
    "LightGBM": (of_lightgbm, {"features": list("0123"), "outputs": "probabilities"}),
    "text": (
        of_text,
        {"tokenizer": "tokenizer.json", "pad": {"input_ids": 0, "attention_mask": 0}, "max_length": 512},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_declaration_serves_the_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, expected = MODELS[name]
    path = tmp_path / "m.onnx"
    make(path)
    path.with_suffix(".json").unlink(missing_ok=True)
    inspect(str(path), write=True, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    saved = json.loads(path.with_suffix(".json").read_text())
    assert shown["declaration"] == saved
    assert expected.items() <= saved.items()
    backbone = load_backbone(f"onnx:{path}", device="cpu")
    assert list(backbone.labels) == saved["labels"]
    assert shown["inputs"][0]["name"] in {"x", "X", "height", "rows", "input_ids"}
    with pytest.raises(UsageError, match="exists; it was not replaced"):
        inspect(str(path), write=True, as_json=False)


PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = {"size": {"height": 4, "width": 4}, "resample": 3, "image_mean": [0.5] * 3}
PROCESSOR |= {"image_std": [0.25] * 3}
HALF = {"resize": [4, 4], "mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bicubic"}
NAMES = ["ant", "bee", "cow", "dog", "emu"]
ID2LABEL = {str(number): name for number, name in enumerate(NAMES)}


@pytest.mark.parametrize(
    ("files", "expected", "note"),
    [
        ({"labels.txt": "\n".join(NAMES)}, {"labels": "labels.txt"}, "`labels` are those of labels.txt"),
        ({"config.json": {"id2label": ID2LABEL}}, {"labels": NAMES}, "`labels` are those of config.json"),
        ({"labels.txt": "a\nb"}, {"labels": list("01234")}, "has 2 labels, but the model has 5 classes"),
        ({"config.json": "{"}, {"labels": list("01234")}, "config.json was left out"),
        ({"config.json": []}, {"labels": list("01234")}, "holds no JSON object"),
        ({PREPROCESSOR: PROCESSOR}, {"preprocessing": HALF}, f"that of {PREPROCESSOR}"),
        ({PREPROCESSOR: PROCESSOR | {"size": 8}}, {}, f"{PREPROCESSOR} was left out"),
        ({PREPROCESSOR: PROCESSOR | {"size": {"height": 8, "width": 8}}}, {}, "makes 3 x 8 x 8"),
        ({PREPROCESSOR: {"size": {"height": 4, "width": 4}}}, {}, "KeyError('image_mean')"),
    ],
)
def test_what_lies_beside_an_image_model_is_read(
    files: dict[str, Any], expected: dict[str, Any], note: str, tmp_path: Path
) -> None:
    path = write_onnx(tmp_path / "m.onnx", shape=("N", 3, 4, 4))
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    inspect(str(path), write=True, as_json=False)
    saved = json.loads(path.with_suffix(".json").read_text())
    assert expected.items() <= saved.items()
    assert any(note in one for one in inspect_model(path).notes)
    backbone = load_backbone(f"onnx:{path}", device="cpu")
    assert list(backbone.labels) == (list("01234") if saved["labels"] == list("01234") else NAMES)


@pytest.mark.parametrize(
    ("config", "tokenizer", "pad", "length"),
    [
        ({"pad_token_id": 1, "max_position_embeddings": 514}, {"model_max_length": 512}, 1, 512),
        ({"pad_token_id": 1, "max_position_embeddings": 130}, {"model_max_length": 10**30}, 1, 130),
        ({"pad_token_id": None}, {"model_max_length": 64}, 0, 64),
        ({}, {}, 0, 512),
    ],
)
def test_what_lies_beside_a_text_model_is_read(
    config: dict[str, Any], tokenizer: dict[str, Any], pad: int, length: int, tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    of_text(path)
    path.with_suffix(".json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    declared = inspect_model(path).declaration
    assert (declared["pad"]["input_ids"], declared["max_length"]) == (pad, length)


def test_what_the_metadata_of_the_file_declare_stays(tmp_path: Path) -> None:
    half = {"resize": 5, "crop": 4, "mean": [0.5] * 3, "std": [0.5] * 3}
    metadata = {"labels": json.dumps(NAMES), "preprocessing": json.dumps(half)}
    path = write_onnx(tmp_path / "m.onnx", metadata=metadata)
    served = load_backbone(f"onnx:{path}", device="cpu")
    inspect(str(path), write=True, as_json=False)
    declared = json.loads(path.with_suffix(".json").read_text())
    assert (declared["labels"], declared["preprocessing"]) == (NAMES, half)
    path.with_suffix(".json").rename(tmp_path / "away.json")
    assert "`labels`, `preprocessing`: from the metadata of the file." in inspect_model(path).notes
    (tmp_path / "away.json").rename(path.with_suffix(".json"))
    again = load_backbone(f"onnx:{path}", device="cpu")
    assert (again.labels, again.fingerprint) == (served.labels, served.fingerprint)


def test_what_must_be_checked_is_said(tmp_path: Path) -> None:
    multi_label = inspect_model(linear(tmp_path / "m.onnx", "Sigmoid", 3))
    assert any("multi-label model is refused" in note for note in multi_label.notes)
    for operator in (
        "Identity",
        "Softmax",
    ):  # the first has scores outside of 0 to 1 only for other rows than zeros
        rows = inspect_model(linear(tmp_path / "rows.onnx", operator, 3))
        assert not any("multi-label" in note for note in rows.notes)
        assert rows.declaration["outputs"] == {"Identity": "logits", "Softmax": "probabilities"}[operator]
    for operator, held in (("Identity", "logits"), ("Sigmoid", "probabilities")):
        column = inspect_model(linear(tmp_path / "column.onnx", operator, 1)).declaration
        assert (column["activation"], column["outputs"]) == ("sigmoid", held)
    image = inspect_model(write_onnx(tmp_path / "image.onnx"))
    assert any("suggestion, that of ImageNet" in note for note in image.notes)
    assert image.outputs[0].found == (1, 5)
    nodes = [node("Cast", "x", "real", to=1), node("Flatten", "real", "flat"), node("MatMul", "flat w", "y")]
    inputs, outputs = [value("x", "N", 4, 4, 3, dtype=TensorProto.UINT8)], [value("y", "N", 5)]
    weights = np.full((48, 5), 0.002, np.float32)  # scores up to 24.5, and below 1 only of dark pixels
    found = inspect_model(save_graph(tmp_path / "bytes.onnx", nodes, inputs, outputs, w=weights))
    assert not any("multi-label" in note for note in found.notes)


def saved(path: Path, nodes: list[Any], name: str, shape: list[Any], *constants: Any) -> Path:
    """Save a graph from `rows` to an output of the same shape."""
    read, given = (helper.make_tensor_value_info(one, TensorProto.FLOAT, shape) for one in ("rows", name))
    graph = helper.make_graph(nodes, "g", [read], [given], list(constants))
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_an_unknown_kind_of_inputs_is_described(tmp_path: Path) -> None:
    node = helper.make_node("Identity", ["rows"], ["y"])
    found = inspect_model(saved(tmp_path / "m.onnx", [node], "y", ["N", 3, 4]))
    assert found.inputs[0].shape == ("N", 3, 4)
    assert "No trial run is known for these inputs: rows tensor(float)" in found.notes[0]


def test_the_command_prints_a_table(boxcal: Boxcal, tmp_path: Path) -> None:
    shown = boxcal("inspect", write_onnx(tmp_path / "m.onnx"))
    assert "tensor(float)" in shown.stdout
    assert '"outputs": "logits"' in shown.stdout


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("digits", {"inputs": "images", "input_shape": [1, 8, 8], "output_shape": [2, 10]}),
        ("timm:test_resnet", {"inputs": "images", "output_shape": [2, 1000], "has_features": True}),
        pytest.param(
            "torchvision:resnet18",
            {"members": ["image", "tensor"], "input_shape": [3, 224, 224]},
            marks=pytest.mark.long,
        ),
        ("logits:7", {"inputs": "none", "output_shape": [], "labels": list("0123456")}),
    ],
)
def test_a_model_by_name_is_described(
    model: str, expected: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    inspect(model, write=False, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert expected.items() <= shown.items()
    inspect(model, write=False, as_json=False)
    assert f"{len(shown['labels'])}: {shown['labels'][0]}, " in capsys.readouterr().out
    with pytest.raises(UsageError, match="needs no declaration"):
        inspect(model, write=True, as_json=False)


def test_a_folder_of_transformers_is_described(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, _ = text_of_transformers(tmp_path)
    inspect(spec, write=False, as_json=True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["inputs"], shown["members"]) == ("texts", ["text", "tokens"])
    assert (shown["labels"], shown["output_shape"]) == (["cat", "dog", "emu"], [2, 3])


def test_a_model_that_loops_for_ever_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body of the loop says itself that it goes on."""

    def scalar(name: str, kind: int) -> Any:
        return helper.make_tensor_value_info(name, kind, [])

    body = helper.make_graph(
        [helper.make_node("Identity", [name], [f"{name}2"]) for name in ("on", "x")],
        "body",
        [scalar("n", TensorProto.INT64), scalar("on", TensorProto.BOOL), scalar("x", TensorProto.FLOAT)],
        [scalar("on2", TensorProto.BOOL), scalar("x2", TensorProto.FLOAT)],
    )
    nodes = [
        helper.make_node("ReduceSum", ["rows"], ["sum"], keepdims=0),
        helper.make_node("Loop", ["", "true", "sum"], ["last"], body=body),
        helper.make_node("Add", ["rows", "last"], ["scores"]),
    ]
    true = helper.make_tensor("true", TensorProto.BOOL, [], [True])
    path = saved(tmp_path / "endless.onnx", nodes, "scores", ["N", 3], true)
    monkeypatch.setattr("boxcal.models.loading.inspection.TRIAL_SECONDS", 0.5)
    assert any("The trial run failed" in note for note in inspect_model(path).notes)


def test_what_a_terminal_would_obey_is_shown_and_not_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert escape("a\x1b[31mb\x9b2Jc [bold]\u202ed") == "a\\x1b[31mb\\x9b2Jc \\[bold]\\u202ed"
    write_json({"name": "a\x1b\x9bé"})
    shown = capsys.readouterr().out
    assert shown == '{"name": "a\\u001b\\u009bé"}\n'
    write_json({"name": "a flag \U0001f3f4\U000e0067"})
    assert capsys.readouterr().out == '{"name": "a flag \U0001f3f4\\udb40\\udc67"}\n'
    assert json.loads(shown) == {"name": "a\x1b\x9bé"}


def test_a_file_that_takes_over_its_process_reads_no_other_folder(tmp_path: Path) -> None:
    own, temporary = tmp_path / "own", tmp_path / "temporary"
    own.mkdir()
    temporary.mkdir()
    (own / "weights").write_bytes(b"weights")
    (tmp_path / "secret").write_bytes(b"secret")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 6 // 10
    arguments = [own / "m.onnx", temporary, tmp_path / "secret", memory]
    command = [sys.executable, "-c", HOSTILE, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    notes = json.loads(run.stdout)["notes"]
    if any("only a part of the sandbox" in note for note in notes):
        pytest.skip(notes[-1])
    forbidden = ("secret", "environment", "write", "socket", "fork")
    assert notes == [
        *("beside: done", "temporary: done", *(f"{name}: PermissionError" for name in forbidden)),
        *("memory: MemoryError", "long file: OSError"),
    ]


def test_what_stops_the_inspection_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no.onnx").write_bytes(b"no model")
    with pytest.raises(UsageError, match=r"no\.onnx is not a usable ONNX model"):
        inspect(str(tmp_path / "no.onnx"), write=False, as_json=False)
    monkeypatch.setattr("boxcal.app.cli.inspect.INSPECT_SECONDS", 0.01)
    with pytest.raises(UsageError, match=r"no\.onnx could not be inspected within 0.01 s"):
        inspect(str(tmp_path / "no.onnx"), write=False, as_json=False)


@pytest.mark.parametrize("location", ["../weights", "/etc/hostname", "a/../../weights"])
def test_weights_in_other_folders_are_refused(tmp_path: Path, location: str) -> None:
    path = write_onnx(tmp_path / "m.onnx")
    model = load(path)
    weight = model.graph.initializer[0]
    weight.data_location = TensorProto.EXTERNAL
    weight.ClearField("raw_data")
    weight.external_data.add(key="location", value=location)
    save(model, path)
    with pytest.raises(BackboneError, match=f"stores weights in '{location}', which is not beside it"):
        inspect_model(path)


def test_a_saved_calibrator_is_shown(boxcal: Boxcal, tmp_path: Path) -> None:
    bounds = ConstantBounds(3, {"lower": 0.125, "upper": 0.75})
    saved = ArrayCalibrator("pb", IdentityMap(3), bounds, 3, classes=["ape", "bee", "cat"])
    (tmp_path / "fitted.calibrator").write_bytes(saved.to_bytes())
    assert boxcal("inspect", tmp_path / "fitted.calibrator", "--json").json == {
        "method": "pb",
        "num_classes": 3,
        "reads": "logits",
        "parameters": {"lower": 0.125, "upper": 0.75},
        "classes": ["ape", "bee", "cat"],
    }
    shown = " ".join(boxcal("inspect", tmp_path / "fitted.calibrator").stdout.split())
    assert "classes 3: ape, bee, cat" in shown
    assert "upper 0.75" in shown


@pytest.mark.parametrize(
    ("name", "message"),
    [("m.txt", "m.txt is not read as a model"), ("m.pt2", "Did you mean 'pt2:")],
)
def test_a_file_that_is_no_model_is_not_called_a_calibrator(
    name: str, message: str, boxcal: Boxcal, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(b"PK")
    boxcal("inspect", tmp_path / name).refuses(message)
