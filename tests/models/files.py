"""Model files for the tests: small ONNX graphs, their declarations, and a tokenizer of words."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers

from boxcal.models.loading.specifications import load_backbone

CLASSES = 5
WEIGHT = np.random.default_rng(0).normal(size=(3 * 4 * 4, CLASSES)).astype(np.float32)
GREY_SPEC = {"resize": 4, "crop": 4, "mean": [0.5], "std": [0.5]}
COLOUR_SPEC = {"resize": 4, "crop": 4, "mean": [0.5, 0.4, 0.3], "std": [0.1, 0.2, 0.3]}


def node(operator: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(operator, inputs.split(), [output], **attributes)


def value(name: str, *shape: int | str, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def save_graph(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    metadata: dict[str, str] | None = None,
    **weights: Any,
) -> Path:
    constants = [numpy_helper.from_array(np.array(array), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", inputs, outputs, constants)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    helper.set_model_props(model, metadata or {})
    onnx.save(model, path)
    return path


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
    weight = WEIGHT[:features].astype(helper.tensor_dtype_to_np_dtype(dtype))
    nodes = [node("Flatten", "x", "flat"), node("MatMul", "flat w", "raw" if softmax else outputs[0])]
    if softmax:
        nodes.append(node("Softmax", "raw", outputs[0]))
    nodes += [node("Identity", outputs[0], name) for name in outputs[1:]]
    found = [value(name, shape[0], CLASSES, dtype=dtype) for name in outputs]
    return save_graph(path, nodes, [value("x", *shape, dtype=dtype)], found, metadata, w=weight)


def linear(path: Path, last: str, classes: int) -> Path:
    """A linear network of 4 features, whose outputs are the `raw_logits`, and `scores` by this operator."""
    nodes = [node("MatMul", "x w", "raw"), node(last, "raw", "scores"), node("Identity", "raw", "raw_logits")]
    outputs = [value(name, "N", classes) for name in ("scores", "raw_logits")]
    weight = np.random.default_rng(1).normal(size=(4, classes)).astype(np.float32)
    return save_graph(path, nodes, [value("x", "N", 4)], outputs, w=weight)


def declare(path: Path, **members: Any) -> str:
    path.with_suffix(".json").write_text(json.dumps(members))
    return spec_of(path)


def spec_of(path: Path) -> str:
    return f"{path.suffix[1:]}:{path}"


def load(path: Path, **options: Any) -> Any:
    return load_backbone(spec_of(path), **({"device": "cpu"} | options))


def logits_of(backbone: Any, rows: Any) -> torch.Tensor:
    return torch.as_tensor(backbone(backbone.inputs.batch(backbone.inputs.check(rows))))


def samples(count: int, shape: tuple[int, ...] = (3, 4, 4)) -> torch.Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))


CLASS_NAMES = ("cat", "dog", "emu")
WORDS = ("[PAD]", "[UNK]", "good", "bad", "film", "a", "very", "long", "story")
TEXTS = ("good film", "a very very long bad story", "film", "a good story", "unknown words only here")


def word_tokenizer(words: Sequence[str] = WORDS, unknown: str = "[UNK]") -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer
