"""`boxcal predict SOURCE --output FILE.parquet`: rows and images in parts, which a later run continues."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from scipy.special import softmax

from boxcal.app.cli import bulk
from boxcal.app.cli.output import UsageError
from boxcal.app.tables.labels import Declared
from boxcal.calibrators import Bounds, Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.models.digits_data import load_digits_split
from boxcal.models.loading import load_backbone
from tests.app.cli.conftest import Boxcal

LOGITS = np.random.default_rng(3).normal(size=(50, 3)) * 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "ROWS", 5)
    monkeypatch.setattr(bulk, "IMAGES", 4)
    monkeypatch.setenv("BOXCAL_MODEL", "logits:3")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    fitted = fit("ts", LOGITS, LOGITS.argmax(axis=1)).calibrator
    path = tmp_path / "ts.safetensors"
    path.write_bytes(fitted.to_bytes())
    return path


def source(tmp_path: Path, **columns: Any) -> Path:
    path = tmp_path / "in.parquet"
    pq.write_table(pa.table(columns or {"logits": list(LOGITS)}), path)
    return path


def test_rows_are_calibrated_within_bounds(tmp_path: Path, saved: Path) -> None:
    output = tmp_path / "out.parquet"
    assert bulk.run(source(tmp_path), output, lower=None, upper=0.6, calibrator=str(saved)) == 50
    found = pq.read_table(output).to_pydict()
    upper = Bounds(torch.zeros(3).double(), torch.full((3,), 0.6, dtype=torch.float64))
    expected = Calibrator.from_bytes(saved.read_bytes()).calibrate(torch.from_numpy(LOGITS), upper)
    np.testing.assert_array_equal(found["probabilities"], expected.probabilities.numpy())
    assert found["index"] == LOGITS.argmax(axis=1).tolist()
    assert found["label"] == [str(index) for index in found["index"]]
    assert not list(tmp_path.glob("*.parts"))


def test_probabilities_and_columns_by_class_give_the_same(tmp_path: Path) -> None:
    shares = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    outputs = []
    kinds: dict[str, dict[str, Any]] = {
        "lists": {"probabilities": list(shares)},
        "logits": {"logits": list(LOGITS)},
        "by class": {str(index): LOGITS[:, index] for index in (2, 0, 1)},
    }
    for name, columns in kinds.items():
        output = tmp_path / f"{name}.parquet"
        bulk.run(source(tmp_path, **columns), output, lower=None, upper=None, calibrator=None)
        outputs.append(np.array(pq.read_table(output)["probabilities"].to_pylist()))
    np.testing.assert_allclose(outputs[0], shares, atol=1e-12)
    np.testing.assert_allclose(outputs[1], shares, atol=1e-12)
    np.testing.assert_array_equal(outputs[1], outputs[2])


def test_other_columns_are_kept(tmp_path: Path) -> None:
    """Of every type; of CSV as they are written. Not the true label, nor what the output has itself."""
    ids = [f"{n:03d}" for n in range(50)]
    sites = [pa.array(["rome", "oslo"] * 10), pa.array(["oslo", "bern", "rome"] * 10)]
    columns = {
        "id": ids,
        "logits": list(LOGITS),
        "label": [9] * 50,
        "index": [8] * 50,
        "site": pa.chunked_array([one.dictionary_encode() for one in sites]),
        "amounts": [[n, n + 0.5] for n in range(50)],
    }
    table, out = pa.table(columns), tmp_path / "out.parquet"
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=20)
    with pa.ipc.new_stream(tmp_path / "in.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("in.parquet", "in.arrow"):
        bulk.run(tmp_path / name, out, lower=None, upper=None, calibrator=None)
        found = pq.read_table(out)
        assert found.column_names == [
            "id",
            "site",
            "amounts",
            "label",
            "index",
            "probability",
            "probabilities",
        ]
        assert found["index"].to_pylist() == LOGITS.argmax(axis=1).tolist()
        assert found.select(["id", "site", "amounts"]).to_pydict() == {
            name: table[name].to_pylist() for name in ("id", "site", "amounts")
        }
    rows = pa.table({"id": ids, "no": range(50)} | {str(k): LOGITS[:, k] for k in range(3)})
    pacsv.write_csv(rows, tmp_path / "in.csv")
    declared = Declared(ignore=("id", "no"))
    bulk.run(tmp_path / "in.csv", out, lower=None, upper=None, calibrator=None, declared=declared)
    found = pq.read_table(out)
    assert found["id"].to_pylist() == ids
    assert found["no"].to_pylist() == [str(n) for n in range(50)]
    assert found["index"].to_pylist() == LOGITS.argmax(axis=1).tolist()


SHARES = softmax(LOGITS, axis=1)
ORDER = [2, 0, 1]
ARRAYS: dict[str, Any] = {
    "npy": LOGITS,
    "npy, big endian": LOGITS.astype(">f8"),
    "logits": {"logits": LOGITS, "labels": LOGITS.argmax(axis=1)},
    "probabilities": {"probabilities": SHARES, "groups": np.arange(50)},
    "named classes": {"probabilities": SHARES[:, ORDER], "classes": np.array(list("012"))[ORDER]},
}


def saved_arrays(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / ("in.npz" if isinstance(content, dict) else "in.npy")
    if isinstance(content, dict):
        np.savez_compressed(path, **content)
    else:
        np.save(path, content)
    return path


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays_are_read_as_fits_read_them(kind: str, tmp_path: Path) -> None:
    given, output = saved_arrays(tmp_path, ARRAYS[kind]), tmp_path / "out.parquet"
    assert bulk.run(given, output, lower=None, upper=None, calibrator=None) == 50
    found = np.array(pq.read_table(output)["probabilities"].to_pylist())
    np.testing.assert_allclose(found, SHARES, atol=1e-12)


def test_one_score_of_two_classes_in_an_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOXCAL_MODEL", "logits:2")
    output = tmp_path / "out.parquet"
    for content in ({"probabilities": SHARES[:, 1]}, np.log(SHARES[:, 1:2] / (1 - SHARES[:, 1:2]))):
        given = saved_arrays(tmp_path, content)
        bulk.run(given, output, lower=None, upper=None, calibrator=None)
        found = np.array(pq.read_table(output)["probabilities"].to_pylist())
        np.testing.assert_allclose(found[:, 1], SHARES[:, 1], atol=1e-9)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SHARES, "`logits` look like probabilities: .* Set --scores probabilities"),
        ({"labels": LOGITS}, "must hold either `logits` or `probabilities`; it holds `labels`"),
        ({"logits": LOGITS, "probabilities": SHARES}, "it holds `logits`, `probabilities`"),
        (np.zeros((2, 3, 4)), r"`logits` must be numbers \(N, K\), got float64 of the shape \(2, 3, 4\)"),
        (np.array([["a"] * 3]), "got <U1 of the shape"),
        (np.array([[None] * 3]), r"no readable .npy: Object arrays cannot be loaded"),
        (LOGITS[:, :2], "The rows have 2 numbers, the model has 3 classes"),
        ({"logits": LOGITS, "classes": list("01")}, r"has the shape \(50, 3\); it must be \(N, 2\)"),
        ({"logits": LOGITS, "classes": list("abc")}, "The column 'a' is no class of the model"),
    ],
)
def test_arrays_that_are_no_scores_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    given = saved_arrays(tmp_path, content)
    with pytest.raises(UsageError, match=message):
        bulk.run(given, tmp_path / "out.parquet", lower=None, upper=None, calibrator=None)


def test_an_archive_of_another_kind_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sheet.xlsx"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("xl/workbook.xml", "")
    with pytest.raises(UsageError, match=r"it is an Excel file \(.xlsx\); save the sheet as .csv\."):
        bulk.run(path, tmp_path / "out.parquet", lower=None, upper=None, calibrator=None)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    whole = saved_arrays(tmp_path, {"logits": LOGITS})
    content = bytearray(whole.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (content, content[:100]):
        whole.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"in.npz: The file is no readable .npz: "):
            bulk.run(whole, tmp_path / "out.parquet", lower=None, upper=None, calibrator=None)


def test_one_column_of_probabilities_is_no_logit(
    boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXCAL_MODEL", "logits:2")
    shares = np.random.default_rng(0).uniform(size=300)
    given = source(tmp_path, score=shares)
    command = ("predict", given, "--output", tmp_path / "out.parquet")
    refused = boxcal(*command)
    assert refused.code == 2
    assert "one column of scores for two classes, all between 0 and 1" in " ".join(refused.stderr.split())
    assert boxcal(*command, "--scores", "probabilities").code == 0
    found = pq.read_table(tmp_path / "out.parquet")["probabilities"].to_pylist()
    np.testing.assert_allclose(np.array(found)[:, 1], shares, atol=1e-12)


def test_a_stopped_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, output = source(tmp_path), tmp_path / "out.parquet"
    arguments: dict[str, Any] = {"lower": None, "upper": None, "calibrator": None}
    computed: list[int] = []
    stopped: list[bool] = []
    scored = bulk.RowFile._read

    def stops(self: bulk.RowFile, batch: Any, first: int) -> Any:
        if first == 20 and not stopped:
            stopped.append(True)
            raise KeyboardInterrupt
        computed.append(first)
        return scored(self, batch, first)

    monkeypatch.setattr(bulk.RowFile, "_read", stops)
    with pytest.raises(KeyboardInterrupt):
        bulk.run(given, output, **arguments)
    assert not output.exists()
    assert {0, 5, 10, 15} <= set(computed)
    computed.clear()
    assert bulk.run(given, output, **arguments) == 50
    assert sorted(computed) == [20, 25, 30, 35, 40, 45]
    whole = tmp_path / "whole.parquet"
    bulk.run(given, whole, **arguments)
    assert pq.read_table(output).equals(pq.read_table(whole))
    computed.clear()
    folder = output.with_name("out.parquet.parts")
    bulk._prepare(folder, "another run")
    (folder / "0.arrow").write_text("of another run")
    bulk.run(given, output, **arguments)
    assert sorted(computed) == list(range(0, 50, 5))


def test_a_row_that_cannot_be_calibrated_is_named(tmp_path: Path) -> None:
    wrong = LOGITS.copy()
    wrong[12, 1] = np.nan
    given, output = source(tmp_path, logits=list(wrong)), tmp_path / "out.parquet"
    with pytest.raises(UsageError, match=r"from row 10 on: .* in row 2 "):
        bulk.run(given, output, lower=None, upper=None, calibrator=None)


def test_images_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOXCAL_MODEL", "digits")
    images = tmp_path / "images"
    levels = load_digits_split().test.levels[:10]
    for number, one in enumerate(levels):
        path = images / str(number % 2) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((one[0] * 255 / 16).astype(np.uint8)).save(path)
    output = tmp_path / "out.parquet"
    assert bulk.run(images, output, lower=None, upper=None, calibrator=None) == 10
    found = pq.read_table(output).to_pydict()
    order = [int(Path(path).stem) for path in found["path"]]
    expected = softmax(load_backbone("digits", device="cpu")(levels).astype(np.float64), axis=1)
    np.testing.assert_allclose(found["probabilities"], expected[order], atol=1e-5)


def test_a_table_of_scores_is_predicted_by_the_calibrator_that_was_fitted_to_one(
    boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model is named: the classes are those of the calibrator, whatever the order of the columns."""
    monkeypatch.delenv("BOXCAL_MODEL")
    random = np.random.default_rng(0)
    names, shares = ["cat", "dog", "owl"], softmax(LOGITS * 2.0, axis=1)
    labels = (LOGITS + random.gumbel(size=LOGITS.shape)).argmax(axis=1)

    def table(order: list[int], **others: list[Any]) -> pa.Table:
        return pa.table({f"p_{names[k]}": shares[:, k] for k in order} | others)

    fitted_to = tmp_path / "validation.csv"
    pacsv.write_csv(table([0, 1, 2], label=[names[k] for k in labels]), fitted_to)
    saved = tmp_path / "calibrator.safetensors"
    assert boxcal("fit", fitted_to, "--scores", "probabilities", "--method", "vector", "-o", saved).code == 0
    expected = ArrayCalibrator.from_bytes(saved.read_bytes())(np.log(shares))
    unnamed = boxcal("predict", fitted_to, "--output", tmp_path / "out.parquet")
    assert unnamed.code == 2
    assert "name the calibrator with --calibrator, or the model with BOXCAL_MODEL" in " ".join(
        unnamed.stderr.split()
    )
    new = table([2, 0, 1], id=[f"r{row}" for row in range(50)], truth=labels.tolist())
    for suffix in ("csv", "arrow", "parquet"):
        given, output = tmp_path / f"new.{suffix}", tmp_path / f"{suffix}.out.parquet"
        if suffix == "csv":
            pacsv.write_csv(new, given)
        elif suffix == "parquet":
            pq.write_table(new, given)
        else:
            with pa.ipc.new_file(given, new.schema) as file:
                file.write_table(new)
        command = ("predict", given, "--calibrator", saved, "--output", output)
        refused = boxcal(*command, "--label", "truth")
        assert refused.code == 2
        assert "look like probabilities" in refused.stderr
        refused = boxcal(*command, "--scores", "probabilities")
        assert refused.code == 2
        assert "'truth' is no class of the model. Leave it out with --ignore truth" in " ".join(
            refused.stderr.split()
        )
        done = boxcal(*command, "--scores", "probabilities", "--label", "truth")
        assert done.code == 0, done.stderr
        found = pq.read_table(output).to_pydict()
        np.testing.assert_allclose(found["probabilities"], expected, atol=1e-6)
        assert found["label"] == [names[k] for k in expected.argmax(axis=1)]


def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"lower": None, "upper": None, "calibrator": None}
    wide = source(tmp_path, logits=[[1.0, 2.0, 3.0, 4.0]])
    with pytest.raises(UsageError, match=r"in.parquet: The rows .* set BOXCAL_MODEL=logits:4, or name a cal"):
        bulk.run(wide, tmp_path / "out.parquet", **arguments)
    words = tmp_path / "words.txt"
    words.write_text("some words\n")
    with pytest.raises(UsageError, match=r"words.txt: The file is no folder of images, and no .parquet"):
        bulk.run(words, tmp_path / "out.parquet", **arguments)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UsageError, match="has no images or rows"):
        bulk.run(empty, tmp_path / "out.parquet", **arguments)
