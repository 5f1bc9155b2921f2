"""`boxcal predict SOURCE --output FILE.parquet`: rows and images in parts, which a later run continues."""

from __future__ import annotations

import gzip
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from scipy.special import softmax

from boxcal.app.cli import bulk
from boxcal.app.cli.output import UsageError
from boxcal.app.tables.labels import NOTHING, Declared
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


def run(given: Path, output: Path, calibrator: str | None = None, **options: Any) -> dict[str, Any]:
    """Predict, and read the columns of the output; those of probabilities as an array (N, K)."""
    rows = bulk.run(given, output, **{"lower": None, "upper": None, "calibrator": calibrator} | options)
    with output.open("rb") as file:  # Arrow opens no name that is not UTF-8
        found: dict[str, Any] = pq.read_table(file).to_pydict()
    found["probabilities"] = np.array(found["probabilities"])
    assert len(found["probabilities"]) == rows
    return found


def test_rows_are_calibrated_within_bounds(tmp_path: Path, saved: Path) -> None:
    found = run(source(tmp_path), tmp_path / "out.parquet", str(saved), upper=0.6)
    upper = Bounds(torch.zeros(3).double(), torch.full((3,), 0.6, dtype=torch.float64))
    expected = Calibrator.from_bytes(saved.read_bytes()).calibrate(torch.from_numpy(LOGITS), upper)
    np.testing.assert_array_equal(found["probabilities"], expected.probabilities.numpy())
    assert found["index"] == LOGITS.argmax(axis=1).tolist()
    assert found["label"] == [str(index) for index in found["index"]]
    assert not list(tmp_path.glob("*.parts"))


SHARES = softmax(LOGITS, axis=1)
ORDER = [2, 0, 1]
SCORES: dict[str, Any] = {
    "parquet, probabilities": pa.table({"probabilities": list(SHARES)}),
    "parquet, logits": pa.table({"logits": list(LOGITS)}),
    "parquet, by class": pa.table({str(index): LOGITS[:, index] for index in ORDER}),
    "npy": LOGITS,
    "npy, big endian": LOGITS.astype(">f8"),
    "logits": {"logits": LOGITS, "labels": LOGITS.argmax(axis=1)},
    "probabilities": {"probabilities": SHARES, "groups": np.arange(50)},
    "named classes": {"probabilities": SHARES[:, ORDER], "classes": np.array(list("012"))[ORDER]},
}


def saved_scores(tmp_path: Path, content: Any) -> Path:
    if isinstance(content, pa.Table):
        return source(tmp_path, **dict(zip(content.column_names, content.columns, strict=True)))
    path = tmp_path / ("in.npz" if isinstance(content, dict) else "in.npy")
    if isinstance(content, dict):
        np.savez_compressed(path, **content)
    else:
        np.save(path, content)
    return path


@pytest.mark.parametrize("kind", SCORES)
def test_scores_are_read_as_fits_read_them(kind: str, tmp_path: Path) -> None:
    found = run(saved_scores(tmp_path, SCORES[kind]), tmp_path / "out.parquet")["probabilities"]
    np.testing.assert_allclose(found, SHARES, atol=1e-12)


