"""The pool gives the answer of one pass over the whole batch, with one thread a core."""

import threading

import pytest
import torch

from boxcal.models.backends.torch_backbone import ThreadPerCorePool, padded


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


def test_each_piece_computes_on_one_thread_and_others_keep_theirs() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pieces = ThreadPerCorePool(2)
        batch = torch.zeros(16, 1)
        seen = pieces.run(lambda piece: torch.full((len(piece), 1), float(torch.get_num_threads())), batch)
        assert torch.all(seen == 1)
        assert torch.get_num_threads() == 2
        newcomer = []
        thread = threading.Thread(target=lambda: newcomer.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert newcomer == [2]
        torch.set_num_threads(2)
        assert torch.all(
            pieces.run(lambda piece: torch.full((len(piece), 1), float(torch.get_num_threads())), batch) == 1
        )
    finally:
        torch.set_num_threads(before)


def test_one_failing_piece_fails_the_batch() -> None:
    def forward(piece: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("this piece")

    with pytest.raises(RuntimeError, match="this piece"):
        ThreadPerCorePool(2).run(forward, torch.zeros(8, 1))


def test_padding_repeats_the_last_sample() -> None:
    batch = torch.tensor([[1.0], [2.0]])
    assert padded(batch, 4).tolist() == [[1.0], [2.0], [2.0], [2.0]]
    assert padded(batch, 1) is batch
