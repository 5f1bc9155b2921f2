"""A network that is rewritten to compute less is compared with the original; the pool of cores."""

import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from boxcal.models.backends import onnx_file, torchvision_models
from boxcal.models.backends.checks import same_logits
from boxcal.models.backends.class_token import take_class_token_early
from boxcal.models.backends.torch_backbone import ThreadPerCorePool, padded
from boxcal.models.loading.specifications import load_backbone
from tests.models.test_class_token import Graph, block, small_transformer, take


@pytest.fixture
def model(tmp_path: Path) -> Path:
    graph = Graph()
    block(graph)
    take(graph)
    path = tmp_path / "model.onnx"
    onnx.save(graph.model(), path)
    return path


def rewrite_wrongly(model: onnx.ModelProto) -> bool:
    """Rewrite the graph, and change its last weights by one part in a thousand."""
    rewritten = take_class_token_early(model)
    weights = model.graph.initializer[0]
    weights.CopyFrom(
        numpy_helper.from_array(numpy_helper.to_array(weights) * np.float32(1.001), weights.name)
    )
    return rewritten


def test_a_rewritten_graph_with_the_same_logits_is_served(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert onnx_file.OnnxFile(model, optimize=True).rewritten
    assert not onnx_file.OnnxFile(model, optimize=False).rewritten
    served = load_backbone(f"onnx:{model}", device="cpu")
    original = load_backbone(f"onnx:{model}", device="cpu", optimize=False)
    batch = torch.randn(3, *served.input_shape)
    torch.testing.assert_close(served(batch), original(batch), atol=1e-5, rtol=1e-5)
    assert not caplog.records


def test_a_graph_that_is_rewritten_wrongly_is_served_as_it_is(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = load_backbone(f"onnx:{model}", device="cpu", optimize=False)
    monkeypatch.setattr(onnx_file, "take_class_token_early", rewrite_wrongly)
    with caplog.at_level(logging.WARNING, "boxcal"):
        served = load_backbone(f"onnx:{model}", device="cpu")
    assert "onnx:model.onnx is served as it is" in caplog.text
    batch = torch.randn(3, *served.input_shape)
    np.testing.assert_array_equal(served(batch), original(batch))


class SecondToken(torchvision_models.LastBlock):
    """A wrong last block: it computes the second token."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens.roll(-1, dims=1))


@pytest.mark.parametrize("right", [True, False])
def test_torchvisions_last_block_is_replaced_where_that_changes_no_logit(
    *, right: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not right:
        monkeypatch.setattr(torchvision_models, "LastBlock", SecondToken)
    network = small_transformer()
    inputs = torch.randn(2, 3, 32, 32)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, "boxcal"):
        before = network(inputs)
        torchvision_models.shorten_last_block("torchvision:small", network, (3, 32, 32))
        torch.testing.assert_close(network(inputs), before, atol=1e-5, rtol=1e-5)
    assert isinstance(network.encoder.layers[-1], torchvision_models.LastBlock) is right
    assert ("torchvision:small is served as it is" in caplog.text) is not right


def test_optimize_decides_whether_torchvisions_last_block_is_replaced() -> None:
    short, whole = (
        load_backbone("torchvision:vit_b_32", weights="random", device="cpu", optimize=optimize)
        for optimize in (True, False)
    )
    assert short.fingerprint == whole.fingerprint
    encoders: list[Any] = [one._network.encoder for one in (short, whole)]  # type: ignore[attr-defined]
    assert [isinstance(one.layers[-1], torchvision_models.LastBlock) for one in encoders] == [True, False]
    tokens = torch.randn(2, 50, 768)
    with torch.inference_mode():
        answer, expected = (one(tokens) for one in encoders)
    assert answer.shape == (2, 1, 768)
    torch.testing.assert_close(answer, expected[:, :1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("difference", "eps", "same"),
    [(0.9e-4, 0.0, True), (1.1e-4, 0.0, False), (1.1e-4, 1e-3, True), (float("nan"), 0.0, False)],
)
def test_logits_are_compared_relative_to_the_largest(difference: float, eps: float, *, same: bool) -> None:
    original = torch.tensor([[1.0, -100.0, 3.0]])
    assert same_logits("m", original, original + 100 * difference, eps) is same
    zeros = torch.zeros(1, 3)
    assert same_logits("m", zeros, zeros)
    assert not same_logits("m", zeros, zeros + 1e-9)


@pytest.mark.parametrize("count", [1, 2, 7, 16, 33])
@pytest.mark.parametrize("limits", [(1, None), (4, 4), (2, 3)])
def test_pieces_join_in_order_and_keep_their_limits(count: int, limits: tuple[int, int | None]) -> None:
    sizes = []

    def forward(piece: torch.Tensor) -> torch.Tensor:
        sizes.append(len(piece))
        return padded(piece, limits[0])[: len(piece)] * 2

    batch = torch.arange(count * 3.0).reshape(count, 3)
    assert torch.equal(ThreadPerCorePool(2).run(forward, batch, *limits), batch * 2)
    assert sum(sizes) == count
    assert max(sizes) <= (limits[1] or count)
    assert padded(batch, 1) is batch
    assert padded(batch, count + 2).tolist() == [*batch.tolist(), batch[-1].tolist(), batch[-1].tolist()]


def test_each_piece_computes_on_one_thread_and_others_keep_theirs() -> None:
    def threads_of(piece: torch.Tensor) -> torch.Tensor:
        return torch.full((len(piece), 1), float(torch.get_num_threads()))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pieces, batch = ThreadPerCorePool(2), torch.zeros(16, 1)
        assert torch.all(pieces.run(threads_of, batch) == 1)
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as newcomer:
            assert newcomer.submit(torch.get_num_threads).result() == 2
        torch.set_num_threads(2)
        assert torch.all(pieces.run(threads_of, batch) == 1)
    finally:
        torch.set_num_threads(before)


def test_one_failing_piece_fails_the_batch() -> None:
    def forward(piece: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this piece")

    with pytest.raises(RuntimeError, match="this piece"):
        ThreadPerCorePool(2).run(forward, torch.zeros(8, 1))
