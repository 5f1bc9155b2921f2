"""Graphs whose head reads the first token: the same answers, and the others no longer computed."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.random import Generator, default_rng
from onnx import TensorProto, helper, numpy_helper
from torchvision.models import VisionTransformer

from boxcal.models.backends.class_token import take_class_token_early
from boxcal.models.loading.specifications import load_backbone

TOKENS, WIDTH = 5, 4


class Graph:
    """A graph being built of (N, TOKENS, WIDTH) inputs; each step reads what the last one made."""

    def __init__(self, generator: Generator | None = None) -> None:
        self.generator = generator or default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.last = "x"

    def weight(self, *shape: int) -> str:
        return self.constant(self.generator.normal(size=shape).astype(np.float32) / 2)

    def constant(self, value: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def step(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Append a node; without inputs it reads the last one's output."""
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs or [self.last], [output], **attributes))
        self.last = output
        return output

    def linear(self) -> str:
        return self.step("MatMul", self.last, self.weight(WIDTH, WIDTH))

    def model(
        self, *outputs: str, opset: int = 17, functions: Sequence[onnx.FunctionProto] = ()
    ) -> onnx.ModelProto:
        """Finish the graph; without names its output is the last one."""
        tokens = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", TOKENS, WIDTH])
        found = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs or (self.last,)
        ]
        graph = helper.make_graph(self.nodes, "tokens", [tokens], found, self.weights)
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("own", 1)]
        model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
        inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True).graph.output
        model.graph.ClearField("output")
        model.graph.output.extend(inferred)
        onnx.checker.check_model(model, full_check=True)
        return model


def tokens(count: int = 3) -> np.ndarray[Any, Any]:
    return default_rng(count).normal(size=(count, TOKENS, WIDTH)).astype(np.float32)


