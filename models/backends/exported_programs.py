"""`pt2:PATH`: a program written by `torch.export.save`, checked for pickles before torch reads it.

Such a file is a program: it can use any operator of torch, so serve only files that you would also run.
torch's reader may unpickle arbitrary objects; every archive with pickled objects is refused.
"""

from __future__ import annotations

import io
import json
import logging
import re
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from boxcal.models import BackboneError
from boxcal.models.backends.checks import file_fingerprint, fingerprint_with, probes
from boxcal.models.backends.spec import read_spec
from boxcal.models.backends.torch_backbone import TorchBackbone, resolve_device

# The entries of an archive without pickles, below its root folder.
RAW = re.compile(
    r"(archive_format|archive_version|byteorder|version|\.data/\w+|models/model\.json"
    r"|data/weights/weight_\d+|data/constants/tensor_\d+)"
)
CONFIG = re.compile(r"data/(weights|constants)/model_\w+_config\.json")
OUTPUT_OBJECT = re.compile(rb"transformers\.modeling_outputs\.\w+")
ANY_SIZE = 2**40
SAMPLE_INPUTS = "data/sample_inputs/model.pt"


def load_exported_program(path: Path, *, labels: Path | None, device: str) -> TorchBackbone:
    """Read a program with one input and one output of logits, and move it to the device."""
    if not path.is_file():
        raise BackboneError(f"The model file {path} does not exist.")
    archive = path.read_bytes()
    refuse_pickles(archive, path)
    program = _read(archive, path)
    shape, classes = _signature(program, path)
    spec = read_spec(path)
    if spec.outputs != "logits" or spec.activation or spec.output:
        raise BackboneError(
            f"{path}: a program returns logits (N, K) alone; its declaration has neither `activation` nor "
            "`output`, and `outputs` are logits."
        )
    preprocessing = spec.preprocessing_for(shape[1:], path)
    input_shape = preprocessing.input_shape if preprocessing else tuple(size or 0 for size in shape[1:])
    if 0 in input_shape:
        raise BackboneError(
            f"{path} reads inputs of free sizes {shape[1:]}; declare a preprocessing in "
            f"{path.with_suffix('.json').name}, or export it with fixed ones."
        )
    if resolve_device(device).type != "cpu":
        from torch.export.passes import move_to_device_pass  # noqa: PLC0415

        program = move_to_device_pass(program, str(resolve_device(device)))
    backbone = TorchBackbone(
        f"pt2:{path.name}",
        OneOutput(program.module()),
        labels=spec.labels_for(classes, path, labels),
        input_shape=input_shape,
        preprocessing=preprocessing,
        device=device,
        precision="float32",
        fingerprint=fingerprint_with(file_fingerprint(path), preprocessing=preprocessing),
        batch_sizes=_batch_sizes(program),
        is_program=True,
    )
    _check_logits(backbone, path)
    return backbone


def _check_logits(backbone: TorchBackbone, path: Path) -> None:
    """Refuse a program whose output is what softmax or sigmoids make of logits."""
    try:
        made = torch.cat([backbone(batch) for batch in probes(backbone.input_shape)])
    except Exception as error:  # a program may raise any
        raise BackboneError(f"{path}: the trial run failed: {error}"[:1000]) from error
    if bool(((made >= 0) & (made <= 1)).all()):
        raise BackboneError(
            f"{path}: the output lies between 0 and 1 for random inputs of any size. Export the network "
            "before its softmax or sigmoid: a program returns logits."
        )


class OneOutput(torch.nn.Module):
    """A program whose only output may be a member of an object, such as those of transformers."""

    def __init__(self, program: torch.nn.Module) -> None:
        super().__init__()
        self.program = program

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        (logits,) = pytree.tree_leaves(self.program(inputs))
        return logits  # type: ignore[no-any-return] # a leaf has any type


class Members(dict[str, Any]):
    """What stands for an output object of transformers, which need not be installed."""


