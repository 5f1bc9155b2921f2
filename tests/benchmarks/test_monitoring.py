"""The benchmark of the monitor continues where it was stopped, and its figures are those of all streams."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.monitoring import __main__ as command
from benchmarks.monitoring.streams import Answers, calm, generator, sharpened, shifted


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    """Answers of a classifier of 4 classes that is too confident."""
    folder = tmp_path_factory.mktemp("data") / "small"
    folder.mkdir()
    for seed, name in enumerate(("val", "test")):
        random = np.random.default_rng(seed)
        logits = random.normal(size=(1500, 4))
        logits[np.arange(1500), random.integers(0, 4, 1500)] += random.exponential(3.0, 1500)
        labels = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
        np.savez(folder / f"{name}.npz", logits=2.0 * logits, labels=labels)
    return Answers.of(folder)


def test_streams_have_the_law_that_they_say(answers: Answers) -> None:
    for draw in (calm, sharpened(2.0), shifted):
        stream = draw(answers, 4000, generator(0, 0))
        assert stream.law.sum(1) == pytest.approx(np.ones(4000))
        found = np.bincount(stream.labels, minlength=4) / 4000
        assert found == pytest.approx(stream.law.mean(0), abs=0.04)
    calm_law = answers.law[calm(answers, 10, generator(0, 0)).index]
    assert np.array_equal(calm(answers, 10, generator(0, 0)).law, calm_law)


def test_a_part_continues(answers: Answers, tmp_path: Path) -> None:
    part = replace(command.PARTS["null"], streams={"small": 2})
    command.run(part, "null", answers, tmp_path, 1)
    path = tmp_path / "null-small.jsonl"
    first = path.read_text()
    found = command.run(part, "null", answers, tmp_path)
    assert path.read_text().startswith(first)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [found["streams"], len(records)] == [2, 2]
    assert found == {"streams": 2, **part.summary(records)}
    header, *rows = part.table({"small": found})
    assert header == ["", "small, calm", "small, harder"]
    assert rows[0][0] == "this test"


def test_a_delay_without_an_alarm_is_never() -> None:
    found = {
        "T 2, this test": 38.0,
        "label shift, this test": float("inf"),
        "T 2, z-test: alarm before the change": 0.9,
    }
    rows = command.medians({"small": found})
    assert rows[1] == ["small", "this test", "", "", "38", "never"]
    assert rows[5] == ["small", "z-test every 100 labels", "", "", "false alarm before in 90%", ""]