def test_other_columns_are_kept(tmp_path: Path) -> None:
    """Of every type; of CSV as they are written. Not the true label, nor what is left out for its own."""
    ids = [f"{n:03d}" for n in range(50)]
    sites = [pa.array(["rome", "oslo"] * 10), pa.array(["oslo", "bern", "rome"] * 10)]
    own = {
        "id": ids,
        "site": pa.chunked_array([one.dictionary_encode() for one in sites]),
        "amounts": [[n, n + 0.5] for n in range(50)],
    }
    table = pa.table(own | {"logits": list(LOGITS), "label": [9] * 50, "index": [8] * 50})
    out = tmp_path / "out.parquet"
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=20)
    with pa.ipc.new_stream(tmp_path / "in.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("in.parquet", "in.arrow"):
        found = run(tmp_path / name, out, declared=Declared(ignore=("index",)))
        assert list(found) == [*own, "label", "index", "probability", "probabilities"]
        assert found["index"] == LOGITS.argmax(axis=1).tolist()
        assert {name: found[name] for name in own} == table.select(list(own)).to_pydict()
    rows = pa.table({"id": ids, "no": range(50)} | {str(k): LOGITS[:, k] for k in range(3)})
    pacsv.write_csv(rows, tmp_path / "in.csv")
    (tmp_path / "in.csv.gz").write_bytes(gzip.compress((tmp_path / "in.csv").read_bytes()))
    for name in ("in.csv", "in.csv.gz"):
        found = run(tmp_path / name, out, declared=Declared(ignore=("id", "no")))
        assert (found["id"], found["no"]) == (ids, [str(n) for n in range(50)])
        assert found["index"] == LOGITS.argmax(axis=1).tolist()


def write(given: Path, output: Path) -> None:
    bulk.run(given, output, lower=None, upper=None, calibrator=None)


def test_an_output_in_csv_has_a_column_for_each_class(tmp_path: Path) -> None:
    """In several parts, of every type of column; the file can be read as scores again."""
    table = pa.table(
        {"site": pa.array(["a,b", 'c"d'] * 25).dictionary_encode(), "no": range(50), "logits": list(LOGITS)}
    )
    pq.write_table(table, tmp_path / "in.parquet")
    expected = run(tmp_path / "in.parquet", tmp_path / "out.parquet")
    write(tmp_path / "in.parquet", tmp_path / "out.csv")
    found = pd.read_csv(tmp_path / "out.csv", dtype={"label": str})
    names = [f"p_{name}" for name in range(3)]
    others = ["site", "no", "label", "index", "probability"]
    assert list(found) == [*others, *names]
    for name in others:
        assert found[name].tolist() == expected[name]
    np.testing.assert_array_equal(found[names], np.array(expected["probabilities"]))
    declared = Declared("probabilities", ignore=tuple(others))
    again = run(tmp_path / "out.csv", tmp_path / "again.parquet", declared=declared)
    np.testing.assert_allclose(again["probabilities"], expected["probabilities"], atol=1e-12)


def test_what_no_csv_can_hold_is_refused(tmp_path: Path) -> None:
    for others, says in (
        ({"tags": [[1]] * 50}, "'tags' holds lists or objects; write a .parquet file"),
        ({"p_1": ["x"] * 50}, "has a column 'p_1' already"),
    ):
        pq.write_table(pa.table({**others, "logits": list(LOGITS)}), tmp_path / "in.parquet")
        with pytest.raises(UsageError, match=says):
            write(tmp_path / "in.parquet", tmp_path / "out.csv")
    with pytest.raises(UsageError, match=r"writes .parquet or .csv, which out.json is not"):
        write(tmp_path / "in.parquet", tmp_path / "out.json")

    data = pa.array([b"\xff"] * 50)
    pq.write_table(pa.table({"raw": data, "logits": list(LOGITS)}), tmp_path / "in.parquet")
    with pytest.raises(UsageError, match=r"the column 'raw' \(binary\) is no text; write a .parquet file"):
        write(tmp_path / "in.parquet", tmp_path / "out.csv")
    assert run(tmp_path / "in.parquet", tmp_path / "out.parquet")["raw"] == [b"\xff"] * 50


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("index", {}, "'index', and the output has its own of this name. Leave it out with --ignore index"),
        ("probability", {}, "has a column 'probability', and the output"),
        ("label", {"label": "truth"}, "has a column 'label', and the output"),
        ("truth", {"ignore": ("truth",)}, "has more than one column 'truth'"),
    ],
)
def test_a_column_that_the_output_cannot_have_is_refused(
    name: str, options: dict[str, Any], says: str, tmp_path: Path
) -> None:
    columns = [("truth", ["x"] * 50), (name, ["y"] * 50), ("logits", list(LOGITS))]
    pq.write_table(
        pa.table([pa.array(one) for _, one in columns], [one for one, _ in columns]), tmp_path / "in"
    )
    with pytest.raises(UsageError, match=says):
        run(tmp_path / "in", tmp_path / "out.parquet", declared=Declared(**options))


def test_an_output_replaces_nothing_of_others(tmp_path: Path) -> None:
    given, others = source(tmp_path), tmp_path / "out.parquet.parts"
    (tmp_path / "folder.csv").mkdir()
    others.mkdir()
    (others / "thesis.txt").write_text("mine")
    content = given.read_bytes()
    for name, says in (
        ("out.parquet", "out.parquet.parts, where the parts of the output are kept .* holds other files"),
        ("../" + tmp_path.name + "/in.parquet", "in.parquet is the source itself; name another file"),
        ("folder.csv", r"folder.csv is a folder; name a file in it"),
    ):
        with pytest.raises(UsageError, match=says):
            run(given, tmp_path / name)
    assert ((others / "thesis.txt").read_text(), given.read_bytes()) == ("mine", content)