def _read(archive: bytes, path: Path) -> ExportedProgram:
    """Read a program; output objects of transformers are made known to torch."""
    with zipfile.ZipFile(io.BytesIO(archive)) as files:
        text = b"".join(files.read(name) for name in files.namelist() if name.endswith("models/model.json"))
    for name in sorted({found.decode() for found in OUTPUT_OBJECT.findall(text)}):
        if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
            pytree.register_pytree_node(
                type(name, (Members,), {}),
                lambda members: (list(members.values()), list(members)),
                lambda values, names: Members(zip(names, values, strict=True)),
                serialized_type_name=name,
            )
    reasons: list[str] = []
    logger, heard = logging.getLogger("torch.export"), _Heard(reasons)
    logger.addHandler(heard)
    try:
        return torch.export.load(io.BytesIO(archive))
    except Exception as error:  # the reader raises errors of many kinds
        reason = reasons[0] if reasons else str(error)
        raise BackboneError(f"{path} is not a program of this torch: {reason}"[:1000]) from error
    finally:
        logger.removeHandler(heard)


class _Heard(logging.Handler):
    """Keeps the exceptions that are logged: torch's reader raises another one without the reason."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__()
        self._reasons = reasons

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[1] is not None:
            self._reasons.append(str(record.exc_info[1]))


def refuse_pickles(archive: bytes, path: Path) -> None:
    """Check that an archive has only raw tensors, JSON, and sample inputs that are tensors."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            names = files.namelist()
            # Of entries with one name, torch may read another one than the one that is checked here.
            for entry, times in Counter(map(str.lower, names)).items():
                if times > 1:
                    raise BackboneError(f"{path} has {times} entries named {entry}; it was not loaded.")
            for entry in names:
                name = entry.partition("/")[2]
                if CONFIG.fullmatch(name):
                    for key, payload in json.loads(files.read(entry))["config"].items():
                        if payload["use_pickle"]:
                            raise BackboneError(f"{path}: {key} is pickled; it was not loaded.")
                elif name == SAMPLE_INPUTS:
                    torch.load(io.BytesIO(files.read(entry)), weights_only=True)
                elif not RAW.fullmatch(name):
                    raise BackboneError(
                        f"{path}: {entry} is more than tensors; it was not loaded. Programs are read as "
                        "torch.export.save writes them."
                    )
    except BackboneError:
        raise
    except Exception as error:  # a damaged zip file, JSON document or pickle
        raise BackboneError(f"{path} is not a readable .pt2 archive: {error}") from error


def _batch_sizes(program: ExportedProgram) -> tuple[int, int | None]:
    """Smallest and largest batch of the program."""
    (name,) = program.graph_signature.user_inputs
    size = next(node.meta["val"].shape[0] for node in program.graph.nodes if node.name == name)
    if isinstance(size, int):
        return size, size
    allowed = program.range_constraints.get(size.node.expr)
    if allowed is None:
        return 1, None
    lower, upper = allowed.lower, allowed.upper
    return int(lower) if lower > 1 else 1, int(upper) if upper < ANY_SIZE else None


def _signature(program: ExportedProgram, path: Path) -> tuple[tuple[int | None, ...], int]:
    """Shape of the input, with None where a size is free, and K."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signature = program.graph_signature
    inputs = [values.get(name) for name in signature.user_inputs if isinstance(name, str)]
    outputs = [values.get(name) for name in signature.user_outputs if isinstance(name, str)]
    one_each = len(inputs) == len(outputs) == 1 == len(signature.user_inputs) == len(signature.user_outputs)
    (given, *_), (made, *_) = inputs or [None], outputs or [None]
    if (
        not one_each
        or not isinstance(given, torch.Tensor)
        or not isinstance(made, torch.Tensor)
        or given.dtype != torch.float32
        or given.ndim < 2
        or made.ndim != 2
        or not isinstance(made.shape[1], int)
        or made.shape[1] < 2
    ):
        raise BackboneError(
            f"{path}: expected one float32 input (N, ...) and one output (N, K), K at least 2, found "
            f"{[tuple(v.shape) for v in inputs if isinstance(v, torch.Tensor)]} and "
            f"{[tuple(v.shape) for v in outputs if isinstance(v, torch.Tensor)]}."
        )
    return tuple(size if isinstance(size, int) else None for size in given.shape), made.shape[1]
