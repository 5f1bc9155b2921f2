"""The batcher: what it groups, and that every request fails, expires or leaves alone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from boxcal.app.http.problems import (
    BackboneFailed,
    BoxcalError,
    DeadlineExceeded,
    InvalidInput,
    QueueFull,
    TooManySamples,
)
from boxcal.app.predict.batcher import Batcher
from boxcal.app.predict.lanes import BatchSizer, Finished, Part, PendingImage
from tests.app.raising import raises_problem
from tests.app.waiting import eventually

pytestmark = pytest.mark.anyio

Doubling = Batcher[float, NDArray[np.float32]]


class Device:
    """Doubles its samples; its passes can be held up, and some samples make it fail."""

    def __init__(self, passes: int = 1) -> None:
        self.passes = passes
        self.batches: list[list[float]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.memory = 1_000_000
        self.broken: set[float] = set()
        self.crowded = False
        self.alone: list[bool] = []
        self._passes = threading.Semaphore(passes)

    def forward(self, samples: NDArray[np.float32], alone: bool) -> NDArray[np.float32]:
        """Take one batch; note whether more threads than it bears were here already."""
        self.alone.append(alone)
        self.crowded |= not self._passes.acquire(blocking=False)
        try:
            return self._pass(samples)
        finally:
            self._passes.release()

    def _pass(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        self.batches.append(samples[:, 0].tolist())
        assert self.gate.wait(10)
        if len(samples) > self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if broken := self.broken & set(samples[:, 0].tolist()):
            raise RuntimeError(f"cannot take {broken}")
        return samples * 2

    @staticmethod
    def finish(
        logits: NDArray[np.float32], parts: Sequence[Part[float, NDArray[np.float32]]]
    ) -> list[NDArray[np.float32] | Exception]:
        """Add what each request asked for; refuse what asks for NaN."""
        return [
            InvalidInput("nan")
            if part.context != part.context
            else logits[part.start : part.stop] + np.float32(part.context)
            for part in parts
        ]


def rows(*values: float) -> NDArray[np.float32]:
    return np.array(values, dtype=np.float32)[:, None]


def values(finished: Finished[NDArray[np.float32]]) -> list[float]:
    return [float(v) for v in np.concatenate(finished.results)[:, 0]]


@asynccontextmanager
async def batching(device: Device, *, size: int = 8, queue: int = 100) -> AsyncIterator[Doubling]:
    batch_sizer = BatchSizer(size, 10.0, device.passes)
    for n in range(1, size + 1):  # as if it had measured a fixed cost that makes full batches pay
        batch_sizer.measured(n, 0.001 + n * 1e-6)
    batcher: Doubling = Batcher(
        device.forward, device.finish, batch_sizer=batch_sizer, max_queue_samples=queue
    )
    try:
        yield batcher
    finally:
        device.gate.set()
        await asyncio.to_thread(batcher.close)


async def held(batcher: Doubling, device: Device, context: float = 0.0) -> asyncio.Task[Any]:
    """Keep a first request in its pass until the gate is opened, so that others wait behind it."""
    device.gate.clear()
    first = asyncio.create_task(batcher.run(rows(1), context))
    await eventually(lambda: len(device.batches) == 1)
    return first


async def queued(batcher: Doubling, samples: int) -> None:
    await eventually(lambda: batcher._lanes._waiting == samples)


async def test_concurrent_requests_share_a_pass_and_get_their_own_back() -> None:
    device = Device()
    async with batching(device) as batcher:
        first = await held(batcher, device, 0.5)
        others = [asyncio.create_task(batcher.run(rows(n, n + 0.25), n)) for n in (2.0, 3.0, 4.0)]
        await queued(batcher, 6)
        device.gate.set()
        assert values(await first) == [2.5]
        assert [values(await other) for other in others] == [[3 * n, 3 * n + 0.5] for n in (2.0, 3.0, 4.0)]
    assert device.batches == [[1], [2, 2.25, 3, 3.25, 4, 4.25]]


async def test_samples_decoded_in_a_lane_fail_alone_and_not_at_all_once_expired() -> None:
    device = Device()
    decoded: list[float] = []

    def sample(value: float) -> PendingImage:
        def decode() -> NDArray[np.float32]:
            decoded.append(value)
            if value < 0:
                raise InvalidInput("negative")
            return rows(value)

        return PendingImage(decode)

    async with batching(device) as batcher:
        first = await held(batcher, device, 0.5)
        others = [asyncio.create_task(batcher.run(sample(value), 0.5)) for value in (2.0, -3.0, 4.0, 5.0)]
        await queued(batcher, 4)
        others[3].cancel()
        await asyncio.gather(others[3], return_exceptions=True)
        device.gate.set()
        assert values(await first) == [2.5]
        assert values(await others[0]) == [4.5]
        with raises_problem(InvalidInput, match="negative"):
            await others[1]
        assert values(await others[2]) == [8.5]
        with raises_problem(InvalidInput):
            await batcher.run(sample(-1.0), 0.5)
        assert (await batcher.run(sample(6.0), 0.5)).decode > 0
    assert device.batches == [[1], [2, 4], [6]]
    assert decoded == [2, -3, 4, -1, 6]


async def test_a_large_request_is_split_and_put_together_in_order() -> None:
    device = Device()
    async with batching(device, size=4) as batcher:
        finished = await batcher.run(rows(*range(11)), 0.0)
    assert values(finished) == [2.0 * n for n in range(11)]
    assert [len(batch) for batch in device.batches] == [4, 4, 3]


async def test_a_large_request_does_not_keep_a_small_one_waiting_to_its_end() -> None:
    device = Device()
    async with batching(device, size=4) as batcher:
        device.gate.clear()
        large = asyncio.create_task(batcher.run(rows(*range(100, 140)), 0.0))
        await eventually(lambda: len(device.batches) == 1)
        small = asyncio.create_task(batcher.run(rows(1), 0.0))
        await queued(batcher, 37)
        ended: list[asyncio.Task[Finished[NDArray[np.float32]]]] = []
        for task in (large, small):
            task.add_done_callback(ended.append)
        device.gate.set()
        await asyncio.wait({large, small})
        assert ended == [small, large]
        assert values(await large) == [2.0 * n for n in range(100, 140)]
    assert 1 in device.batches[1] + device.batches[2]


async def test_a_sample_the_backbone_cannot_take_fails_alone() -> None:
    device = Device()
    device.broken = {3.0}
    async with batching(device) as batcher:
        first = await held(batcher, device)
        tasks = [asyncio.create_task(batcher.run(rows(n, n + 10), 0.0)) for n in range(1, 5)]
        await queued(batcher, 8)
        device.gate.set()
        await first
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(outcomes[2], BackboneFailed)
    good = [outcome for outcome in outcomes if isinstance(outcome, Finished)]
    assert [values(outcome) for outcome in good] == [[2 * n, 2 * n + 20] for n in (1, 2, 4)]


def kind_of(outcome: object) -> object:
    return outcome.kind if isinstance(outcome, BoxcalError) else outcome


async def test_a_request_whose_rows_cannot_be_finished_fails_alone() -> None:
    device = Device()
    async with batching(device) as batcher:
        first = await held(batcher, device)
        tasks = [
            asyncio.create_task(batcher.run(rows(n), c)) for n, c in ((1, 1.0), (2, float("nan")), (3, 3.0))
        ]
        await queued(batcher, 3)
        device.gate.set()
        await first
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert kind_of(outcomes[1]) is InvalidInput
    assert [values(outcome) for outcome in outcomes if isinstance(outcome, Finished)] == [[3], [9]]
    assert len(device.batches) == 2


async def test_memory_that_runs_out_halves_the_batch_and_the_limit() -> None:
    device = Device()
    device.memory = 3
    async with batching(device, size=8) as batcher:
        assert values(await batcher.run(rows(*range(8)), 0.0)) == [2.0 * n for n in range(8)]
        assert [len(batch) for batch in device.batches] == [8, 4, 2, 2, 4, 2, 2]
        device.batches.clear()
        await batcher.run(rows(*range(8)), 0.0)
    assert [len(batch) for batch in device.batches] == [2, 2, 2, 2]


async def test_a_cancelled_request_is_not_worked_on_and_disturbs_nobody() -> None:
    device = Device()
    async with batching(device) as batcher:
        first = await held(batcher, device)
        leaves = asyncio.create_task(batcher.run(rows(2), 0.0))
        stays = asyncio.create_task(batcher.run(rows(3), 0.0))
        await queued(batcher, 2)
        leaves.cancel()
        first.cancel()  # in the backbone already: its batch goes on, its answer is dropped
        await eventually(lambda: leaves.done() and first.done())
        device.gate.set()
        assert values(await stays) == [6]
        outcomes = await asyncio.gather(first, leaves, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2
    assert device.batches == [[1], [3]]


async def test_an_expired_request_is_told_at_once_and_not_worked_on() -> None:
    device = Device()
    async with batching(device) as batcher:
        first = await held(batcher, device)
        late = asyncio.create_task(batcher.run(rows(2), 0.0, time.monotonic() + 0.05))
        patient = asyncio.create_task(batcher.run(rows(3), 0.0, time.monotonic() + 600))
        with raises_problem(DeadlineExceeded):
            await late  # though the backbone is still busy with the first
        device.gate.set()
        assert values(await patient) == [6]
        await first
    assert device.batches == [[1], [3]]


async def test_a_place_is_held_until_the_answer_and_given_back() -> None:
    async with batching(Device(), queue=3) as batcher:
        with batcher.reserve_slot(2):
            assert batcher.held == 2
            with (
                raises_problem(QueueFull, match="2 samples are waiting and at most 3 may") as refused,
                batcher.reserve_slot(2),
            ):
                pass
            assert int(refused.value.headers["Retry-After"]) >= 1
            with batcher.reserve_slot(1):
                assert batcher.held == 3
        assert batcher.held == 0
        with raises_problem(TooManySamples, match="holds 4 samples"), batcher.reserve_slot(4):
            pass


async def test_a_request_that_would_come_too_late_is_refused_at_once() -> None:
    batch_sizer = BatchSizer(4, 10.0, clock=lambda: 0.0)
    batch_sizer.observe_throughput(1, 0.5)
    device = Device()
    batcher: Doubling = Batcher(device.forward, device.finish, batch_sizer=batch_sizer, max_queue_samples=100)
    with batcher.reserve_slot(4, time.monotonic() + 1):
        with raises_problem(QueueFull, match="longer than the request's timeout") as refused:
            batcher.reserve_slot(1, time.monotonic() + 1).__enter__()
        assert refused.value.headers["Retry-After"] == "2"
        with batcher.reserve_slot(1, time.monotonic() + 3):
            pass
        for too_short in (0.4, 0.0, -1.0):  # not even alone
            with raises_problem(DeadlineExceeded, match="timeout"):
                batcher.reserve_slot(1, time.monotonic() + too_short).__enter__()
    await asyncio.to_thread(batcher.close)


async def test_samples_that_cannot_be_read_do_not_end_the_batcher_before_its_first_pass() -> None:
    def damaged() -> NDArray[np.float32]:
        time.sleep(0.01)  # so that others wait, and the batches of two follow each other
        raise InvalidInput("damaged")

    device = Device()
    batcher: Doubling = Batcher(
        device.forward, device.finish, batch_sizer=BatchSizer(4, 10.0), max_queue_samples=100
    )
    requests = [batcher.run(PendingImage(damaged), 0.0) for _ in range(20)]
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert {kind_of(result) for result in results} == {InvalidInput}
    assert batcher.failure is None
    await asyncio.to_thread(batcher.close)


async def test_closing_finishes_what_waits() -> None:
    device = Device()
    async with batching(device, size=1) as batcher:
        tasks = [asyncio.create_task(batcher.run(rows(n), 0.0)) for n in range(20)]
        await asyncio.sleep(0)
    assert [values(await task) for task in tasks] == [[2.0 * n] for n in range(20)]


async def test_a_batch_is_finished_while_the_next_is_in_the_backbone() -> None:
    device = Device()
    finishing, go_on = threading.Event(), threading.Event()

    def slow_finish(
        logits: NDArray[np.float32], parts: Sequence[Part[float, NDArray[np.float32]]]
    ) -> list[Any]:
        finishing.set()
        assert go_on.wait(10)
        return list(device.finish(logits, parts))

    batcher: Doubling = Batcher(
        device.forward, slow_finish, batch_sizer=BatchSizer(1, 10.0), max_queue_samples=100
    )
    tasks = [asyncio.create_task(batcher.run(rows(n), 0.0)) for n in range(6)]
    await eventually(lambda: finishing.is_set() and len(device.batches) > 1)
    go_on.set()
    assert [values(await task) for task in tasks] == [[2.0 * n] for n in range(6)]
    assert not device.crowded
    await asyncio.to_thread(batcher.close)


async def test_passes_side_by_side_share_what_waits() -> None:
    device = Device(passes=2)
    async with batching(device, size=8) as batcher:
        device.gate.clear()
        whole = asyncio.create_task(batcher.run(rows(*range(8)), 0.0))
        await eventually(lambda: len(device.batches) == 2)
        later = asyncio.create_task(batcher.run(rows(9), 0.0))
        await queued(batcher, 1)
        assert len(device.batches) == 2
        device.gate.set()
        assert values(await whole) == [2.0 * n for n in range(8)]
        assert values(await later) == [18.0]
    assert device.batches == [[0, 1, 2, 3], [4, 5, 6, 7], [9]]
    assert not device.crowded


async def test_passes_side_by_side_meet_few_sizes() -> None:
    device = Device(passes=2)
    async with batching(device, size=20) as batcher:
        finished = await batcher.run(rows(*range(33)), 0.0)
    assert values(finished) == [2.0 * n for n in range(33)]
    assert {len(batch) for batch in device.batches} <= {1, 2, 3, 4, 6, 8, 12, 16}


async def test_a_lone_sample_has_every_pass_to_itself() -> None:
    device = Device(passes=3)
    async with batching(device) as batcher:
        await batcher.run(rows(1), 0.0)
        device.gate.clear()
        first = asyncio.create_task(batcher.run(rows(2), 0.0))
        await eventually(lambda: len(device.batches) == 2)
        second = asyncio.create_task(batcher.run(rows(3), 0.0))
        await eventually(lambda: len(device.batches) == 3)
        device.gate.set()
        await asyncio.gather(first, second)
        await batcher.run(rows(4), 0.0)
    assert device.alone == [True, True, False, True]


@pytest.mark.parametrize("passes", [1, 2])
async def test_many_requests_of_every_kind_at_once(passes: int) -> None:
    """Under a storm of requests that succeed, fail, expire and leave, each gets what it must."""
    rng = np.random.default_rng(0)
    device = Device(passes)
    device.broken = {float(n) for n in range(0, 400, 37)}
    async with batching(device, size=16, queue=10_000) as batcher:

        async def one(number: int) -> None:
            sent = rows(*(number + rng.integers(0, 2, size=rng.integers(1, 5)) * 1000.0))
            try:
                finished = await batcher.run(sent, 1.0, time.monotonic() + 30)
            except BoxcalError:
                assert device.broken & set(sent[:, 0].tolist())
            else:
                assert values(finished) == [2 * float(v) + 1 for v in sent[:, 0]]
                assert not device.broken & set(sent[:, 0].tolist())

        tasks = []
        for number in range(400):
            tasks.append(asyncio.create_task(one(number)))
            if number % 7 == 0:
                await asyncio.sleep(0)
            if number % 11 == 0:
                tasks[int(rng.integers(len(tasks)))].cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} <= {type(None), asyncio.CancelledError}
    assert max(len(batch) for batch in device.batches) > 4
    assert not device.crowded
