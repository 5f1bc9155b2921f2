"""`boxcal monitor`: a log replayed offline gives the numbers of the monitor, whatever file holds it."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from tests.app.cli.conftest import Boxcal
from tests.app.tables.sets import softmax

ROWS, CHANGE = 4000, 1500


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers that are too confident from row 1,500 on; a tenth of the rows has no label."""
    random = np.random.default_rng(0)
    logits = random.normal(size=(ROWS, 5))
    logits[np.arange(ROWS), random.integers(0, 5, ROWS)] += random.exponential(4.0, ROWS)
    logits = np.round(32.0 * logits) / 32.0  # stored without an error
    temperature = np.where(np.arange(ROWS) < CHANGE, 1.0, 2.0)[:, None]
    labels = (logits / temperature + random.gumbel(size=logits.shape)).argmax(axis=1)
    labels[random.random(ROWS) < 0.1] = -1
    path = tmp_path_factory.mktemp("log") / "log.npz"
    np.savez(path, logits=logits, labels=labels, time=np.arange(ROWS) / 10)
    return path


def arrays(log: Path) -> dict[str, Any]:
    with np.load(log) as archive:
        return dict(archive)


def test_the_numbers_are_those_of_the_test(boxcal: Boxcal, log: Path) -> None:
    found = boxcal("monitor", log, "--json").json
    data = arrays(log)
    test = CalibrationTest(5)
    for row, label in zip(softmax(data["logits"])[:, None], data["labels"], strict=True):
        if label < 0:
            test.observe(row)
        else:
            test.update(row, np.array([label]))
    assert found["labels"] == test.count
    assert found["alarms"]["strict"]["log_evidence"] == pytest.approx(test.log_evidence[0], rel=1e-9)
    assert found["alarms"]["strict"]["largest_log_evidence"] == pytest.approx(test.largest[0], rel=1e-9)
    assert found["diagnosis"]["since"] == test.diagnosis().since
    assert found["diagnosis"]["began_at"] == pytest.approx(CHANGE / 10, abs=20)
    assert [one["kind"] for one in found["decisions"]] == ["alarm", "material_alarm"]


def test_every_form_of_the_log_gives_the_same_numbers(boxcal: Boxcal, log: Path, tmp_path: Path) -> None:
    data = arrays(log)
    order = np.random.default_rng(1).permutation(ROWS)
    columns = {name: data[name][order] for name in ("logits", "labels", "time")}
    labels: list[int | None] = [None if label < 0 else int(label) for label in columns["labels"]]
    table = {"logits": columns["logits"].tolist(), "label": labels, "time": columns["time"].tolist()}
    parquet.write_table(pa.table(table), tmp_path / "log.parquet")
    with pa.ipc.new_file(tmp_path / "log.arrow", pa.table(table).schema) as writer:
        writer.write_table(pa.table(table))
    with (tmp_path / "log.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time", "logits", "label"])
        for time, row, label in zip(table["time"], table["logits"], labels, strict=True):
            writer.writerow(
                [f"{np.datetime64(int(time * 10), 's')}Z", json.dumps(row), "" if label is None else label]
            )
    expected = boxcal("monitor", log, "--json").json
    for name in ("log.parquet", "log.arrow", "log.csv"):
        found = boxcal("monitor", tmp_path / name, "--json").json
        for part in (expected, found):
            part["diagnosis"]["began_at"] = None
        assert found == expected
    np.savez(tmp_path / "p.npz", probabilities=softmax(data["logits"]), label=data["labels"])
    found = boxcal("monitor", tmp_path / "p.npz", "--json").json
    assert found["alarms"]["strict"]["log_evidence"] == pytest.approx(
        expected["alarms"]["strict"]["log_evidence"], rel=0.01
    )


