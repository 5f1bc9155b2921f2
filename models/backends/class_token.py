"""Compute the last block of an exported vision transformer for the class token only.

The head reads the class token, the first of some hundred, but an exported graph computes all of them. After
the last attention, each token is computed independently. The graph is read backwards from the operator that
takes the first token, through operators that treat tokens independently, and the token is taken before those
instead. The logits change only by the rounding of smaller matrix products; `OnnxBackbone` compares them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

ELEMENTWISE = frozenset(
    {"Add", "Cast", "Div", "Erf", "Gelu", "Identity", "Mul", "Pow", "Relu", "Sigmoid", "Sqrt", "Sub", "Tanh"}
)
MIXING_AXES = frozenset({"LayerNormalization", "LogSoftmax", "ReduceMean", "Softmax"})
STANDARD = frozenset({"", "ai.onnx"})  # the domain of the operators above
FIRST_OPSET = 13  # since then Softmax works along one axis
SMALL = 64  # elements of a constant that may describe a shape; weights are larger

# The axis of which only the first entry is read, counted from the last (-1); None where all are read.
Axis = int | None
Plan = dict[int, list[Axis]]  # for each node that computes the first entry only: how it reads its inputs


def take_class_token_early(model: onnx.ModelProto) -> bool:
    """Rewrite a graph in place so that only the first token is computed where only the first is read.

    Returns whether the graph was rewritten: it saves a matrix product, and the graph has no branches or
    loops.
    """
    graph = model.graph
    opset = next((entry.version for entry in model.opset_import if entry.domain in STANDARD), 0)
    branches = any(attribute.HasField("g") for node in graph.node for attribute in node.attribute)
    if opset < FIRST_OPSET or branches:
        return False
    plan = _plan(graph, _Tensors(model))
    if not any(graph.node[index].op_type == "MatMul" for index in plan):
        return False
    _rewrite(graph, plan)
    return True


def _plan(graph: onnx.GraphProto, tensors: _Tensors) -> Plan:
    """Find, from the outputs backwards, the nodes of whose output only the first entry of an axis is read."""
    plan: Plan = {}
    readings: defaultdict[str, set[Axis]] = defaultdict(set, {entry.name: {None} for entry in graph.output})
    for index, node in reversed(list(enumerate(graph.node))):
        inputs: list[Axis] = [None] * len(node.input)
        if (axis := tensors.axis_taken(node)) is not None:
            inputs[0] = axis
        elif len(node.output) == 1 and len(found := readings[node.output[0]]) == 1:
            [axis] = found
            if axis is not None and (narrow := tensors.inputs_read(node, axis)) is not None:
                plan[index] = inputs = narrow
        for name, axis in zip(node.input, inputs, strict=True):
            readings[name].add(axis)
    return plan


def _rewrite(graph: onnx.GraphProto, plan: Plan) -> None:
    """Insert a Slice wherever a planned node reads a tensor that is computed in full."""
    nodes: list[onnx.NodeProto] = []
    narrow: set[str] = set()
    for index, node in enumerate(graph.node):
        for place, axis in enumerate(plan.get(index, ())):
            whole = node.input[place]
            if axis is None or whole in narrow:
                continue
            first = f"{whole}/first{axis}"
            if first not in narrow:
                bounds = [f"{first}/{name}" for name in ("start", "end", "axis")]
                for name, value in zip(bounds, (0, 1, axis), strict=True):
                    graph.initializer.append(numpy_helper.from_array(np.array([value]), name))
                nodes.append(helper.make_node("Slice", [whole, *bounds], [first], name=first))
                narrow.add(first)
            node.input[place] = first
        nodes.append(node)
        if index in plan:
            narrow.update(node.output)
    unchanged = [entry for entry in graph.value_info if entry.name not in narrow]
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.value_info.extend(unchanged)


class _Tensors:
    """The ranks of a graph's tensors, and its small constants."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._constants = {entry.name: entry for entry in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "Constant" and (value := _attribute(node, "value", None)) is not None:
                self._constants[node.output[0]] = value
        self._ranks = {name: len(tensor.dims) for name, tensor in self._constants.items()}
        graph = onnx.shape_inference.infer_shapes(_without_weights(model)).graph
        for entry in chain(graph.input, graph.value_info, graph.output):
            if entry.type.tensor_type.HasField("shape"):
                self._ranks[entry.name] = len(entry.type.tensor_type.shape.dim)

    def axis_taken(self, node: onnx.NodeProto) -> Axis:
        """Give the axis of which a node reads only the first entry of its first input."""
        if _operator(node) != "Gather" or self._integers(node.input[1]) != [0]:
            return None
        rank = self._ranks.get(node.input[0])
        return None if rank is None else _from_last(_attribute(node, "axis", 0), rank)

    def inputs_read(self, node: onnx.NodeProto, axis: int) -> list[Axis] | None:
        """Give how a node reads its inputs to compute the first entry of an axis; None if it needs others."""
        ranks = [rank for name in node.input if (rank := self._ranks.get(name)) is not None]
        if len(ranks) < len(node.input):
            return None
        along = [axis if rank >= -axis else None for rank in ranks]
        match _operator(node):
            case operator if operator in ELEMENTWISE:
                return along
            case operator if operator in MIXING_AXES and axis not in self._mixed(node, ranks[0]):
                return [axis] + [None] * (len(ranks) - 1)
            case "MatMul" if axis < -1 and min(ranks) >= 2:
                return along if axis < -2 else [axis, None]
            case "Transpose":
                order = _attribute(node, "perm", range(ranks[0])[::-1])
                return [order[axis] - ranks[0]]
        return None

    def _mixed(self, node: onnx.NodeProto, rank: int) -> Sequence[int]:
        """Give the axes along which a node combines entries."""
        if node.op_type == "ReduceMean":
            axes = _attribute(node, "axes", None)  # an input since opset 18
            if axes is None and len(node.input) > 1:
                axes = self._integers(node.input[1])
            keeps = axes and _attribute(node, "keepdims", 1)
            return [_from_last(axis, rank) for axis in axes] if keeps else range(-rank, 0)
        first = _from_last(_attribute(node, "axis", -1), rank)
        return range(first, 0) if node.op_type == "LayerNormalization" else [first]

    def _integers(self, name: str) -> list[int] | None:
        tensor = self._constants.get(name)
        if tensor is None or tensor.data_type != onnx.TensorProto.INT64 or not _is_small(tensor):
            return None
        return [int(value) for value in numpy_helper.to_array(tensor).flat]


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Copy a model without the values of its weights: shapes do not depend on them."""
    copy = onnx.ModelProto(
        ir_version=model.ir_version, opset_import=model.opset_import, functions=model.functions
    )
    for field in ("node", "input", "output", "value_info"):
        getattr(copy.graph, field).extend(getattr(model.graph, field))
    for tensor in model.graph.initializer:
        if not _is_small(tensor):
            tensor = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)  # noqa: PLW2901
        copy.graph.initializer.append(tensor)
    return copy


def _is_small(tensor: onnx.TensorProto) -> bool:
    """Whether a constant may describe a shape, and is stored in the file itself."""
    return bool(np.prod(tensor.dims) <= SMALL and tensor.data_location != onnx.TensorProto.EXTERNAL)


def _operator(node: onnx.NodeProto) -> str:
    """Name a standard operator; "" for one of another domain."""
    return str(node.op_type) if node.domain in STANDARD else ""


def _from_last(axis: int, rank: int) -> int:
    return axis - rank if axis >= 0 else axis


def _attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    found = (helper.get_attribute_value(entry) for entry in node.attribute if entry.name == name)
    return next(found, default)