def run(model: onnx.ModelProto, inputs: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The outputs as the graph says, without onnxruntime's own rewriting."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return list(session.run(None, {session.get_inputs()[0].name: inputs}))


def rewritten(model: onnx.ModelProto) -> onnx.ModelProto | None:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    changed = take_class_token_early(copy)
    assert changed or copy == model
    return copy if changed else None


def narrowed(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph that computes the first alone; it must be another one and answer as the given."""
    narrow = rewritten(model)
    assert narrow is not None
    for count in (1, 3):
        np.testing.assert_allclose(run(narrow, tokens(count)), run(model, tokens(count)), atol=1e-5)
    return narrow


def width_of_products(model: onnx.ModelProto) -> list[int]:
    """How many tokens each matrix product computes."""
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    shapes = {entry.name: entry.type.tensor_type.shape.dim for entry in inferred.graph.value_info}
    return [shapes[node.output[0]][1].dim_value for node in model.graph.node if node.op_type == "MatMul"]


def block(graph: Graph, *, mix: bool = True) -> None:
    """A mixer in place of attention, and a network for each token behind it, each with its residual."""
    before = graph.last
    if mix:
        mixed = graph.step("MatMul", graph.weight(TOKENS, TOKENS), graph.last)
        before = graph.step("Add", mixed, before)
    normalise(graph, WIDTH)
    graph.linear()
    add(graph, WIDTH)
    inner = graph.last
    graph.step("Erf")
    graph.step("Mul", graph.last, inner)
    graph.linear()
    graph.step("Add", before, graph.last)


def take(graph: Graph, index: int = 0, axis: int = 1) -> str:
    return graph.step("Gather", graph.last, graph.constant(np.array(index)), axis=axis)


def test_from_the_last_mixing_on_only_the_first_token_is_computed() -> None:
    graph = Graph()
    block(graph)
    block(graph)
    take(graph)
    narrow = narrowed(model := graph.model())
    assert width_of_products(model) == [TOKENS] * 6
    assert width_of_products(narrow) == [TOKENS] * 3 + [1] * 3
    graph = Graph()
    graph.linear()
    graph.step("MatMul", graph.weight(TOKENS, TOKENS), graph.last)
    take(graph)
    narrow = narrowed(graph.model())
    assert width_of_products(narrow) == [TOKENS, 1]


def mean_free(graph: Graph, axis: int, *, given: bool = False) -> str:
    """Subtract a mean, as a layer normalisation does in files before opset 17."""
    before = graph.last
    if given:
        graph.step("ReduceMean", before, graph.constant(np.array([axis])))
    else:
        graph.step("ReduceMean", axes=[axis])
    return graph.step("Sub", before, graph.last)


def normalise(graph: Graph, *shape: int) -> str:
    return graph.step(
        "LayerNormalization", graph.last, graph.weight(*shape), graph.weight(*shape), axis=-len(shape)
    )


def add(graph: Graph, *shape: int) -> str:
    return graph.step("Add", graph.weight(*shape), graph.last)


@pytest.mark.parametrize(
    ("steps", "opset"),
    [
        pytest.param(take, 17, id="at once"),
        pytest.param(lambda g: take(g, axis=-2), 17, id="axis from the end"),
        pytest.param(lambda g: take(g, axis=0), 17, id="the first sample"),
        pytest.param(lambda g: (g.step("Transpose", perm=[1, 0, 2]), take(g, axis=0)), 17, id="transposed"),
        pytest.param(lambda g: (g.step("Transpose"), take(g)), 17, id="reversed"),
        pytest.param(lambda g: (g.step("Softmax"), take(g)), 13, id="softmax of features"),
        pytest.param(lambda g: (mean_free(g, -1), take(g)), 17, id="mean of features"),
        pytest.param(lambda g: (mean_free(g, 2, given=True), take(g)), 18, id="axes as an input"),
        pytest.param(lambda g: (normalise(g, WIDTH), take(g)), 17, id="normalised features"),
        pytest.param(lambda g: (add(g, WIDTH), take(g)), 17, id="a bias of features"),
        pytest.param(lambda g: (add(g, 1, TOKENS, WIDTH), take(g)), 17, id="a bias for each token"),
        pytest.param(lambda g: (add(g, TOKENS, 1), take(g)), 17, id="a number for each token"),
        pytest.param(lambda g: (add(g, 1, 1, 1), take(g)), 17, id="one number for all"),
    ],
)
def test_operators_that_treat_tokens_one_by_one(steps: Callable[[Graph], object], opset: int) -> None:
    graph = Graph()
    graph.linear()
    steps(graph)
    narrowed(graph.model(opset=opset))


@pytest.mark.parametrize(
    ("steps", "opset"),
    [
        pytest.param(lambda g: (g.linear(), take(g, 1)), 17, id="the second token"),
        pytest.param(lambda g: (g.linear(), take(g, axis=2)), 17, id="a feature"),
        pytest.param(lambda g: (g.linear(), g.step("ReduceMean", axes=[1])), 17, id="the mean of tokens"),
        pytest.param(lambda g: (g.linear(), g.step("Softmax", axis=1), take(g)), 17, id="softmax of tokens"),
        pytest.param(lambda g: (g.linear(), mean_free(g, 1), take(g)), 17, id="a mean of tokens"),
        pytest.param(
            lambda g: (g.linear(), normalise(g, TOKENS, WIDTH), take(g)), 17, id="normalised tokens"
        ),
        pytest.param(
            lambda g: (g.linear(), normalise(g, 1, TOKENS, WIDTH), take(g)), 17, id="normalised samples"
        ),
        pytest.param(lambda g: (g.linear(), g.step("Flatten"), take(g)), 17, id="an operator with no rule"),
        pytest.param(lambda g: (g.step("Erf"), take(g)), 17, id="no product"),
        pytest.param(lambda g: (g.linear(), take(g)), 12, id="an opset with another softmax"),
    ],
)
def test_what_reads_other_tokens_is_left_alone(steps: Callable[[Graph], object], opset: int) -> None:
    graph = Graph()
    steps(graph)
    assert rewritten(graph.model(opset=opset)) is None


@pytest.mark.parametrize("reader", ["output", "node", "branch"])
def test_a_tensor_that_someone_reads_whole_is_computed_whole(reader: str) -> None:
    graph = Graph()
    whole = graph.linear()
    outputs = [take(graph)]
    if reader == "output":
        outputs.append(whole)
    elif reader == "node":
        outputs.append(graph.step("ReduceMean", whole, axes=[1]))
    else:
        result = helper.make_tensor_value_info("result", TensorProto.FLOAT, ["n", TOKENS, WIDTH])
        branch = helper.make_graph([helper.make_node("Tanh", [whole], ["result"])], "branch", [], [result])
        condition = graph.constant(np.array(True))
        outputs.append(graph.step("If", condition, then_branch=branch, else_branch=branch))
    assert rewritten(graph.model(*outputs)) is None


def test_a_function_of_the_file_is_not_the_operator_of_its_name() -> None:
    standard = helper.make_opsetid("", 17)
    steps = [
        helper.make_node("ReduceMean", ["a"], ["mean"], axes=[1]),
        helper.make_node("Sub", ["a", "mean"], ["b"]),
    ]
    mixing = helper.make_function("own", "Tanh", ["a"], ["b"], steps, [standard])
    graph = Graph()
    graph.linear()
    graph.step("Tanh", domain="own")
    take(graph)
    assert rewritten(graph.model(functions=[mixing])) is None


def test_two_readers_of_the_first_token_share_it() -> None:
    graph = Graph()
    whole = graph.linear()
    first = take(graph)
    graph.last = whole
    graph.step("Erf")
    graph.step("Mul", graph.last, whole)
    graph.step("Add", take(graph), first)
    narrow = narrowed(graph.model())
    assert [node.op_type for node in narrow.graph.node].count("Slice") == 1


@pytest.mark.parametrize("seed", range(40))
def test_graphs_at_random_answer_as_before(seed: int) -> None:
    generator = default_rng(seed)
    graph = Graph(generator)
    made = ["x"]

    def residual() -> None:
        graph.step("Add", graph.last, str(generator.choice(made)))

    steps: list[Callable[[], object]] = [
        graph.linear,
        residual,
        partial(block, graph),
        partial(block, graph, mix=False),
        partial(graph.step, "Tanh"),
        partial(graph.step, "Softmax"),
        partial(graph.step, "Softmax", axis=1),
        partial(normalise, graph, WIDTH),
        partial(mean_free, graph, 2),
        partial(mean_free, graph, 1),
        partial(add, graph, TOKENS, 1),
    ]
    for _ in range(12):
        steps[generator.integers(len(steps))]()
        made.append(graph.last)
        if generator.random() < 0.2:
            graph.last = str(generator.choice(made))
    outputs = [take(graph)]
    if generator.random() < 0.5:
        graph.last = str(generator.choice(made))
        outputs.append(take(graph, int(generator.integers(2))))
    model = graph.model(*dict.fromkeys(outputs))
    narrow = rewritten(model)
    if narrow is not None:
        for one, other in zip(run(narrow, tokens()), run(model, tokens()), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-4)


def small_transformer() -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = VisionTransformer(
            image_size=32, patch_size=16, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=7
        )
        torch.nn.init.normal_(network.heads.head.weight)  # zeros as it comes
    return network.eval()


@pytest.mark.filterwarnings("ignore")  # the exporter that needs no further package is the old one
@pytest.mark.parametrize("beside", [False, True])
def test_a_vision_transformer_answers_as_torch_does(beside: bool, tmp_path: Path) -> None:
    network = small_transformer()
    exported = tmp_path / "exported.onnx"
    torch.onnx.export(
        network,
        (torch.zeros(2, 3, 32, 32),),
        exported,
        dynamo=False,
        opset_version=17,
        input_names=["x"],
        output_names=["logits"],
        dynamic_axes={"x": {0: "n"}},
    )
    model = onnx.load(exported)
    path = tmp_path / "vit.onnx"
    onnx.save(model, path, save_as_external_data=beside, location="vit.onnx.data", size_threshold=0)
    assert (tmp_path / "vit.onnx.data").exists() is beside
    narrow = rewritten(onnx.load(path))
    assert narrow is not None
    images = torch.randn(3, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(
            torch.as_tensor(load_backbone(f"onnx:{path}", device="cpu")(images)),
            network(images),
            atol=5e-5,  # twelve networks drawn at random differ by 8e-6 at most, another one by 1.8e-5
            rtol=0.0,
        )
