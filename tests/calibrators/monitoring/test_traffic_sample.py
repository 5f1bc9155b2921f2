"""How many predictions the monitor reads, and that the choice does not depend on how the log is cut."""

import numpy as np
import pytest

from boxcal.calibrators.monitoring.drift import PER_SECOND, RESERVE, TrafficSample


def test_everything_is_read_of_moderate_traffic_and_of_bursts() -> None:
    sample = TrafficSample()
    seconds = 1e9 + np.arange(200_000) / PER_SECOND
    assert sample.choose(np.arange(len(seconds)), seconds).all()
    burst = int(RESERVE / 2)
    assert sample.choose(np.arange(burst), np.full(burst, 1e9 + 1e6)).all()


@pytest.mark.parametrize("rate", [20_000.0, 200_000.0])
def test_traffic_that_lasts_is_read_at_a_limited_rate_and_evenly(rate: float) -> None:
    sample = TrafficSample()
    seconds = 1e9 + np.arange(0.0, 60.0, 64 / rate).repeat(64)  # requests of 64 rows
    chosen = sample.choose(np.arange(len(seconds)), seconds)
    last = chosen[len(chosen) // 2 :]
    assert last.sum() / 30.0 == pytest.approx(PER_SECOND, rel=0.1)
    by_row = last[: len(last) // 64 * 64].reshape(-1, 64).mean(0)
    assert by_row.std() < 5 * np.sqrt(by_row.mean() / (len(last) / 64))


def test_the_choice_does_not_depend_on_how_the_log_is_cut() -> None:
    random = np.random.default_rng(0)
    seq, seconds = np.arange(100_000), 1e9 + np.sort(random.uniform(0.0, 2.0, 100_000))
    whole = TrafficSample().choose(seq, seconds)
    assert 0.2 < whole.mean() < 0.9
    sample, cuts = TrafficSample(), np.sort(random.integers(0, len(seq), 300))
    parts = zip(np.split(seq, cuts), np.split(seconds, cuts), strict=True)
    found = []
    for some, times in parts:
        restored = TrafficSample()
        restored.load_state_dict(sample.state_dict())
        sample = restored
        found.append(sample.choose(some, times))
    assert np.array_equal(np.concatenate(found), whole)
