"""The benchmark of the monitor continues where it was stopped, and its figures are those of all streams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.monitoring import __main__ as command
from benchmarks.monitoring import page
from benchmarks.monitoring.streams import Answers, calm, generator, redefined, sharpened, shifted


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
    for draw in (calm, sharpened(2.0), shifted, redefined):
        stream = draw(answers, 4000, generator(0, 0))
        assert stream.law.sum(1) == pytest.approx(np.ones(4000))
        found = np.bincount(stream.labels, minlength=4) / 4000
        assert found == pytest.approx(stream.law.mean(0), abs=0.04)
    calm_law = answers.law[calm(answers, 10, generator(0, 0)).index]
    assert np.array_equal(calm(answers, 10, generator(0, 0)).law, calm_law)


@pytest.mark.parametrize("part", ["null", "duels", "intervals", "prior", "feedback"])
def test_a_part_continues(
    answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setitem(command.PARTS, part, replace(command.PARTS[part], streams={"small": 2}))
    command.run(part, answers, tmp_path, 1)
    path = tmp_path / f"{part}-small.jsonl"
    first = path.read_text()
    found = command.run(part, answers, tmp_path, None)
    assert path.read_text().startswith(first)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [found["streams"], len(records)] == [2, 2]
    assert found == {"streams": 2, **command.PARTS[part].summary(records)}


def test_infinite_medians_are_recorded_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "RESULTS", tmp_path / "monitoring.json")
    page.record("delays", "a", {"streams": 3, "T 2": 38.0, "label shift": float("inf")})
    page.record("delays", "b", {"streams": 1})
    recorded: Mapping[str, Any] = page.read()["delays"]
    assert recorded == {"a": {"streams": 3, "T 2": 38.0, "label shift": None}, "b": {"streams": 1}}
