"""What the batcher concludes from what batches cost."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from boxcal.app.predict.lanes import HALF_LIFE_SECONDS, BatchSizer, of_few_sizes


def learned(batch_sizer: BatchSizer, fixed: float, per_sample: float, *, noise: float = 0.0) -> BatchSizer:
    """Run batches of the size that the batch_sizer asks for, and smaller ones, until it has settled."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        for samples in {1, max(1, batch_sizer.batch_size // 2), batch_sizer.batch_size}:
            batch_sizer.measured(samples, (fixed + per_sample * samples) * (1 + noise * rng.normal()))
    return batch_sizer


def test_it_finds_the_two_costs() -> None:
    batch_sizer = learned(BatchSizer(64, 10.0), 0.010, 0.001)
    assert batch_sizer.fixed == pytest.approx(0.010, rel=0.1)
    assert batch_sizer.per_sample == pytest.approx(0.001, rel=0.1)


def test_a_large_fixed_cost_asks_for_large_batches_and_none_for_small_ones() -> None:
    assert learned(BatchSizer(64, 10.0), 0.010, 0.001).batch_size == 64
    assert 15 <= learned(BatchSizer(64, 10.0), 0.001, 0.001).batch_size <= 22
    assert learned(BatchSizer(64, 10.0), 0.0, 0.010, noise=0.02).batch_size <= 4


def test_a_batch_stays_under_the_target_but_is_never_empty() -> None:
    batch_sizer = learned(BatchSizer(64, 0.050), 0.010, 0.002)
    assert 0.010 + 0.002 * batch_sizer.batch_size <= 0.0505
    assert batch_sizer.batch_size >= 18
    assert learned(BatchSizer(64, 0.050), 0.010, 0.300).batch_size == 1


def test_passes_side_by_side_take_what_the_target_allows_however_small_the_fixed_cost() -> None:
    for fixed in (0.0, 0.001):
        batch_sizer = learned(BatchSizer(64, 0.100, passes=2), fixed, 0.010, noise=0.02)
        assert 8 <= batch_sizer.batch_size <= 10


def test_one_stall_is_no_news() -> None:
    batch_sizer = learned(BatchSizer(64, 0.050), 0.001, 0.001)
    before = batch_sizer.batch_size
    batch_sizer.measured(before, 5.0)
    assert batch_sizer.batch_size >= 0.7 * before
    batch_sizer = BatchSizer(64, 10.0)
    for seconds in (0.01, 5.0):
        batch_sizer.measured(4, seconds)
    assert batch_sizer.wait_for(4) == pytest.approx(0.012)


def test_a_size_that_ran_out_of_memory_is_not_asked_for_again() -> None:
    batch_sizer = learned(BatchSizer(64, 10.0), 0.010, 0.001)
    batch_sizer.ran_out_of_memory(40)
    assert learned(batch_sizer, 0.010, 0.001).batch_size == 20


def test_it_waits_for_others_only_where_the_device_is_busy_and_at_most_for_the_fixed_cost() -> None:
    batch_sizer = learned(BatchSizer(64, 10.0), 0.010, 0.001)
    assert batch_sizer.gather_seconds(queued=1, last=16, idle=0.001) == pytest.approx(0.010, rel=0.1)
    assert batch_sizer.gather_seconds(queued=16, last=16, idle=0.001) == 0
    assert batch_sizer.gather_seconds(queued=1, last=1, idle=0.001) == 0
    assert batch_sizer.gather_seconds(queued=1, last=16, idle=0.5) == 0
    assert learned(BatchSizer(64, 10.0), 0.0, 0.010).gather_seconds(queued=1, last=16, idle=0.001) < 1e-4


def test_it_expects_a_wait_from_the_rate_of_the_whole_service() -> None:
    now = 0.0
    batch_sizer = BatchSizer(64, 10.0, clock=lambda: now)
    assert batch_sizer.wait_for(100) == 0
    for _ in range(50):
        batch_sizer.observe_throughput(8, 0.16)
    assert batch_sizer.wait_for(100) == pytest.approx(2.0)
    now = HALF_LIFE_SECONDS
    assert batch_sizer.wait_for(100) == pytest.approx(1.0)


def test_few_sizes_are_at_most_a_third_below_what_was_asked() -> None:
    sizes = {of_few_sizes(size) for size in range(1, 129)}
    assert sorted(sizes) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert all(size * 2 / 3 <= of_few_sizes(size) <= size for size in range(1, 129))


def loaded(batch_sizer: BatchSizer, interval: Callable[[int], float]) -> list[int]:
    """Run batches of the size that the batch_sizer asks for, while samples always wait; gives their sizes."""
    sizes = []
    for _ in range(1000):
        sizes.append(size := batch_sizer.batch_size)
        batch_sizer.observe_throughput(size, interval(size))
    return sizes


def test_under_load_a_size_is_doubled_as_long_as_the_whole_service_takes_less_per_sample() -> None:
    cheapest_is_two = {1: 7.8e-3, 2: 14.2e-3, 4: 29.8e-3}
    batch_sizer = learned(BatchSizer(64, 10.0), 0.0, 0.0046)
    assert batch_sizer.batch_size == 1
    sizes = loaded(batch_sizer, cheapest_is_two.__getitem__)
    assert batch_sizer.batch_size == 2
    assert sizes.count(4) <= 60
    assert (
        16 <= loaded(learned(BatchSizer(64, 10.0), 0.0, 0.001), lambda size: 0.001 * size + 0.001)[-1] <= 32
    )
    assert set(loaded(learned(BatchSizer(64, 10.0), 0.0, 0.001), lambda size: 0.001 * size)[-100:]) == {1}


def test_a_size_that_was_not_worthwhile_is_tried_again_after_a_while() -> None:
    now = 0.0
    batch_sizer = learned(BatchSizer(64, 10.0, clock=lambda: now), 0.0, 0.001)
    assert 4 not in loaded(batch_sizer, lambda size: 0.001 * size)
    now = 60.0
    assert loaded(batch_sizer, lambda size: 0.001 * size**0.5)[-1] == 64


def test_whole_intervals_never_shrink_a_batch_or_count_where_passes_run_side_by_side() -> None:
    batch_sizer = learned(BatchSizer(64, 10.0), 0.010, 0.001)
    assert set(loaded(batch_sizer, lambda size: 0.01 * size**2)) == {64}
    beside = learned(BatchSizer(64, 0.100, passes=2), 0.0, 0.010)
    assert set(loaded(beside, lambda size: 0.01)) == {beside.batch_size}
