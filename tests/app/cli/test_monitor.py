"""`boxcal monitor`: a log replayed offline gives the numbers of the monitor, whatever file holds it."""

from __future__ import annotations

import csv
import json
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
    with (tmp_path / "log.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["time", "logits", "label"])
        for time, row, label in zip(table["time"], table["logits"], labels, strict=True):
            writer.writerow(
                [np.datetime64(int(time * 10), "s"), json.dumps(row), "" if label is None else label]
            )
    expected = boxcal("monitor", log, "--json").json
    for name in ("log.parquet", "log.csv"):
        found = boxcal("monitor", tmp_path / name, "--json").json
        for part in (expected, found):
            part["diagnosis"]["began_at"] = None
        assert found == expected
    np.savez(tmp_path / "p.npz", probabilities=softmax(data["logits"]), label=data["labels"])
    found = boxcal("monitor", tmp_path / "p.npz", "--json").json
    assert found["alarms"]["strict"]["log_evidence"] == pytest.approx(
        expected["alarms"]["strict"]["log_evidence"], rel=0.01
    )


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
        ({"logits": [[0.0, 1.0]]}, "has the columns logits; it needs label"),
        ({"logits": [[0.0, 1.0]], "label": [2]}, "row 0: label 2 is not one of 2 classes"),
        ({"logits": [[0.0, 1.0]], "label": [0.5]}, "row 0: label 0.5 is not one of 2 classes"),
        ({"logits": [[0.0, np.nan]], "label": [0]}, "row 0: logits are not finite"),
        ({"logits": [0.0, 1.0], "label": [0, 1]}, "logits has shape (2,), not (N, K)"),
        ({"probabilities": [[0.5, 0.6]], "label": [0]}, "probabilities[0] sums to 1.1; the probabilities"),
        ({"logits": [[0.0, 1.0]], "label": [0, 1]}, "has 1 rows of logits, but 2 labels"),
        ({"logits": [[0.0, 1.0]], "label": ["cat"]}, "row 0: label 'cat' is no number"),
        ({"logits": [[0.0, 1.0]], "label": [0], "time": [np.nan]}, "row 0: the time is missing"),
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
    assert "is no .npz, .parquet, .arrow or .csv file" in boxcal("monitor", text).stderr
    empty = text.rename(tmp_path / "log.csv")
    empty.write_text("logits,label\n")
    assert "has no rows" in boxcal("monitor", empty).stderr
    empty.write_text("cat,dog,label\n0,1,1\n")
    assert "the columns `cat`, `dog`, `label`; it needs `logits` or" in boxcal("monitor", empty).stderr
    empty.write_text("logits,label\nzero,1\n")
    assert "logits[0] is 'zero', no list of numbers" in boxcal("monitor", empty).stderr
    for name in ("broken.npz", "broken.parquet"):
        (tmp_path / name).write_bytes(b"PK")
        assert "is no readable" in boxcal("monitor", tmp_path / name).stderr
    assert "is no .svg or .png file" in boxcal("monitor", log, "--plot", tmp_path / "a.pdf").stderr
