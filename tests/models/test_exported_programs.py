"""Exported programs (`.pt2`): answers, declarations, and archives that are refused unread."""

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from boxcal.models import BackboneError
from tests.models.files import CLASSES, COLOUR_SPEC, WEIGHT, declare, load, samples


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
    for name, shapes in (("free", ({0: several},)), ("fixed", None)):
        program = torch.export.export(Linear(), (torch.zeros(4, 3, 4, 4),), dynamic_shapes=shapes)
        torch.export.save(program, folder / f"{name}.pt2")
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


class Layered(Linear):
    """The layer in bfloat16, and what `then` makes of its output."""

    def __init__(self, then: torch.nn.Module) -> None:
        super().__init__()
        self.layer.to(torch.bfloat16)
        self.then = then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.then(self.layer(x.bfloat16().flatten(1)).float())
        return made


@pytest.mark.parametrize(
    ("then", "declared", "message"),
    [
        (
            torch.nn.Softmax(1),
            {},
            r"between 0 and 1 for random inputs of any size\. Export the network before",
        ),
        (torch.nn.Sigmoid(), {}, "between 0 and 1 for random inputs of any size"),
        (torch.nn.Linear(CLASSES, 1), {}, r"one output \(N, K\), K at least 2, found .*\(4, 1\)"),
        (torch.nn.Identity(), {"activation": "sigmoid"}, "neither `activation` nor `output`"),
        (torch.nn.Identity(), {"output": "logits"}, "neither `activation` nor `output`"),
        (torch.nn.Identity(), {"outputs": "probabilities"}, "`outputs` are logits"),
        (torch.nn.Identity(), {}, None),
    ],
)
def test_programs_that_return_no_logits_are_refused(
    then: torch.nn.Module, declared: dict[str, str], message: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "m.pt2"
    torch.export.save(torch.export.export(Layered(then), (torch.zeros(4, 3, 4, 4),)), path)
    declare(path, **declared)
    if message:
        with pytest.raises(BackboneError, match=message):
            load(path)
    else:
        expected = samples(4).flatten(1) @ torch.from_numpy(WEIGHT)
        torch.testing.assert_close(load(path)(samples(4)), expected, atol=0.1, rtol=0.02)


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
        with pytest.raises(BackboneError, match=str(path)):
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
    with pytest.raises(BackboneError, match="has 2 entries named"):
        load(path)
    assert not witness.exists()


def test_damaged_exported_programs_are_refused(programs: Path, tmp_path: Path) -> None:
    whole = (programs / "free.pt2").read_bytes()
    for name, content in (("text", b"no zip"), ("cut", whole[: len(whole) // 2]), ("empty", b"")):
        path = tmp_path / f"{name}.pt2"
        path.write_bytes(content)
        with pytest.raises(BackboneError, match=rf"{name}\.pt2 is not a readable \.pt2 archive"):
            load(path)
    with pytest.raises(BackboneError, match=r"absent\.pt2 does not exist"):
        load(tmp_path / "absent.pt2")
    broken = altered(programs / "free.pt2", tmp_path / "broken.pt2", {"models/model.json": b"{}"})
    with pytest.raises(BackboneError, match=r"broken\.pt2 is not a program of this torch"):
        load(broken)