def test_a_table_has_a_column_per_class_as_other_commands_read_it(
    boxcal: Boxcal, log: Path, tmp_path: Path
) -> None:
    """Named labels, empty where there is none; columns in another order; a number and a text left out."""
    data, names = arrays(log), ["cat", "dog", "fox", "hen", "owl"]
    path = tmp_path / "log.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time", "id", "latency", *(f"p_{name}" for name in reversed(names)), "truth"])
        for time, row, label in zip(data["time"], softmax(data["logits"]), data["labels"], strict=True):
            told = "" if label < 0 else names[label]
            writer.writerow([time, f"a{time}", 3.5, *map(repr, row[::-1].tolist()), told])
    refused = boxcal("monitor", path, "--label", "truth")
    assert refused.code == 2
    assert "'latency' holds numbers, and no label names it. Leave it out with --ignore latency" in " ".join(
        refused.stderr.split()
    )
    declared = ("--label", "truth", "--ignore", "latency", "--scores", "probabilities")
    found = boxcal("monitor", path, *declared, "--json").json
    expected = boxcal("monitor", log, "--json").json
    assert (found["labels"], found["predictions"]) == (expected["labels"], ROWS)
    evidence = [one["alarms"]["strict"]["log_evidence"] for one in (found, expected)]
    assert evidence[0] == pytest.approx(evidence[1], rel=0.01)
    known = data["labels"] >= 0
    skewed = data["logits"] + np.arange(5.0)  # its offsets belong to the right columns, or the NLL is far off
    calibrator = fit("vector", skewed[known], data["labels"][known]).on_arrays
    saved, named = tmp_path / "vector.safetensors", tmp_path / "named.safetensors"
    saved.write_bytes(calibrator.to_bytes())
    named.write_bytes(replace(calibrator, classes=names).to_bytes())
    found = boxcal("monitor", path, *declared, "--calibrator", named, "--json").json["metrics"]["nll"]
    expected = boxcal("monitor", log, "--calibrator", saved, "--json").json["metrics"]["nll"]
    assert found == pytest.approx(expected, rel=0.01)


def test_one_column_of_probabilities_is_no_logit(boxcal: Boxcal, tmp_path: Path) -> None:
    shares = np.random.default_rng(0).uniform(size=300)
    rows = "".join(f"{share},{share > 0.5:d}\n" for share in shares)
    (tmp_path / "two.csv").write_text("score,label\n" + rows)
    refused = boxcal("monitor", tmp_path / "two.csv")
    assert refused.code == 2
    assert "one column of scores for two classes, all between 0 and 1" in " ".join(refused.stderr.split())
    found = boxcal("monitor", tmp_path / "two.csv", "--scores", "probabilities", "--json").json
    expected = -np.log(np.maximum(shares, 1 - shares)).mean()
    assert found["metrics"]["nll"] == pytest.approx(expected, rel=0.01)


