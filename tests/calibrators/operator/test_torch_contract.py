"""What torch's users may do with any function: axes, strides, dtypes, compile, export, vmap; and errors."""

import io
import math
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor

from boxcal.calibrators.operator import box_constrained_softmax


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_any_axis_and_any_strides(dim: int) -> None:
    logits = randn(4, 6, 5).transpose(0, 1)[::2]
    answer = box_constrained_softmax(logits, 0.02, 0.6, dim=dim)
    rows = logits.movedim(dim, -1).reshape(-1, logits.shape[dim])
    wanted = torch.stack([box_constrained_softmax(row, 0.02, 0.6) for row in rows])
    assert torch.equal(answer, wanted.reshape(logits.movedim(dim, -1).shape).movedim(-1, dim))
    for shape in ((0, 4), (3, 0, 4)):
        assert box_constrained_softmax(torch.zeros(shape), 0.1, 0.5).shape == shape


@pytest.mark.parametrize("shape", [(), (5,), (3, 1, 1), (4, 1), (4, 5), (3, 4, 5), (1, 1, 5)])
def test_bounds_may_have_any_shape_that_broadcasts(shape: tuple[int, ...]) -> None:
    logits = randn(3, 4, 5)
    upper = torch.rand(shape, generator=torch.Generator().manual_seed(1)) / 2 + 0.3
    wanted = box_constrained_softmax(logits, None, upper.expand(3, 4, 5).contiguous())
    assert torch.allclose(box_constrained_softmax(logits, None, upper), wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    logits = (3 * randn(20, 30)).to(dtype)
    answer = box_constrained_softmax(logits, 0.01, 0.3)
    low, high = torch.tensor(0.01, dtype=dtype), torch.tensor(0.3, dtype=dtype)
    exact = box_constrained_softmax(logits.float(), low.float(), high.float())
    assert answer.dtype is dtype
    assert torch.equal(answer, exact.to(dtype))
    assert ((answer >= low) & (answer <= high)).all()


def test_tensors_promote_numbers_do_not_and_autocast_gives_float32() -> None:
    logits = randn(2, 3)
    assert box_constrained_softmax(logits, 0.1).dtype is torch.float32
    assert box_constrained_softmax(logits, torch.full((3,), 0.1, dtype=torch.float64)).dtype is torch.float64
    assert box_constrained_softmax(logits.half(), torch.full((3,), 0.1)).dtype is torch.float32
    exact = torch.tensor([5.0, 0.0, 0.0], dtype=torch.float64)
    assert box_constrained_softmax(exact, None, 0.4)[0].item() == 0.4
    layer = torch.nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = layer(randn(2, 4))
        assert hidden.dtype is torch.bfloat16
        assert box_constrained_softmax(hidden, 0.1, 0.5).dtype is torch.float32


@pytest.mark.filterwarnings("ignore")
def test_compile_without_a_graph_break_and_export() -> None:
    def model(logits: Tensor, upper: Tensor) -> Tensor:
        return box_constrained_softmax(logits * 2, 0.01, upper, temperature=1.5, dim=1) + 1

    logits, upper = randn(3, 5, 2).requires_grad_(), torch.full((5, 1), 0.5, requires_grad=True)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(logits, upper), model(logits, upper))
    wanted = torch.autograd.grad(model(logits, upper)[:, 0].sum(), (logits, upper))
    found = torch.autograd.grad(compiled(logits, upper)[:, 0].sum(), (logits, upper))
    for got, want in zip(found, wanted, strict=True):
        assert torch.allclose(got, want)

    class Model(torch.nn.Module):
        def forward(self, logits: Tensor, upper: Tensor) -> Tensor:
            return model(logits, upper)

    exported = torch.export.export(
        Model(),
        (logits.detach(), upper.detach()),
        dynamic_shapes={"logits": {0: torch.export.Dim("batch")}, "upper": None},
    )
    larger = randn(7, 5, 2, seed=1)
    assert torch.allclose(exported.module()(larger, upper.detach()), model(larger, upper.detach()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("upper", [0.4, torch.full((5,), 0.4), torch.full((1, 5), 0.4, dtype=torch.float64)])
def test_traces_and_onnx_models_solve_the_same_problem(upper: float | Tensor) -> None:
    class Model(torch.nn.Module):
        def forward(self, logits: Tensor) -> Tensor:
            return box_constrained_softmax(logits * 2, 0.01, upper, temperature=1.5)

    model, example, larger = Model(), randn(3, 5), 3 * randn(7, 5, seed=1)
    trace: Any = torch.jit.trace
    assert torch.allclose(trace(model, (example,))(larger), model(larger), rtol=0, atol=1e-7)
    file: Any = io.BytesIO()
    torch.onnx.export(model, (example,), file, dynamo=False, input_names=["g"], dynamic_axes={"g": {0: "N"}})
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    answer = torch.from_numpy(session.run(None, {"g": larger.numpy()})[0])
    assert torch.allclose(answer, model(larger), rtol=0, atol=1e-7)


def test_vmap_over_logits_and_bounds() -> None:
    logits, upper = randn(3, 4, 5), torch.tensor([[0.4], [0.5], [0.6]])
    answer = torch.vmap(lambda g, b: box_constrained_softmax(g, 0.01, b))(logits, upper)
    for sample, got in enumerate(answer):
        assert torch.allclose(got, box_constrained_softmax(logits[sample], 0.01, upper[sample]), atol=1e-7)
    shared = torch.vmap(lambda g: box_constrained_softmax(g, 0.01, upper[0]), in_dims=1, out_dims=1)(logits)
    assert torch.allclose(shared, box_constrained_softmax(logits, 0.01, 0.4), atol=1e-7)


def test_gradients_of_every_sample() -> None:
    logits, upper = randn(6, 5).double(), torch.full((5,), 0.35, dtype=torch.float64)

    def score(row: Tensor, bound: Tensor) -> Tensor:
        return (box_constrained_softmax(row, 0.02, bound) ** 2).sum()

    by_logits, by_upper = torch.func.vmap(torch.func.grad(score, argnums=(0, 1)), in_dims=(0, None))(
        logits, upper
    )
    for sample in range(6):
        row, bound = logits[sample].clone().requires_grad_(), upper.clone().requires_grad_()
        wanted = torch.autograd.grad(score(row, bound), (row, bound))
        assert torch.allclose(by_logits[sample], wanted[0], atol=1e-14)
        assert torch.allclose(by_upper[sample], wanted[1], atol=1e-14)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_the_registered_op_keeps_torchs_rules() -> None:
    rows = randn(3, 4).requires_grad_()
    bounds = (torch.full((1, 4), 0.01), torch.full((1, 4), 0.6, requires_grad=True))
    torch.library.opcheck(
        torch.ops.boxcal.box_softmax.default,
        (rows, *bounds, torch.ones(1, 1), 1e-6),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"upper": 0.1}, "upper bounds add up to 0.5"),
        ({"lower": 0.5}, "lower bounds add up to 2.5"),
        ({"lower": torch.tensor([0.9, 0.2, 0, 0, 0])}, "lower bounds add up to 1.1"),
        (
            {"upper": torch.tensor([1, 1, 0.1, 1])[:, None].expand(4, 5)},
            "upper bounds of row 2 add up to 0.5",
        ),
        ({"lower": 0.6, "upper": 0.3}, "lower bound 0.6 is above upper bound 0.3"),
        ({"lower": torch.eye(5)[2] / 2, "upper": 0.4}, "lower bound 0.5 of class 2 is above upper bound 0.4"),
        ({"lower": -0.1}, r"lower bound -0.1 .*not in"),
        ({"upper": torch.tensor([1, 1, 1.5, 1, 1])}, "upper bound 1.5 of class 2 is not in"),
        ({"upper": math.nan}, "upper bound nan"),
        ({"upper": torch.ones(4)}, "does not broadcast"),
        ({"upper": torch.ones(2, 4, 5)}, "does not broadcast"),
        ({"temperature": 0.0}, "temperature 0.0"),
        ({"temperature": torch.tensor([[1.0], [1.0], [-1.0], [1.0]])}, "temperature -1 of row 2"),
        ({"temperature": torch.ones(5)}, "temperature has 5 values"),
    ],
)
def test_what_is_wrong_is_said(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        box_constrained_softmax(randn(4, 5), **arguments)


@pytest.mark.parametrize("side", ["lower", "upper"])
@pytest.mark.parametrize("given", [[0.3] * 5, np.full(5, 0.3)], ids=["list", "ndarray"])
def test_a_bound_that_is_no_tensor_is_named(side: str, given: Any) -> None:
    with pytest.raises(
        TypeError, match=f"^{side} is a {type(given).__name__}; it takes a number or a tensor$"
    ):
        box_constrained_softmax(randn(4, 5), **{side: given})


def test_integers_are_no_logits() -> None:
    with pytest.raises(ValueError, match="floating point"):
        box_constrained_softmax(torch.tensor([1, 2]))
    for given in (np.zeros((2, 3)), [[0.0, 1.0]]):
        with pytest.raises(TypeError, match=rf"a torch.Tensor, not {type(given).__name__}"):
            box_constrained_softmax(given)  # type: ignore[arg-type]
