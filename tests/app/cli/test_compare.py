"""`boxcal compare`: many methods side by side, to the terminal, Markdown, CSV and JSON."""

import csv
from pathlib import Path

import numpy as np
import pytest

from boxcal.app.cli import output
from boxcal.calibrators import methods
from boxcal.models.backends.backbone import OpenBackbone
from boxcal.models.digits_data import load_digits_split
from boxcal.models.loading.specifications import load_backbone
from tests.app.cli.conftest import Boxcal
from tests.app.fitting.validation_data import overconfident

METHODS = ("--method", "ts", "--method", "pb")


@pytest.fixture(scope="module")
def test_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("test") / "test.npz"
    logits, labels = overconfident(seed=1)
    np.savez(path, logits=logits, labels=labels)
    return path


def test_methods_side_by_side(boxcal: Boxcal, validation_file: Path, test_file: Path, tmp_path: Path) -> None:
    markdown, numbers = tmp_path / "table.md", tmp_path / "table.csv"
    written = ("--json", "--markdown", markdown, "--csv", numbers)
    ended = boxcal("compare", validation_file, "--test", test_file, *METHODS, *written)
    assert ended.code == 0
    rows = {row["method"]: row["metrics"] for row in ended.json["methods"]}
    assert rows.keys() == {"uncalibrated", "ts", "pb"}
    assert rows["ts"]["nll"]["value"] < rows["uncalibrated"]["nll"]["value"]
    assert "| `ts` |" in markdown.read_text()
    lines = numbers.read_text().splitlines()
    read = {(r["method"], r["metric"]): float(r["value"]) for r in csv.DictReader(lines)}
    assert read["ts", "nll"] == rows["ts"]["nll"]["value"]
    assert str(markdown) in ended.stderr


def test_rows_that_methods_were_fitted_to_do_not_judge_them(boxcal: Boxcal, validation_file: Path) -> None:
    shown = boxcal("compare", validation_file, "--test", validation_file, "--method", "ts", "--json")
    assert "serious: about 100% of the rows are among those that the methods are fitted to" in shown.stderr
    (warning,) = shown.json["warnings"]
    assert {
        "file": validation_file.name,
        "code": "known_rows",
        "severity": "serious",
    }.items() <= warning.items()


def test_the_table_fits_80_columns(boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output.screen(), "width", 80)
    logits, labels = overconfident(60, 3)
    np.savez(tmp_path / "small.npz", logits=logits, labels=labels)
    shown = boxcal("compare", tmp_path / "small.npz", "--method", "mix+dirichlet").stdout
    lines = shown.splitlines()
    # Three more columns are left for the longest name, "dirichlet+pb-mlp".
    assert lines[2] == "method          Error %   smECE %   emECE %   ewECE %        NLL      Brier"
    names = [line.split(" ")[0] for line in lines[3:6]]
    assert names == ["uncalibrated", "dirichlet", "mix+dirichlet"]
    assert max(map(len, lines[2:6])) <= 80 + len("mix+dirichlet") - max(map(len, methods()))
    assert max(map(len, lines[6:])) <= 80


def test_a_wide_terminal_shows_standard_errors(
    boxcal: Boxcal, validation_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output.screen(), "width", 140)
    shown = boxcal("compare", validation_file, *METHODS).stdout
    assert "cross-fitted in 5 folds" in shown
    assert {"uncalibrated", "ts", "pb"} <= {line.split(" ")[0] for line in shown.splitlines()}
    assert "standard error is in brackets" in shown
    assert "(" in shown.splitlines()[3]


def test_an_unknown_method_is_told_before_anything_is_fitted(boxcal: Boxcal, validation_file: Path) -> None:
    ended = boxcal("compare", validation_file, "--method", "tss")
    ended.refuses("boxcal: error: no method 'tss'; did you mean 'ts'? There are auto, ")
    assert not ended.stdout


def test_methods_that_read_features_take_them_from_the_file(boxcal: Boxcal, tmp_path: Path) -> None:
    backbone, split = load_backbone("digits"), load_digits_split()
    assert isinstance(backbone, OpenBackbone)
    features, logits = (ask(split.validation.levels) for ask in (backbone.features, backbone))
    labels = split.validation.labels
    np.savez(tmp_path / "digits.npz", features=features, logits=logits, labels=labels)
    np.savez(tmp_path / "foreign.npz", features=features[::-1], logits=logits, labels=labels)

    shown = boxcal("compare", tmp_path / "digits.npz", "--method", "fc", "--json")
    assert [row["method"] for row in shown.json["methods"]] == ["uncalibrated", "fc"]
    without = boxcal("compare", tmp_path / "foreign.npz", "--method", "fc", "--json")
    assert list(without.json["left_out"]) == ["fc"]
    assert "does not make logits[0] of features[0]" in without.stderr

    saved = tmp_path / "fc.safetensors"
    boxcal("fit", tmp_path / "digits.npz", "--method", "fc", "--output", saved)
    judged = boxcal("evaluate", tmp_path / "digits.npz", "--calibrator", saved, "--json").json
    assert judged["metrics"]["nll"]["difference"]["high"] < 0
    boxcal("evaluate", tmp_path / "foreign.npz", "--calibrator", saved).refuses("features")
