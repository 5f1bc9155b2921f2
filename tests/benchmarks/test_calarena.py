"""The comparison of calibrators: what counts as an opponent, ties, and a method that a set cannot have."""

from itertools import islice
from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.calarena import experiments, log_losses, published, table, win_rate

ROWS = [
    {"uncalibrated": 0.5, "auto": 0.2, "sms": 0.3, "SMS": 0.3, "TS": 0.4},
    {"uncalibrated": 0.4, "auto": 0.4, "sms": 0.2, "SMS": 0.5, "TS": 0.3},
]


def figures(*without: str) -> dict[str, list[float]]:
    kept = [{name: loss for name, loss in row.items() if name not in without} for row in ROWS]
    rows = [{"losses": row, "seconds": dict.fromkeys(row, 2.0) | {"sms": 1.0}} for row in kept]
    lines = [line.strip("| ").split(" | ") for line in table(rows).splitlines()[2:]]
    return {name: [float(one) for one in rest] for name, *rest in lines}


def test_methods_are_compared_with_calarenas_and_not_with_each_other() -> None:
    """Of six duels with `uncalibrated`, `SMS` and `TS`, `auto` wins four and draws one."""
    assert figures()["auto"] == [0.75, 0.3, 0.1, 0, 2]
    assert figures()["SMS"] == [0.5, 0.4, 0.2, 50, 2]
    # Without any of CalArena's, against `uncalibrated` and `sms`.
    assert figures("SMS", "TS")["auto"][0] == 0.625


def test_a_method_that_fitted_no_set_is_in_no_duel() -> None:
    assert win_rate(np.array([1.0, 2.0]), np.array([[1.0, 3.0], [0.0, np.nan]])) == 0.5
    found = win_rate(np.array([1.0, np.nan]), np.array([[2.0], [3.0]]))
    assert found == pytest.approx(1.0)


def test_the_files_and_results_of_calarena_are_read(tmp_path: Path) -> None:
    (tmp_path / "calibration_benchmarks").mkdir()
    results = tmp_path / "results" / "cv-binary"
    results.mkdir(parents=True)
    with pytest.raises(SystemExit, match=rf"{tmp_path} has no calibration_benchmarks/\*.h5"):
        list(published(tmp_path))
    with h5py.File(tmp_path / "calibration_benchmarks" / "cv-binary.h5", "w") as file:
        for part, probabilities in (("cal", [0.75, 0.5]), ("test", [0.0, 0.25, 1.0])):
            file[f"c10/lenet/probas_{part}"] = np.array(probabilities, np.float32)
            file[f"c10/lenet/labels_{part}"] = np.array([1, 0, 1][: len(probabilities)], np.int32)
    for name, loss in (("Base-model", "0.5"), ("Beta", "0.25"), ("Kernel", "")):
        text = f"dataset,model,{name}_logloss,{name}_time\nc10,lenet,{loss},1\nc10,other,9.0,1\n"
        (results / f"{name}.csv").write_text(text)
    ((family, split, losses),) = published(tmp_path)
    assert (family, split.name, losses) == ("cv-binary", "c10/lenet", {"uncalibrated": 0.5, "Beta": 0.25})
    np.testing.assert_allclose(np.exp(split.logits), [[0.25, 0.75], [0.5, 0.5]])
    # A probability of 0 is the smallest float32, as in the losses that CalArena publishes.
    assert split.test_logits[0, 1] == pytest.approx(-87.3365)
    np.testing.assert_array_equal(split.test_labels, [1, 0, 1])
    zero = np.array([[1.0, 0.0], [0.75, 0.25]])
    np.testing.assert_allclose(log_losses(zero, split.labels), [87.3365, 0.28768], rtol=1e-4)


def test_a_set_is_fitted_by_several_sizes_and_as_two_groups_of_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(60, 5)), np.arange(60) % 5
    (tmp_path / "five").mkdir()
    np.savez(tmp_path / "five" / "val.npz", logits=logits, labels=labels)
    found = list(islice(experiments([tmp_path], 1, [12, 500]), 4))
    assert [(one.name, one.logits.shape) for one in found] == [
        ("five/12", (12, 5)),
        ("five/30", (30, 5)),
        ("five/12", (12, 2)),
        ("five/30", (30, 2)),
    ]
    many, two = found[1], found[3]
    assert len(np.unique(np.concatenate([many.logits, many.test_logits]), axis=0)) == 60
    np.testing.assert_array_equal(two.labels, many.labels >= 2)
    odds = np.exp(many.logits[:, 2:]).sum(axis=1) / np.exp(many.logits[:, :2]).sum(axis=1)
    np.testing.assert_allclose(two.logits[:, 1] - two.logits[:, 0], np.log(odds))