def test_minus_one_is_a_class_where_the_other_is_one(boxcal: Boxcal, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    score = np.round(random.normal(size=600), 3)
    label = np.where(score + random.logistic(size=600) > 0, 1, -1)
    rows = "".join(f"{-one},{one},{name}\n" for one, name in zip(score / 2, label, strict=True))
    (tmp_path / "two.csv").write_text("-1,1,label\n" + rows)
    found = boxcal("monitor", tmp_path / "two.csv", "--json").json
    assert found["labels"] == 600
    assert found["metrics"]["error_rate"] == pytest.approx((np.sign(score) != label).mean(), abs=0.01)


def test_refits_are_replayed(boxcal: Boxcal, log: Path) -> None:
    found = boxcal("monitor", log, "--json", "--refit").json
    kinds = [one["kind"] for one in found["decisions"]]
    assert [kind for kind in kinds if kind != "material_alarm"][:5] == [
        "alarm", "refit", "candidate", "duel_won", "activated",
    ]  # fmt: skip
    assert found["calibrator"]["version"] >= 1
    assert "Version 1 was activated; its test begins anew." in [one["sentence"] for one in found["decisions"]]


def test_a_calibrator_its_data_and_a_plot(boxcal: Boxcal, log: Path, tmp_path: Path) -> None:
    data = arrays(log)
    late = slice(CHANGE, None)
    known = data["labels"][late] >= 0
    logits, labels = data["logits"][late][known], data["labels"][late][known]
    np.savez(tmp_path / "validation.npz", logits=logits, labels=labels)
    (tmp_path / "ts.safetensors").write_bytes(fit("ts", logits, labels).calibrator.to_bytes())
    np.savez(tmp_path / "late.npz", logits=logits, labels=labels)
    shown = boxcal(
        "monitor", tmp_path / "late.npz", "--calibrator", tmp_path / "ts.safetensors",
        "--validation", tmp_path / "validation.npz", "--plot", tmp_path / "plot.svg",
    )  # fmt: skip
    assert shown.code == 0
    assert "calibrator ts was tested on" in shown.stdout
    assert "strict       no" in shown.stdout
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    assert boxcal("monitor", log, "--plot", tmp_path / "plot.png").code == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "three.safetensors").write_bytes(Calibrator.uncalibrated(3).to_bytes())
    wrong = boxcal("monitor", log, "--calibrator", tmp_path / "three.safetensors")
    assert wrong.code == 2
    assert "of 3 classes, but the log has logits of 5" in wrong.stderr
    for classes, label, reason in ((3, 0, "has 3 classes, but the log has 5"), (5, -1, "has no labels")):
        np.savez(tmp_path / "other.npz", logits=np.zeros((2, classes)), labels=[label, label])
        refused = boxcal("monitor", log, "--validation", tmp_path / "other.npz")
        assert refused.code == 2
        assert reason in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"logits": [[0.0, 1.0]]}, "needs `labels`, and `logits` or `probabilities`; it holds `logits`."),
        ({"logits": [[0.0, 9.0]], "label": [2]}, "labels[0] is 2; class indices go from 0 to 1, and -1"),
        ({"logits": [[0.0, 9.0]], "label": [0.5]}, "labels[0] is 0.5; class indices are integers"),
        ({"logits": [[0.0, np.nan]], "label": [0]}, "logits[0, 1] is nan; every value must be finite"),
        ({"logits": [0.0, 1.0], "label": [0, 1]}, "must hold numbers (N, K), got float64 of shape (2,)"),
        ({"logits": [[0.2, 0.8]] * 9, "labels": [0] * 9}, "`logits` look like probabilities"),
        ({"probabilities": [[0.5, 0.6]], "label": [0]}, "probabilities[0] sums to 1.1; the probabilities"),
        ({"logits": [[0.0, 9.0]], "label": [0, 1]}, "`logits` has 1 rows, but `labels` has 2 values"),
        ({"logits": [[0.0, 9.0]], "label": [[0, 1]]}, "which looks like a one-hot encoding"),
        ({"logits": [[0.0, 9.0]], "label": ["cat"]}, "labels[0] is 'cat', the class names are not known"),
        ({"logits": [[0.0, 9.0]], "label": [0], "time": [np.nan]}, "time[0] is missing"),
        (
            {"logits": [[0.0, 9.0]], "label": [0], "time": ["noon"]},
            "time[0] is 'noon', no number and no date",
        ),
    ],
)
def test_what_is_no_log_is_refused(
    boxcal: Boxcal, tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    values: dict[str, Any] = {name: np.array(value) for name, value in columns.items()}
    np.savez(tmp_path / "log.npz", **values)
    ended = boxcal("monitor", tmp_path / "log.npz")
    assert ended.code == 2
    assert message in " ".join(ended.stderr.split())


def test_files_of_other_kinds_are_refused(boxcal: Boxcal, log: Path, tmp_path: Path) -> None:
    text = tmp_path / "log.txt"
    text.write_text("some words\n")
    assert "is no .npz, .parquet, .arrow, .csv or .json of records" in boxcal("monitor", text).stderr
    empty = text.rename(tmp_path / "log.csv")
    empty.write_text("logits,label\n")
    assert "has no rows" in boxcal("monitor", empty).stderr
    empty.write_text("cat,dog,label\n0,1,1\n")
    assert "The table needs a column `logits` or `probabilities`, or" in boxcal("monitor", empty).stderr
    empty.write_text("logits,label\nzero,1\n")
    assert "logits[0] is 'zero'; it is a number" in boxcal("monitor", empty).stderr
    lists = pa.table({"logits": [[0.0, 9.0]], "label": [[0, 1]]})
    with pa.ipc.new_file(tmp_path / "lists.arrow", lists.schema) as writer:
        writer.write_table(lists)
    shown = boxcal("monitor", tmp_path / "lists.arrow").stderr
    assert "The column `label` must hold class indices or names, got list<" in " ".join(shown.split())
    for name in ("broken.npz", "broken.parquet"):
        (tmp_path / name).write_bytes(b"PK")
        assert "is no readable" in boxcal("monitor", tmp_path / name).stderr
    assert "is no .svg or .png file" in boxcal("monitor", log, "--plot", tmp_path / "a.pdf").stderr
