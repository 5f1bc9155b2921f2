"""The networks of `benchmarks.real_networks` give features that belong to their logits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper, numpy_helper

from benchmarks.real_networks import __main__ as command
from benchmarks.real_networks.networks import OnnxNetwork, digits
from boxcal.calibrators.threads import one_library_thread


def saved(path: Path) -> Path:
    """Write a residual block with a shortcut that halves the image and adds channels."""
    rng = np.random.default_rng(0)
    arrays = {
        "w": rng.normal(size=(4, 3, 3, 3)).astype(np.float32),
        "b": rng.normal(size=4).astype(np.float32),
        "starts": np.array([0, 0]),
        "ends": np.array([8, 8]),
        "axes": np.array([2, 3]),
        "steps": np.array([2, 2]),
        "pads": np.array([0, 0, 0, 0, 0, 1, 0, 0]),
        "v": rng.normal(size=(5, 4)).astype(np.float32),
        "c": rng.normal(size=5).astype(np.float32),
    }
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["y"], strides=[2, 2], pads=[1, 1, 1, 1]),
        helper.make_node("Slice", ["x", "starts", "ends", "axes", "steps"], ["s"]),
        helper.make_node("Pad", ["s", "pads"], ["p"]),
        helper.make_node("Add", ["y", "p"], ["sum"]),
        helper.make_node("Relu", ["sum"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "v", "c"], ["logits"], transB=1),
    ]
    ends = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", "logits")]
    given = [numpy_helper.from_array(array, name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "block", ends[:1], ends[1:], given)
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def test_an_onnx_file_becomes_a_network_with_features(tmp_path: Path) -> None:
    network = OnnxNetwork(saved(tmp_path / "block.onnx"))
    inputs = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weight, bias = network.head
    logits = network(inputs) @ weight.T + bias
    session = onnxruntime.InferenceSession(tmp_path / "block.onnx")
    (expected,) = session.run(None, {"x": inputs.detach().numpy()})
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    assert torch.autograd.grad(logits.sum(), inputs)[0].abs().max() > 0


def test_methods_are_judged_beside_a_temperature(tmp_path: Path) -> None:
    whole = digits()
    (inputs, labels), (unseen, truth) = whole.validation, whole.test
    network = replace(whole, validation=(inputs[:150], labels[:150]), test=(unseen[:150], truth[:150]))
    with one_library_thread():
        for name in ("uncalibrated", "ts"):
            np.savez(tmp_path / f"digits-{name}.npz", **command.run(network, name))
        rows = command.table("digits", network, tmp_path).splitlines()
    assert [row.split(" | ")[0] for row in rows[-2:]] == ["| `uncalibrated`", "| `ts`"]
    assert [row.count(" to ") for row in rows[-2:]] == [4, 0]
