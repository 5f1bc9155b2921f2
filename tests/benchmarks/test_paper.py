"""The paper's experiment: it continues where it ended, and its intervals know that splits overlap."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.operator import paper_problem
from benchmarks.paper import __main__ as command
from benchmarks.paper import runtime
from benchmarks.paper.page import page
from benchmarks.paper.sets import METHODS, DataSet, joined, split
from benchmarks.paper.statistics import Results
from boxcal.calibrators import box_constrained_softmax, methods
from boxcal.calibrators.evaluation.comparison import base_of

RUN = ("uncalibrated", "ts", "pb", "ta")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    made = tmp_path / "small"
    made.mkdir()
    for name, count in (("val", 120), ("test", 80)):
        logits = 2.0 * rng.normal(size=(count, 3))
        labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
        np.savez(made / f"{name}.npz", logits=3.0 * logits, labels=labels)
    return made


def test_it_runs_only_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "FOLDER", folder.parent)
    monkeypatch.setattr(DataSet, "methods", [*RUN[:2], RUN[3]])
    data_set = DataSet("small", "Small")
    command.run_split(folder, data_set, 0, math.inf)
    before = command.Store(data_set).document["cells"]
    assert [cell["method"] for cell in before] == ["uncalibrated", "ts"]
    monkeypatch.setattr(DataSet, "methods", list(RUN))
    for seed in range(3):
        command.run_split(folder, data_set, seed, math.inf)
    document = command.Store(data_set).document
    assert document["cells"][:2] == before
    assert [cell["method"] for cell in document["cells"]].count("pb") == 3
    text = page([document])
    assert "number of splits: 3" in text
    assert f"with the commits that it measured: `{command.commit()}`" in " ".join(text.split())
    assert "`ta`" in text.split(", which require features")[0]
    assert "| `pb` |" in text


def test_a_split_redistributes_all_samples(folder: Path) -> None:
    given, drawn = split(folder, 0), split(folder, 1)
    assert [len(part) for part in given] == [len(part) for part in drawn] == [120, 80]
    both = [np.sort(np.concatenate([part.logits for part in parts]), axis=0) for parts in (given, drawn)]
    assert np.array_equal(both[0], both[1])
    assert not np.array_equal(given[0].logits, drawn[0].logits)


def test_the_interval_allows_for_overlapping_splits() -> None:
    cells = [
        {"method": method, "split": seed, "nll": value + 0.01 * seed * (method == "ts")}
        for seed in range(5)
        for method, value in (("uncalibrated", 1.0), ("ts", 0.9))
    ]
    document = {"title": "", "cells": cells, "fit_samples": 100, "test_samples": 200}
    found = Results(document).difference("ts", "uncalibrated", "nll")
    assert found.value == pytest.approx(-0.08)
    values = 0.01 * np.arange(5)
    half = 2.776 * math.sqrt((1 / 5 + 2) * values.var(ddof=1))
    assert found.high - found.value == pytest.approx(half, rel=1e-3)
    assert found.is_clear == (half < 0.08)


def test_every_method_of_the_tables_exists_and_has_its_base() -> None:
    assert {name for name in METHODS if name != "auto"} <= set(methods())
    assert joined("uncalibrated", "") == "uncalibrated"
    bases = {"uncalibrated": "", "pb": "uncalibrated", "ts": "uncalibrated", "dirichlet+pb-mlp": "dirichlet"}
    assert {name: base_of(name) for name in bases} == bases


def test_bisection_and_the_operator_agree(tmp_path: Path) -> None:
    problem = paper_problem(16, 40, seed=0)
    torch.testing.assert_close(runtime.bisection(*problem), box_constrained_softmax(*problem))
    times = dict.fromkeys(runtime.SIDES, 1e-3)
    sizes = [(runtime.BATCH, size) for size in runtime.CLASSES] + [
        (size, runtime.WIDTH) for size in runtime.ROWS
    ]
    runtime.plot({"results": [{"rows": n, "classes": k, **times} for n, k in sizes]}, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").exists()