def test_one_score_of_two_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOXCAL_MODEL", "logits:2")
    second, output = SHARES[:, 1], tmp_path / "out.parquet"
    column = pa.table({"score": second})
    with pytest.raises(UsageError, match="one column of scores for two classes, all between 0 and 1"):
        run(saved_scores(tmp_path, column), output)
    for content, declared in (
        ({"probabilities": second}, NOTHING),
        (np.log(second / (1 - second))[:, None], NOTHING),
        (column, Declared("probabilities")),
    ):
        found = run(saved_scores(tmp_path, content), output, declared=declared)["probabilities"]
        np.testing.assert_allclose(found[:, 1], second, atol=1e-9)


@pytest.mark.parametrize("name", ["in.csv", "in"])
def test_a_csv_may_have_one_column(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOXCAL_MODEL", "logits:2")
    given, declared = tmp_path / name, Declared("probabilities")
    given.write_text("y_score\n0.25\n1e-1\n")
    found = run(given, tmp_path / "out.parquet", declared=declared)["probabilities"]
    np.testing.assert_allclose(found, [[0.75, 0.25], [0.9, 0.1]], atol=1e-12)
    for content in (
        "0.25\n0.1\n",
        "y score\n0.1 0.2\n",
        "%PDF-1.7\n%\n",
        "y\0score\n1\n",
        "<p>\n1\n",
        "text",
    ):
        given.write_text(content)
        with pytest.raises(
            UsageError, match=r"is no folder of images, and no .parquet|needs one column for|cl"
        ):
            run(given, tmp_path / "out.parquet", declared=declared)


def test_columns_that_are_left_out_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those without a name, nor those without a value."""
    monkeypatch.setenv("BOXCAL_MODEL", "logits:2")
    (tmp_path / "in.csv").write_text("id;age;score;note;;\n7;30;0,5;;;\n8;40;-0,5;;;\n")
    says = r"score of '1', set --ignore id,age\. Columns left out are kept beside the predictions\."
    with pytest.raises(UsageError, match=says):
        run(tmp_path / "in.csv", tmp_path / "out.parquet")
    found = run(tmp_path / "in.csv", tmp_path / "out.parquet", declared=Declared(ignore=("id", "age")))
    assert [*found] == ["id", "age", "note", *bulk.COLUMNS]
    assert (found["id"], found["index"]) == (["7", "8"], [1, 0])


WRONG = [[np.nan if row == 12 else score for score in scores] for row, scores in enumerate(LOGITS.tolist())]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (SHARES, "The scores look like probabilities: .* Set --scores probabilities"),
        ({"labels": LOGITS}, "must hold either `logits` or `probabilities`; it holds `labels`"),
        ({"logits": LOGITS, "probabilities": SHARES}, "it holds `logits`, `probabilities`"),
        (np.zeros((2, 3, 4)), r"`logits` must be numbers \(N, K\), got float64 of the shape \(2, 3, 4\)"),
        (np.array([["a"] * 3]), "got <U1 of the shape"),
        (np.array([[None] * 3]), r"no readable .npy: Object arrays cannot be loaded"),
        (LOGITS[:, :2], "The rows have 2 numbers, the model has 3 classes"),
        ({"logits": LOGITS, "classes": list("01")}, r"has the shape \(50, 3\); it must be \(N, 2\)"),
        ({"logits": LOGITS, "classes": list("abc")}, "The column 'a' is no class of the model"),
        (
            pa.table({"logits": [[1.0, 2.0, 3.0, 4.0]]}),
            r"in.parquet: The rows .* set BOXCAL_MODEL=logits:4, or name a cal",
        ),
        (
            pa.table({"logits": WRONG}),
            r"in.parquet: logits\[12, 0\] is nan, of the class '0'; every value must be finite",
        ),
        (
            {"probabilities": np.where(np.arange(150).reshape(50, 3) == 37, np.nan, SHARES)},
            r"in.npz: probabilities\[12, 1\] is nan, of the class '1'; every value must be finite",
        ),
    ],
)
def test_scores_that_are_none_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    given = saved_scores(tmp_path, content)
    with pytest.raises(UsageError, match=message):
        run(given, tmp_path / "out.parquet")


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    whole = saved_scores(tmp_path, {"logits": LOGITS})
    content = bytearray(whole.read_bytes())
    content[len(content) // 2] ^= 1
    for damaged in (content, content[:100]):
        whole.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"in.npz: The file is no readable .npz: "):
            run(whole, tmp_path / "out.parquet")


def test_a_stopped_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, output = source(tmp_path), tmp_path / "out.parquet"
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
        run(given, output)
    assert not output.exists()
    assert {0, 5, 10, 15} <= set(computed)
    computed.clear()
    run(given, output)
    assert sorted(computed) == [20, 25, 30, 35, 40, 45]
    stopped.clear()
    with pytest.raises(KeyboardInterrupt):
        run(given, output)
    (output.with_name("out.parquet.parts") / "0.arrow").write_bytes(b"")  # as after a crash of the machine
    computed.clear()
    run(given, output)
    assert sorted(computed) == list(range(0, 50, 5))
    run(given, tmp_path / "whole.parquet")
    assert pq.read_table(output).equals(pq.read_table(tmp_path / "whole.parquet"))
    computed.clear()
    folder = output.with_name("out.parquet.parts")
    bulk._prepare(folder, "another run")
    (folder / "0.arrow").write_text("of another run")
    run(given, output)
    assert sorted(computed) == list(range(0, 50, 5))


def test_a_second_run_to_one_output_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would truncate what the first one writes. A lock that a run has left behind is none."""
    given, output = source(tmp_path), tmp_path / "out.parquet"
    scored, refused = bulk.RowFile._read, list[str]()

    def twice(self: bulk.RowFile, batch: Any, first: int) -> Any:
        if first == 20:
            with pytest.raises(UsageError) as second:
                run(given, output)
            refused.append(str(second.value))
        return scored(self, batch, first)

    monkeypatch.setattr(bulk.RowFile, "_read", twice)
    folder = output.with_name("out.parquet.parts")
    folder.mkdir()
    (folder / bulk.LOCK).touch()
    found = run(given, output)
    assert refused == [f"another run is writing {output}"]
    assert found["index"] == LOGITS.argmax(axis=1).tolist()
    assert not folder.exists()


def test_images_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOXCAL_MODEL", "digits")
    images = tmp_path / "images"
    levels = load_digits_split().test.levels[:10]
    for number, one in enumerate(levels):
        path = images / str(number % 2) / os.fsdecode(b"\xff %d.png" % number)  # no UTF-8
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((one[0] * 255 / 16).astype(np.uint8)).save(path)
    for hidden in ("0/._1.png", "0/.trash/1.png", "__MACOSX/0/1.png"):
        (images / hidden).parent.mkdir(parents=True, exist_ok=True)
        (images / hidden).write_bytes(b"no image")
    found = run(images, tmp_path / os.fsdecode(b"\xff.parquet"))
    assert found["path"][0] == r"0/\xff 0.png"
    order = [int(Path(path).stem.split()[1]) for path in found["path"]]
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
    unnamed.refuses("name the calibrator with --calibrator, or the model with BOXCAL_MODEL")
    new = table([2, 0, 1], id=[f"r{row}" for row in range(50)], truth=labels.tolist())
    pacsv.write_csv(new, given := tmp_path / "new.csv")
    output = tmp_path / "out.parquet"
    command: tuple[Any, ...] = ("predict", given, "--calibrator", saved, "--output", output)
    boxcal(*command, "--label", "truth").refuses("look like probabilities")
    command += ("--scores", "probabilities")
    boxcal(*command).refuses(
        "'truth' is no class of the model ('cat', 'dog', 'owl'). Leave it out with --ignore truth"
    )
    done = boxcal(*command, "--label", "truth")
    assert done.code == 0, done.stderr
    found = pq.read_table(output).to_pydict()
    np.testing.assert_allclose(found["probabilities"], expected, atol=1e-6)
    assert found["label"] == [names[k] for k in expected.argmax(axis=1)]


def test_wrong_sources_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "sheet.xlsx", "w") as archive:
        archive.writestr("xl/workbook.xml", "")
    (tmp_path / "words.txt").write_text("some words\n")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("sheet.xlsx", r"it is an Excel file \(.xlsx\); save the sheet as .csv\."),
        ("words.txt", r"words.txt: The file is no folder of images, and no .parquet"),
        ("empty", "has no images or rows"),
    ):
        with pytest.raises(UsageError, match=message):
            run(tmp_path / name, tmp_path / "out.parquet")
