"""`boxcal monitor`: a log replayed offline gives the numbers of the monitor, whatever file holds it."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from boxcal.app.cli.monitor import _times
from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from tests.app.cli.conftest import Boxcal
from tests.app.tables.sets import arrow, softmax

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


def test_the_numbers_are_those_of_the_test(boxcal: Boxcal, log: Path) -> None:
    found = boxcal("monitor", log, "--json").json
    data = dict(np.load(log))
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
    data = dict(np.load(log))
    order = np.random.default_rng(1).permutation(ROWS)
    labels = pd.Series(data["labels"]).astype("Int64").mask(data["labels"] < 0)
    table = pd.DataFrame({"logits": data["logits"].tolist(), "label": labels, "time": data["time"]}).iloc[
        order
    ]
    table.to_parquet(tmp_path / "log.parquet")
    (tmp_path / "log.arrow").write_bytes(arrow(table))
    dates = [f"{np.datetime64(int(time * 10), 's')}Z" for time in table["time"]]
    dated = table.assign(time=dates, logits=table["logits"].map(json.dumps))
    dated.to_csv(tmp_path / "log.csv", index=False)
    expected = boxcal("monitor", log, "--json").json
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress((tmp_path / "log.csv").read_bytes()))
    for name in ("log.parquet", "log.arrow", "log.csv", "log.csv.gz"):
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
    data, names = dict(np.load(log)), ["cat", "dog", "fox", "hen", "owl"]
    path = tmp_path / "log.csv"
    shares = pd.DataFrame(softmax(data["logits"]), columns=[f"p_{name}" for name in names]).iloc[:, ::-1]
    told = ["" if label < 0 else names[label] for label in data["labels"]]
    ids = [f"a{time}" for time in data["time"]]
    shares.assign(time=data["time"], id=ids, latency=3.5, truth=told).to_csv(path, index=False)
    boxcal("monitor", path, "--label", "truth").refuses(
        "'latency' holds numbers, and no label names it. Leave it out with --ignore latency"
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


def test_weights_are_refused(boxcal: Boxcal, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text("0,1,label,sample_weight\n" + "2.5,-2.0,0,1\n-2.5,2.0,1,9\n" * 20)
    boxcal("monitor", tmp_path / "log.csv").refuses(
        "a column 'sample_weight', which is not read; leave it out"
    )
    found = boxcal("monitor", tmp_path / "log.csv", "--ignore", "sample_weight", "--json").json
    assert found["labels"] == 40


def test_one_column_of_probabilities_is_no_logit(boxcal: Boxcal, tmp_path: Path) -> None:
    shares = np.random.default_rng(0).uniform(size=300)
    rows = "".join(f"{share},{share > 0.5:d}\n" for share in shares)
    (tmp_path / "two.csv").write_text("score,label\n" + rows)
    boxcal("monitor", tmp_path / "two.csv").refuses(
        "one column of scores for two classes, all between 0 and 1"
    )
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


def test_a_label_of_minus_one_may_have_decimals(boxcal: Boxcal, tmp_path: Path) -> None:
    """As pandas writes a column of floats whose gaps were filled."""
    (tmp_path / "log.csv").write_text("0,1,label\n" + "2.5,-2.0,0.0\n-2.5,2.0,1.0\n1.0,-0.5,-1.0\n" * 20)
    found = boxcal("monitor", tmp_path / "log.csv", "--json").json
    assert (found["predictions"], found["labels"]) == (60, 40)


def test_labels_of_numbers_with_gaps_and_texts_of_digits(boxcal: Boxcal, tmp_path: Path) -> None:
    """A label of -1 is none, whatever the names of the classes look like."""
    (tmp_path / "log.csv").write_text("00,01,label\n" + "2.5,-2.0,00\n-2.5,2.0,01\n1.0,-0.5,-1.0\n" * 20)
    found = boxcal("monitor", tmp_path / "log.csv", "--json").json
    assert (found["predictions"], found["labels"]) == (60, 40)
    (tmp_path / "log.csv").write_text("0;1;label\n" + "2,5;-2,0;0,0\n-2,5;2,0;1,0\n" * 20)
    assert boxcal("monitor", tmp_path / "log.csv", "--json").json["labels"] == 40


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_of_nanoseconds_need_no_pandas(zone: str | None) -> None:
    (found,) = _times(pa.array([1_500_001_999], pa.timestamp("ns", zone)))
    assert type(found) is datetime
    assert found.isoformat()[:26] == "1970-01-01T00:00:01.500001"


def test_columns_of_arrays_are_matched_with_the_classes(boxcal: Boxcal, tmp_path: Path) -> None:
    """Named by the array `classes` or the option; an index counts the columns of the file."""
    names, order, labels = np.array(["ant", "bee", "cat"]), [2, 0, 1], np.arange(60) % 3
    saved, path = tmp_path / "saved.safetensors", tmp_path / "log.npz"
    saved.write_bytes(replace(ArrayCalibrator.uncalibrated(3), classes=list(names)).to_bytes())
    scores, own = 3.0 * np.eye(3)[labels][:, order], names[order]
    indices = np.where(labels == 0, -1, np.argsort(order)[labels])
    for known, count in ((names[labels], 60), (indices, 40)):
        np.savez(path, logits=scores, labels=known, classes=own)
        for options in ((), ("--calibrator", saved)):
            found = boxcal("monitor", path, *options, "--json").json
            assert found["labels"] == count
            assert found["metrics"]["nll"] == pytest.approx(0.0949, abs=0.001)
    np.savez(path, logits=scores, labels=names[labels])
    declared = ("--classes", "cat,ant,bee", "--calibrator", saved)
    found = boxcal("monitor", path, *declared, "--json").json
    assert found["metrics"]["nll"] == pytest.approx(0.0949, abs=0.001)
    boxcal("monitor", path, "--classes", "cat,ant,cat").refuses("--classes names a class twice")
    np.savez(path, logits=scores, labels=names[labels], classes=np.array(["x", "y", "z"]))
    boxcal("monitor", path, "--calibrator", saved).refuses(
        "the file has no class 'ant', 'bee', 'cat', but has 'x', 'y', 'z'."
    )


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
def test_one_column_of_arrays_is_the_second_class(
    boxcal: Boxcal, shape: tuple[int, ...], tmp_path: Path
) -> None:
    labels, path = np.arange(60) % 2, tmp_path / "log.npz"
    np.savez(path, logits=np.where(labels, 3.0, -3.0).reshape(shape), labels=labels, note=labels)
    found = boxcal("monitor", path, "--ignore", "note", "--json").json
    assert found["metrics"]["nll"] == pytest.approx(0.0486, abs=0.001)


def test_refits_are_replayed(boxcal: Boxcal, log: Path) -> None:
    found = boxcal("monitor", log, "--json", "--refit").json
    kinds = [one["kind"] for one in found["decisions"]]
    assert [kind for kind in kinds if kind != "material_alarm"][:5] == [
        "alarm", "refit", "candidate", "duel_won", "activated",
    ]  # fmt: skip
    assert found["calibrator"]["version"] >= 1
    assert "Version 1 was activated; its test begins anew." in [one["sentence"] for one in found["decisions"]]


def test_a_calibrator_its_data_and_a_plot(boxcal: Boxcal, log: Path, tmp_path: Path) -> None:
    data = dict(np.load(log))
    late = slice(CHANGE, None)
    known = data["labels"][late] >= 0
    logits, labels = data["logits"][late][known], data["labels"][late][known]
    (tmp_path / "ts.safetensors").write_bytes(fit("ts", logits, labels).calibrator.to_bytes())
    np.savez(tmp_path / "late.npz", logits=logits, labels=labels)
    shown = boxcal(
        "monitor", tmp_path / "late.npz", "--calibrator", tmp_path / "ts.safetensors",
        "--validation", tmp_path / "late.npz", "--plot", tmp_path / "plot.svg",
    )  # fmt: skip
    assert shown.code == 0
    assert "calibrator ts was tested on" in shown.stdout
    assert (
        "late.npz: serious: about 100% of the rows are among those that the calibrator was fitted"
        in shown.stderr
    )
    assert "strict       no" in shown.stdout
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    assert boxcal("monitor", log, "--plot", tmp_path / "plot.png").code == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    boxcal("monitor", log, "--plot", tmp_path / "a.pdf").refuses("is no .svg or .png file")
    (tmp_path / "three.safetensors").write_bytes(Calibrator.uncalibrated(3).to_bytes())
    wrong = boxcal("monitor", log, "--calibrator", tmp_path / "three.safetensors")
    wrong.refuses("of 3 classes, but the log has logits of 5")
    for classes, label, reason in ((3, 0, "has 3 classes, but the log has 5"), (5, -1, "has no labels")):
        np.savez(tmp_path / "other.npz", logits=np.zeros((2, classes)), labels=[label, label])
        boxcal("monitor", log, "--validation", tmp_path / "other.npz").refuses(reason)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"logits": [[0.0, 1.0]]}, "needs `labels`, and `logits` or `probabilities`; it holds `logits`."),
        ({"logits": [[0.0, 9.0]], "label": [2]}, "labels[0] is 2; class indices go from 0 to 1, and -1"),
        ({"logits": [[0.0, 9.0]], "label": [0.5]}, "labels[0] is 0.5; class indices are integers"),
        ({"logits": [[0.0, np.nan]], "label": [0]}, "logits[0, 1] is nan; every value must be finite"),
        (
            {"logits": [[[0.0, 1.0]]], "label": [0]},
            "must hold numbers (N, K), got float64 of shape (1, 1, 2)",
        ),
        ({"logits": [[0.2, 0.8]] * 9, "labels": [0] * 9}, "The scores look like probabilities"),
        ({"probabilities": [[0.5, 0.6]], "label": [0]}, "probabilities[0] sums to 1.1; the probabilities"),
        ({"logits": [[0.0, 9.0]], "label": [0, 1]}, "`logits` has 1 rows, but `labels` has 2 values"),
        ({"logits": [[0.0, 9.0]], "label": [[0, 1]]}, "which looks like a one-hot encoding"),
        ({"logits": [[0.0, 9.0]], "label": ["cat"]}, "labels[0] is 'cat', the class names are not known"),
        (
            {"logits": [[0.0, 9.0]], "label": [0], "foo": [0]},
            "log.npz: The .npz has an array 'foo', which is not read; leave it out with --ignore foo.",
        ),
        ({"logits": [[0.0, 9.0]], "label": [0], "sample_weight": [0]}, "an array 'sample_weight', which is"),
        ({"logits": [[0.0, 9.0]], "label": [0], "tme": [0]}, "not read; did you mean 'time'? Leave it out"),
        ({"logits": [[0.0, 9.0]], "label": [0], "classes": ["a", "a"]}, "`classes` names a class twice."),
        ({"logits": [[0.0, 9.0]], "label": [0], "classes": ["a"]}, "names 1 classes, and `logits` has 2"),
        (
            {"logits": [[0.0, 9.0]], "label": [0], "classes": [0.0, 1.0]},
            "`classes` must hold names or integers, got the dtype float64.",
        ),
        ({"logits": [[0.0, 9.0]], "label": [0], "time": [np.nan]}, "time[0] is missing"),
        (
            {"logits": [[0.0, 9.0]], "label": [0], "time": ["noon"]},
            "time[0] is 'noon', no number and no date",
        ),
        (
            {"logits": [[0.0, 9.0]] * 2, "label": [0, 0], "time": np.array(["2026-01-01", "NaT"], "M8[s]")},
            "time[1] is missing",
        ),
        ({"logits": [[0.0, 9.0]], "label": [0], "time": ["nan"]}, "time[0] is 'nan'; a time must be finite"),
        ({"logits": [[0.0, 9.0]], "label": [0], "time": [np.inf]}, "time[0] is inf; a time must be finite"),
    ],
)
def test_what_is_no_log_is_refused(
    boxcal: Boxcal, tmp_path: Path, columns: dict[str, Any], message: str
) -> None:
    values: dict[str, Any] = {name: np.array(value) for name, value in columns.items()}
    np.savez(tmp_path / "log.npz", **values)
    boxcal("monitor", tmp_path / "log.npz").refuses(message)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("log.txt", b"some words\n", ".csv or .json of records: it begins with b'some', and its first line"),
        ("log.csv", "id,label\n".encode("utf-16"), "it is text in UTF-16; save it in UTF-8."),
        ("log.csv.gz", gzip.compress(b"a,label\n" * 99)[:-9], "log.csv.gz: The file is no readable .gz: "),
        ("log.csv", b"logits,label\n", "has no rows"),
        ("log.csv", b"cat,dog,label\n", "log.csv: The table has no rows."),
        ("log.csv", b"cat,dog,label\n0,1,1\n", "The table needs a column `logits` or `probabilities`, or"),
        ("log.csv", b"logits,label\nzero,1\n", "logits[0] is 'zero'; it is a number"),
        (
            "log.arrow",
            arrow(pd.DataFrame({"logits": [[0.0, 9.0]], "label": [[0, 1]]})),
            "`label` must hold class indices or names, got list<",
        ),
        ("broken.npz", b"PK", "is no readable"),
        ("broken.parquet", b"PK", "is no readable"),
    ],
)
def test_files_of_other_kinds_are_refused(
    boxcal: Boxcal, tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    (tmp_path / name).write_bytes(content)
    boxcal("monitor", tmp_path / name).refuses(says)
