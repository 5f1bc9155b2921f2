"""Model files for the tests: a linear classifier as ONNX, and its declaration."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from boxcal.models.loading.specifications import load_backbone

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
