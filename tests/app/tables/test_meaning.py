"""A file means the same in every format, or is refused with what settles it: class names, columns, labels."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import unicodedata
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from boxcal.app.http.problems import BoxcalError, InvalidUpload
from boxcal.app.tables.file_part import FilePart
from boxcal.app.tables.formats import BLOCK_BYTES, _whole_rows
from boxcal.app.tables.kinds import table_kind
from boxcal.app.tables.labels import Declared, as_indices
from tests.app.fitting.validation_data import npz
from tests.app.tables.sets import TABLES, Given, arrays_of, frame, given, read

NAMES = ("ape", "bee", "cat", "dog")
ONE = given(NAMES)
FORMATS = (*TABLES, "npz", "json")


def written(form: str, one: Given, labels: Any = None, **more: Any) -> bytes:
    if form in TABLES:
        return TABLES[form](frame(one, labels, **more))
    return arrays_of(one, labels)[form]


def in_order(one: Given, order: Sequence[int]) -> Given:
    places = np.argsort(order)
    return Given(one.scores[:, order], [one.names[k] for k in order], places[one.labels])


def assert_same(data: Any, one: Given) -> None:
    logits, labels = data.arrays()
    np.testing.assert_allclose(logits, one.scores, rtol=1e-12)
    np.testing.assert_array_equal(labels, one.labels)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
def test_columns_are_matched_with_the_classes_by_name(
    form: str, order: tuple[int, ...], tmp_path: Path
) -> None:
    data = read(written(form, in_order(ONE, order)), tmp_path, NAMES)
    assert_same(data, ONE)
    assert data.classes == list(NAMES)
    assert data.columns is not None
    assert data.columns.startswith("matched with the classes by name")


@pytest.mark.parametrize("form", FORMATS)
def test_other_classes_are_named(form: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidUpload, match=r"'eel'.*'dog'|'dog'.*'eel'"):
        read(written(form, given(("ape", "bee", "cat", "eel"))), tmp_path, NAMES)


def test_arrays_without_names_are_read_by_position_and_say_so(tmp_path: Path) -> None:
    data = read(npz(logits=ONE.scores, labels=ONE.labels), tmp_path, NAMES)
    assert_same(data, ONE)
    assert data.columns == "in the order of the classes: the file does not name them"


@pytest.mark.parametrize(
    ("start", "end"), [("", ""), ("p_", ""), ("Probability_", ""), ("", " score"), ("a.", ".b")]
)
@pytest.mark.parametrize("known", [None, NAMES])
def test_names_may_have_a_common_start_and_end(start: str, end: str, known: Any, tmp_path: Path) -> None:
    table = frame(ONE).rename(columns={name: f"{start}{name}{end}" for name in NAMES})
    assert_same(read(table.to_csv(index=False).encode(), tmp_path, known), ONE)


def pairs(row: dict[str, float]) -> list[dict[str, Any]]:
    """Scores as pipelines of text classification give them, the highest first."""
    return [{"label": name, "score": row[name]} for name in sorted(row, key=lambda name: -row[name])]


@pytest.mark.parametrize("known", [None, NAMES])
@pytest.mark.parametrize("form", [dict, pairs])
def test_records_may_hold_scores_by_class_in_one_member(form: Any, known: Any, tmp_path: Path) -> None:
    rows = zip(ONE.scores.tolist(), ONE.named_labels(), strict=True)
    lines = [
        json.dumps({"label": label, "logits": form(dict(zip(NAMES, row, strict=True)))})
        for row, label in rows
    ]
    assert_same(read("\n".join(lines).encode(), tmp_path, known), ONE)
    body = f"[{','.join(lines)}]".replace("logits", "probabilities").encode()
    with pytest.raises(InvalidUpload, match=r"`probabilities`, but scores=logits"):
        read(body, tmp_path, known, Declared(scores="logits"))


def test_a_list_may_hold_integers(tmp_path: Path) -> None:
    rows = np.round(3 * ONE.scores).astype(int)
    table = pd.DataFrame({"logits": rows.tolist(), "label": ONE.labels})
    for form in ("parquet", "records"):
        np.testing.assert_array_equal(read(TABLES[form](table), tmp_path / form).arrays()[0], rows)


@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize("name", ["id", "fold", "pred", "Unnamed"])
def test_another_column_of_numbers_is_refused_by_name(form: str, name: str, tmp_path: Path) -> None:
    body = written(form, ONE, **{name: np.arange(len(ONE.labels))})
    for known in (None, NAMES):
        with pytest.raises(InvalidUpload, match=f"'{name}'.*ignore={name}"):
            read(body, tmp_path / str(known), known)
        data = read(body, tmp_path / str(known), known, Declared(ignore=(name,)))
        assert_same(data, ONE)


def test_columns_of_text_and_of_rows_are_left_out_with_a_remark(tmp_path: Path) -> None:
    body = frame(ONE, path=[f"{n}.png" for n in range(len(ONE.labels))]).to_csv().encode()
    data = read(body, tmp_path)
    assert_same(data, ONE)
    (note,) = data.notes
    assert note["message"] == "columns that are no class were left out: ``, `path`"


def test_consecutive_integers_belong_together(tmp_path: Path) -> None:
    """Class 2 has no sample, and the columns are written from right to left."""
    one = given(("0", "1", "2"))
    kept = one.labels != 2
    table = frame(Given(one.scores[kept], one.names, one.labels[kept]))
    table = table.rename(columns={str(k): f"logit_{k}" for k in range(3)})[
        ["logit_2", "logit_1", "logit_0", "label"]
    ]
    data = read(table.to_csv(index=False).encode(), tmp_path)
    assert data.classes == ["0", "1", "2"]
    np.testing.assert_allclose(data.arrays()[0], one.scores[kept])


@pytest.mark.parametrize("form", TABLES)
def test_a_name_with_an_underscore_is_no_number(form: str, tmp_path: Path) -> None:
    one = given(("10", "1_0", "1_1"))
    data = read(written(form, one), tmp_path)
    assert data.classes == ["10", "1_0", "1_1"]
    assert_same(data, one)


@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize("prefix", ["", "p_"])
@pytest.mark.parametrize(
    "names",
    [("001", "010", "100"), ("00", "01", "02"), ("-1", "0", "+1"), ("1e3", "2", "x"), ("1.0", "1.50")],
)
def test_texts_of_digits_name_classes_as_they_are_written(
    form: str, prefix: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    one = given(names)
    body = TABLES[form](frame(one).rename(columns={name: f"{prefix}{name}" for name in names}))
    data = read(body, tmp_path)
    assert data.classes == list(names)
    assert_same(data, one)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_floats_of_whole_numbers_name_classes_without_decimals(form: str, tmp_path: Path) -> None:
    one = given(("1.0", "2.0", "3.0"))
    for number, labels in enumerate((one.labels + 1, one.labels + 1.0)):
        data = read(written(form, one, labels), tmp_path / str(number))
        assert data.classes == ["1", "2", "3"]
        assert_same(data, one)


@pytest.mark.parametrize("form", ["csv", "records", "parquet", "arrow"])
@pytest.mark.parametrize("names", [("1.0", "1.5", "2.0"), ("0.5", "1.0")])
@pytest.mark.parametrize("is_known", [True, False])
def test_floats_name_classes_of_fractions(
    form: str, names: tuple[str, ...], is_known: bool, tmp_path: Path
) -> None:
    one = given(names)
    body = written(form, one, np.array(names, float)[one.labels])
    data = read(body, tmp_path, names if is_known else None)
    assert data.classes == list(names)
    assert_same(data, one)


@pytest.mark.parametrize("form", ["csv", "records", "parquet"])
@pytest.mark.parametrize("known", [None, ("0", "1")])
@pytest.mark.parametrize("start", ["", "p_"])
def test_booleans_are_labels_of_the_classes_0_and_1(
    form: str, known: tuple[str, ...] | None, start: str, tmp_path: Path
) -> None:
    one = given(("0", "1"))
    for number, labels in enumerate((one.labels == 1, np.array(["FALSE", "TRUE"])[one.labels])):
        table = frame(one, labels).rename(columns={"0": f"{start}0", "1": f"{start}1"})
        data = read(TABLES[form](table), tmp_path / str(number), known)
        assert data.classes == ["0", "1"]
        assert_same(data, one)


def test_a_boolean_is_no_index_where_a_class_is_named_so() -> None:
    assert as_indices(np.array(["true", "false"]), ("true", "false")).tolist() == [0, 1]
    with pytest.raises(InvalidUpload, match=r"labels\[0\] is 'TRUE', which is no class of the model"):
        as_indices(np.array(["TRUE"]), ("true", "false"))


@pytest.mark.parametrize("names", [("<=50K", ">50K"), ("[0, 10)", "[10, 20)"), ("[0, 10]", "(10, 20]")])
def test_a_csv_may_begin_with_the_name_of_a_range(names: tuple[str, ...], tmp_path: Path) -> None:
    one = given(names)
    assert_same(read(written("csv with semicolons and CRLF", one, site="a", path="b"), tmp_path), one)


NEEDS = "needs a column `logits` .* Features are no scores"
OF_20 = "to `f?19` would be the scores of 20 classes, .* 400 rows name "
FEATURES = [
    ([f"f{k}" for k in range(20)], 3, rf"`f0` {OF_20}3\."),
    ([str(k) for k in range(20)], 2, rf"`0` {OF_20}2\."),
    (["Time", *(f"V{k}" for k in range(1, 29)), "Amount"], 2, NEEDS),
    ([f"pixel_{k // 8}_{k % 8}" for k in range(64)], 10, NEEDS),
]


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize(("columns", "classes", "message"), FEATURES)
def test_a_table_of_features_is_not_taken_for_scores(
    columns: list[str], classes: int, message: str, form: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame(rng.normal(size=(400, len(columns))), columns=columns)
    body = TABLES[form](table.assign(label=np.arange(400) % classes))
    with pytest.raises(InvalidUpload, match=message):
        read(body, tmp_path)


@pytest.mark.parametrize("name", ["f", ""])
def test_more_columns_than_classes_are_not_to_be_left_out(name: str, tmp_path: Path) -> None:
    """Ten of twenty features would be taken for logits."""
    table = pd.DataFrame(np.eye(40, 20), columns=[f"{name}{k}" for k in range(20)]).assign(label=1)
    said = rf"go on to '{name}19', and the model has 10 classes \('0', .* 5 more\)\. Features are no scores"
    with pytest.raises(InvalidUpload, match=said):
        read(table.to_csv(index=False).encode(), tmp_path, [str(k) for k in range(10)])


def test_scores_of_classes_without_labels_stay_scores(tmp_path: Path) -> None:
    """Of few rows, or by the names of their columns."""
    for name, rows, classes in (("c", 24, 90), ("logit_", 400, 20)):
        columns = [f"{name}{k}" for k in range(classes)]
        table = pd.DataFrame(3.0 * np.eye(rows, classes), columns=columns).assign(label=np.arange(rows) % 2)
        data = read(table.to_csv(index=False).encode(), tmp_path / name)
        assert data.classes == [str(k) for k in range(classes)]


INTEGERS = [("1", "2", "3"), ("10", "20", "30"), ("-1", "1"), ("0", "1", "10", "2"), ("1.0", "2.0", "3.0")]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("names", INTEGERS)
@pytest.mark.parametrize("kind", [int, float, str])
@pytest.mark.parametrize("is_known", [True, False])
def test_where_integers_name_the_classes_an_integer_is_a_name(
    form: str, names: tuple[str, ...], kind: Any, is_known: bool, tmp_path: Path
) -> None:
    one = given(names)
    labels = np.array([float(name) for name in one.named_labels()])
    labels = labels if kind is float else labels.astype(int).astype(kind)
    if not is_known and form in TABLES and names[0] == "1.0":
        pytest.skip("columns `1.0` and labels 1 are not compared as numbers")
    data = read(written(form, one, labels), tmp_path, names if is_known else None)
    assert_same(data, one)


@pytest.mark.parametrize("form", ["csv", "parquet", "npz", "json"])
def test_an_integer_that_names_no_class_shows_both_readings(form: str, tmp_path: Path) -> None:
    one = given(("10", "20", "30"))
    body = written(form, one, one.labels)
    with pytest.raises(
        InvalidUpload, match=r"labels\[0\] is 0, .*'10', '20', '30'.*labels_as=index.*class '10'"
    ):
        read(body, tmp_path, one.names)
    assert_same(read(body, tmp_path, one.names, Declared(labels_as="index")), one)


def test_labels_of_bytes_are_utf8() -> None:
    labels = np.array(["Ärger", "dog"]).astype("U").tolist()
    coded = np.array([name.encode() for name in labels])
    assert as_indices(coded, ("dog", "Ärger")).tolist() == [1, 0]
    with pytest.raises(InvalidUpload, match="not UTF-8"):
        as_indices(np.array([b"\xff"]), ("dog", "cat"))


def test_names_that_look_equal_are_equal(tmp_path: Path) -> None:
    """Space after the commas of a CSV, and accents of two characters, as file systems of Apple write them."""
    names = ("Ärger", "Übermut")
    one = given(names)
    decomposed = [unicodedata.normalize("NFD", name) for name in names]
    table = frame(Given(one.scores, decomposed, one.labels))
    body = table.to_csv(index=False).replace(",", ", ").encode()
    assert_same(read(body, tmp_path / "known", names), one)
    assert_same(read(body, tmp_path / "unknown"), one)
    arrays = arrays_of(Given(one.scores[:, ::-1], decomposed[::-1], 1 - one.labels))
    assert_same(read(arrays["npz"], tmp_path / "npz", names), one)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("names", [("True", "False"), ("False", "True")])
def test_boolean_labels_are_names_where_classes_are_named_so(
    form: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    one = given(names)
    assert_same(read(written(form, one, one.named_labels() == "True"), tmp_path, names), one)


def test_decimals_are_numbers(tmp_path: Path) -> None:
    table = pa.table(
        {name: pa.array(ONE.scores[:, k].round(4)).cast(pa.decimal128(10, 4)) for k, name in enumerate(NAMES)}
    ).append_column("label", pa.array(ONE.named_labels()))
    out = io.BytesIO()
    pq.write_table(table, out)
    logits, _ = read(out.getvalue(), tmp_path).arrays()
    np.testing.assert_array_equal(logits, ONE.scores.round(4))


@pytest.mark.parametrize("scale", [0, 2])
def test_labels_may_be_decimals(scale: int, tmp_path: Path) -> None:
    """As databases export integers; groups too."""
    kind = pa.decimal128(38, scale)
    columns = {str(k): ONE.scores[:, k] for k in range(4)}
    groups = pa.array(np.arange(60) // 2).cast(pa.decimal128(38, 0))
    out = io.BytesIO()
    pq.write_table(pa.table({**columns, "label": pa.array(ONE.labels).cast(kind), "group": groups}), out)
    data = read(out.getvalue(), tmp_path)
    assert_same(data, ONE)
    assert data.grouping["groups"].tolist() == (np.arange(60) // 2).tolist()


def test_arrow_opens_a_large_table_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would abort where its thread that reads ahead outlives a refusal."""
    rows = "".join(f"1.00,1.00,1.00,1.00,{name}\n" for name in NAMES)
    body = f"{','.join(NAMES)},label\n{rows * 25_000}".encode()
    read_here = []
    readinto = FilePart.readinto

    def counted(part: FilePart, buffer: Any) -> int:
        read_here.append(readinto(part, buffer))
        return read_here[-1]

    monkeypatch.setattr(FilePart, "readinto", counted)
    assert read(body, tmp_path).samples == 100_000
    assert len(body) > 2_300_000
    assert sum(read_here) < 1_200_000  # what tells its columns


def test_views_of_texts_are_texts(tmp_path: Path) -> None:
    """Arrow cannot decode a dictionary of them; Polars writes texts and categories so."""
    views = pa.array(NAMES, pa.string_view())
    columns = {name: ONE.scores[:, k] for k, name in enumerate(NAMES)}
    for number, labels in enumerate(
        (
            pa.array(ONE.named_labels()).cast(pa.string_view()),
            pa.DictionaryArray.from_arrays(pa.array(ONE.labels, pa.uint32()), views),
        )
    ):
        table, out = pa.table({**columns, "label": labels}), io.BytesIO()
        with pa.ipc.new_file(out, table.schema) as file:
            file.write_table(table)
        assert_same(read(out.getvalue(), tmp_path / str(number)), ONE)


def test_weights_may_be_decimals_and_scores_a_dictionary(tmp_path: Path) -> None:
    columns = {name: pa.array(ONE.scores[:, k]).dictionary_encode() for k, name in enumerate(NAMES)}
    weights = pa.array([0.25, 1.5, 2.0] * 20).cast(pa.decimal128(6, 3))
    table = pa.table({**columns, "label": ONE.named_labels(), "sample_weight": weights})
    out = io.BytesIO()
    with pa.ipc.new_file(out, table.schema) as file:
        file.write_table(table)
    data = read(out.getvalue(), tmp_path)
    assert_same(data, ONE)
    assert data.grouping["sample_weight"].tolist() == [0.25, 1.5, 2.0] * 20


@pytest.mark.parametrize("form", TABLES)
def test_a_table_without_rows_is_named(form: str, tmp_path: Path) -> None:
    if form in ("records", "lines", "lines with a byte order mark", "csv of pandas with its index"):
        pytest.skip("no rows have no columns, or no name for the first")
    with pytest.raises(InvalidUpload, match=r"^The table has no rows\.$"):
        read(TABLES[form](frame(ONE).iloc[:0]), tmp_path)


@pytest.mark.parametrize("form", ["npz", "json"])
def test_no_two_columns_of_arrays_are_of_one_class(form: str, tmp_path: Path) -> None:
    one = given(("ant", "ant ", "cat"))
    with pytest.raises(InvalidUpload, match=r"^`classes` names a class twice\.$"):
        read(written(form, one, one.labels), tmp_path)
    body = npz(logits=one.scores, labels=np.array(["ant", "cat"] * 30))
    with pytest.raises(InvalidUpload, match=r"^`classes` names a class twice\.$"):
        read(body, tmp_path, declared=Declared(classes=("ant", "ant", "cat")))


def test_classes_of_floats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidUpload, match=r"`classes` must hold names or integers, got the dtype float64"):
        read(npz(logits=ONE.scores, labels=ONE.labels, classes=np.arange(4.0)), tmp_path)


def test_rows_of_a_document_are_compared_with_the_first(tmp_path: Path) -> None:
    body = json.dumps({"logits": [[1, 2], *[[1, 2, 3]] * 29], "labels": [0, 1] * 15}).encode()
    with pytest.raises(BoxcalError, match=r"^logits\[1\] has 3 numbers, but logits\[0\] has 2\.$"):
        read(body, tmp_path)


@pytest.mark.parametrize("cell", ["1_000", "٣", "３.５"])
def test_a_number_in_python_alone_is_named(cell: str, tmp_path: Path) -> None:
    table = f"no,yes,label\n3.621,0.5,no\n-.5e3,nan,yes\n{cell},0.5,no\n" + 30 * "-0.5,1.5,yes\n"
    with pytest.raises(InvalidUpload, match=f"not all of its cells are numbers: it holds '{cell}'"):
        read(table.encode(), tmp_path)


@pytest.mark.parametrize("delimiter", [";", "\t", ';"'])
def test_a_decimal_comma_is_read_where_commas_delimit_nothing(delimiter: str, tmp_path: Path) -> None:
    """As spreadsheets write them in many countries."""
    quote = delimiter[1:]
    rows = [
        [*(f"{quote}{score:.4f}{quote}".replace(".", ",") for score in row), name]
        for row, name in zip(ONE.scores, ONE.named_labels(), strict=True)
    ]
    table = "\n".join(delimiter[0].join(row) for row in [[*NAMES, "label"], *rows])
    logits, _ = read(table.encode(), tmp_path).arrays()
    np.testing.assert_allclose(logits, ONE.scores.round(4))


@pytest.mark.parametrize(
    ("header", "cell"),
    [
        ("v1.2", "x"),
        ("date", "31.12.2024"),
        ("version", "Modell 2.1"),
        ("address", "10.0.0.1"),
        ("amount", "1.234,50"),
    ],
)
def test_points_in_other_cells_are_no_decimal_points(header: str, cell: str, tmp_path: Path) -> None:
    table = f"cat;dog;label;{header}\n" + f",25;-,5;cat;{cell}\n 0,25; 1,5e-1;dog;{cell}\n" * 15
    logits, _ = read(table.encode(), tmp_path).arrays()
    np.testing.assert_array_equal(logits, [[0.25, -0.5], [0.25, 0.15]] * 15)


@pytest.mark.parametrize("classes", [None, ("0", "1")])
def test_whole_numbers_among_labels_may_have_a_decimal_comma(
    classes: tuple[str, str] | None, tmp_path: Path
) -> None:
    data = read(b"0;1;label\n0,25;-0,5;0,0\n-1,25;0,5;1,00\n" + b"0,5;1;1,0\n" * 20, tmp_path, classes)
    assert data.classes == ["0", "1"]
    assert data.arrays()[1].tolist() == [0] + 21 * [1]


def test_columns_without_a_name_or_a_value_are_left_out(tmp_path: Path) -> None:
    """Spreadsheets end each row with the delimiters of columns that were emptied."""
    table = "cat;dog;label;note;;\n" + "0,25;-0,5;cat;;;\n-1,25;0,5;dog;;;\n" * 15
    for number, known in enumerate((None, ("cat", "dog"))):
        data = read(table.encode(), tmp_path / str(number), known)
        np.testing.assert_array_equal(data.arrays()[0], [[0.25, -0.5], [-1.25, 0.5]] * 15)
        assert [note["message"] for note in data.notes] == [
            "columns that are no class were left out: ``, `note`"
        ]
    for form in ("records", "parquet"):
        body = TABLES[form](frame(ONE, note=None))
        assert_same(read(body, tmp_path / form), ONE)


@pytest.mark.parametrize("form", ["csv", "records", "parquet"])
def test_a_class_without_a_value_is_not_left_out(form: str, tmp_path: Path) -> None:
    body = TABLES[form](frame(ONE).assign(cat=None))
    with pytest.raises(InvalidUpload, match=r"'cat' is that of a class, but .* it holds no value\."):
        read(body, tmp_path)
    with pytest.raises(InvalidUpload, match=r"cat.* is missing|must hold numbers, got null"):
        read(body, tmp_path, NAMES)


@pytest.mark.parametrize("classes", [None, ("no", "yes")])
def test_a_missing_name_of_a_class_is_named(classes: tuple[str, str] | None, tmp_path: Path) -> None:
    with pytest.raises(InvalidUpload, match=r"label\[30\] is missing"):
        read(b"no,yes,label\n" + 30 * b"-0.5,1.5,yes\n" + b"1.5,0,\n", tmp_path, classes)


@pytest.mark.parametrize("classes", [None, ("no", "yes")])
def test_a_class_whose_cells_are_no_numbers_is_not_left_out(
    classes: tuple[str, str] | None, tmp_path: Path
) -> None:
    for cell in ("1,5", "high"):
        for names in ("no,yes", "p_no,p_yes"):
            table = f'{names},label\n"{cell}",0.5,no\n' + 30 * "-0.5,1.5,yes\n"
            reason = f"The column '{names.split(',')[0]}' is that of a class, but not all of its cells are "
            reason += f"numbers: it holds '{cell}'."
            with pytest.raises(InvalidUpload, match=cell if classes else re.escape(reason)):
                read(table.encode(), tmp_path, classes)


SETTLED: dict[str, tuple[bytes, Any, str, Declared]] = {
    "columns": (
        TABLES["csv"](frame(ONE, ONE.labels)), None,
        r"named as the labels name it \('0', '1', '2', '3'\).*classes=", Declared(classes=NAMES),
    ),
    "arrays": (
        npz(logits=ONE.scores, labels=ONE.named_labels()), None,
        "classes=A,B,C, or in an array `classes`", Declared(classes=NAMES),
    ),
    "an index beside columns in another order": (
        TABLES["csv"](frame(in_order(ONE, (3, 2, 1, 0)), ONE.labels)), NAMES,
        r"is the name of no class.*labels_as=index.*the class 'ape'", Declared(labels_as="index"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("body", "known", "says", "declared"), SETTLED.values(), ids=SETTLED)
def test_what_a_refusal_asks_for_settles_it(
    body: bytes, known: Any, says: str, declared: Declared, tmp_path: Path
) -> None:
    with pytest.raises(InvalidUpload, match=says):
        read(body, tmp_path, known)
    assert_same(read(body, tmp_path, known, declared), ONE)


SINGLE = given(("no", "yes"))
ODDS = SINGLE.scores[:, 1] - SINGLE.scores[:, 0]
SECOND = 1 / (1 + np.exp(-ODDS))


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize(
    ("member", "values", "declared"),
    [
        ("logits", ODDS, Declared()),
        ("probabilities", SECOND, Declared()),
        ("logits", 100 * SECOND, Declared("percent")),
        ("logits", SECOND, Declared("probabilities")),
    ],
)
@pytest.mark.parametrize("form", ["npz", "json"])
def test_one_column_of_arrays_is_the_second_class(  # noqa: PLR0917 - a test of all combinations
    form: str, member: str, values: Any, declared: Declared, shape: tuple[int, ...], tmp_path: Path
) -> None:
    arrays = {member: values.reshape(shape), "labels": SINGLE.labels}
    body = npz(**arrays) if form == "npz" else pd.Series(arrays).to_json(double_precision=15).encode()
    data = read(body, tmp_path, ("no", "yes"), declared)
    logits, labels = data.arrays()
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], ODDS, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(labels, SINGLE.labels)
    assert data.columns == "taken for the score of the second class, 'yes'"


@pytest.mark.parametrize("name", ["yes", "p_yes", "logit", "decision", "score"])
@pytest.mark.parametrize("form", TABLES)
def test_one_column_of_a_table_is_the_second_class(form: str, name: str, tmp_path: Path) -> None:
    body = TABLES[form](pd.DataFrame({name: ODDS, "label": SINGLE.named_labels()}))
    data = read(body, tmp_path)
    logits, labels = data.arrays()
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], ODDS, rtol=1e-12)
    np.testing.assert_array_equal(labels, SINGLE.labels)
    assert data.columns == "taken for the score of the second class, 'yes', read as logits"


@pytest.mark.parametrize("known", [None, ("no", "yes")])
@pytest.mark.parametrize("name", ["y_pred", "risk"])
def test_one_column_is_a_score_where_the_sender_says_so(
    name: str, known: tuple[str, str] | None, tmp_path: Path
) -> None:
    table = pd.DataFrame({name: SECOND, "label": SINGLE.named_labels()})
    logits, labels = read(TABLES["csv"](table), tmp_path, known, Declared("probabilities")).arrays()
    np.testing.assert_allclose(logits[:, 1] - logits[:, 0], ODDS, rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(labels, SINGLE.labels)
    with pytest.raises(
        InvalidUpload, match="'yes' is missing"
    ):  # not the second class: its column is the first's
        read(TABLES["csv"](table.rename(columns={name: "no"})), tmp_path, ("no", "yes"), Declared("logits"))


def test_all_other_columns_are_named_at_once(tmp_path: Path) -> None:
    body = frame(ONE, index=1, probability=0.5).to_csv(index=False).encode()
    for known in (None, NAMES):
        with pytest.raises(
            InvalidUpload, match=r"'index'.* Leave it and 1 more out with ignore=index,probab"
        ):
            read(body, tmp_path, known)


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        (
            "split",
            ["val", "Train"],
            r"the data a row is \('Train', 'val'\).* those alone, with ignore=split\.",
        ),
        ("data_split", ["train"], "which part"),
        ("is_train", [False, True], "which part"),
        ("in_training", [0, 1], "which part"),
        ("Subset", ["test", "val"], None),
        ("is_train", [0], None),
        (
            "patient_id",
            range(7),
            r"rows have 7 values of 'patient_id'.* together, set group=patient_id; else leave it",
        ),
        ("Patient ID", ["a", "b"], "2 values of 'Patient ID'"),
        ("user", ["a"], None),
        ("customer", None, None),
        ("client", ["a", None], None),
    ],
)
def test_rows_of_several_parts_or_units_are_refused(
    name: str, values: Sequence[Any] | None, says: str | None, tmp_path: Path
) -> None:
    """With values that repeat, or none that do; a column of numbers is refused for another reason then."""
    table = frame(ONE)
    table[name] = np.resize([f"c{n}" for n in range(len(table))] if values is None else values, len(table))
    for kind, write in TABLES.items():
        if says:
            with pytest.raises(InvalidUpload, match=says):
                read(write(table), tmp_path / kind, NAMES)
            with pytest.raises(InvalidUpload, match=says):
                read(write(table), tmp_path / kind, None)
            read(write(table), tmp_path / kind, NAMES, Declared(ignore=(name,)))
        elif pd.api.types.is_string_dtype(table[name]):
            read(write(table), tmp_path / kind, NAMES)


def test_one_column_of_another_name_or_kind_is_refused(tmp_path: Path) -> None:
    for name, scores, says in (
        ("id", ODDS, r"one column for each class.*`id`\. If `id` is the score of 'yes', set scores=prob"),
        ("score", SECOND, r"all between 0 and 1. Set scores=probabilities"),
        (
            "confidence",
            np.rint(100 * SECOND),
            r"between 0 and 100. Set scores=percent if they are percentages",
        ),
        (
            "confidence",
            [f"{100 * p:.1f} %" for p in SECOND],
            "numbers of `confidence` without %, and set scores=p",
        ),
    ):
        with pytest.raises(InvalidUpload, match=says):
            read(TABLES["csv"](pd.DataFrame({name: scores, "label": SINGLE.named_labels()})), tmp_path)
    with pytest.raises(InvalidUpload, match=r"must have the shape \(N, 4\)"):
        read(npz(logits=ODDS, labels=SINGLE.labels), tmp_path, NAMES)


def test_one_score_of_known_classes_is_named(tmp_path: Path) -> None:
    body = b"id,age,probability,label\n" + b"1,30,0.25,0\n2,40,0.75,1\n" * 9
    says = r"'id' is no class of the model .* If `probability` is the score of '1', set ignore=id,age\.$"
    with pytest.raises(InvalidUpload, match=says):
        read(body, tmp_path, ("0", "1"))


def test_several_labels_at_once_are_named(tmp_path: Path) -> None:
    hot = np.eye(4)[ONE.labels]
    with pytest.raises(InvalidUpload, match=r"one-hot.*argmax"):
        read(npz(logits=ONE.scores, labels=hot), tmp_path)
    hot[:5, 0], hot[10] = 1, 0
    several = int((hot.sum(axis=1) > 1).sum())
    for body in (
        npz(logits=ONE.scores, labels=hot.astype(int)),
        pd.Series({"logits": ONE.scores, "labels": hot.astype(int)}).to_json(double_precision=15).encode(),
    ):
        with pytest.raises(InvalidUpload, match=f"several labels at once: {several} rows .*, 1 have none"):
            read(body, tmp_path)


def zipped(name: str, content: bytes = b"", *others: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for one in (name, *others):
            archive.writestr(one, content)
    return out.getvalue()


def saved_by_torch() -> bytes:
    out = io.BytesIO()
    torch.save({"logits": torch.zeros(3, 2)}, out)
    return out.getvalue()


CSV = frame(ONE).to_csv(index=False)
FOREIGN = {
    "label": (CSV.replace("label", "Label", 1).encode(), "`Label` is it, set label=Label"),
    "target": (CSV.replace("label", "target", 1).encode(), "`target` is it, set label=target"),
    "fraud": (CSV.replace("label", "fraud", 1).encode(), r"`fraud`\. Name it: label=NAME"),
    "percent signs": (b"no,yes,label\n" + 30 * b"12.5%,87.5%,yes\n", "it holds '87.5%'"),
    "a header alone": (b"ape,utf_bee,label\n", r"^The table has no rows\.$"),
    "no header": (CSV.partition("\n")[2].replace(",ape", ",0").encode(), "needs one column `label`"),
    "numbers alone": (b"0.1,2,0\n" * 30, "first line holds numbers: add a line that names the columns"),
    "spaces": (CSV.replace(",", " ").encode(), r"first line has no comma, .* save tables with commas\.$"),
    "CSV for the Macintosh": (CSV.replace("\n", "\r").encode(), "lines end with CR alone.* CSV in UTF-8"),
    "UTF-16": (CSV.encode("utf-16"), "text in UTF-16; save it in UTF-8"),
    "comment": (f"# made today\n{CSV}".encode(), "begins with a comment"),
    "cells at the end": (CSV.replace("\n", ",\n").replace(",\n", "\n", 1).encode(), "end with a delimiter"),
    "pickle": (pickle.dumps({"logits": [1]}), "it is a pickle, which is never opened"),
    "torch.save": (zipped("archive/data.pkl"), "saved by torch.save"),
    "torch.save, 64-bit": (saved_by_torch(), "saved by torch.save"),
    "MATLAB": (b"MATLAB 5.0 MAT-file, " + bytes(200), "a file of MATLAB"),
    "a header in Windows-1252": ("chât,p,label\n1,2,0\n".encode("cp1252"), r"byte\. Save it in UTF-8\.$"),
    "a cell in Windows-1252": (b"p,q,label\n1,2,a\n2,1,b\n1,2,ch\xe2t\n", r"UTF8 data\. Save it in UTF-8\.$"),
    "labels in another case": (
        CSV.replace(",ape", ",Ape").replace(",bee", ",BEE").encode(),
        "are `ape`, .* differ from the labels in upper and lower case alone",
    ),
    "labels of one class": (
        b"ape,bee,cat,label\n" + b"1,2,0,bee\n" * 30,
        "classes=a,b,c. All labels are 'bee', which leaves open what the other columns are.$",
    ),
    "one score beside numbers": (
        b"id,age,probability,label\n" + b"1,30,0.25,0\n2,40,0.75,1\n" * 9,
        "If `probability` is the score of '1', set ignore=id,age.$",
    ),
    "labels that are missing": (
        f"{CSV}1,2,3,4,NA\n".encode(),
        r"are `ape`, `bee`, `cat`, `dog`. If 'NA' says that a label is missing, leave out those rows\.$",
    ),
    "rows of no scores": (
        json.dumps({"logits": [[]] * 30, "labels": [0] * 30}).encode(),
        "`logits` has no numbers in its rows; it needs one for each class",
    ),
    "a table by columns": (
        frame(ONE).to_json().encode(),
        r"member 'ape'; .* A table is a list with an object for each row\.$",
    ),
    "xlsx": (zipped("xl/workbook.xml", b"", "xl/media/image1.png"), "Excel file"),
    "ods": (zipped("mimetype", b"", "content.xml", "Thumbnails/thumbnail.png"), "OpenDocument"),
    "the delimiter for Excel": (b"sep=;\r\n" + CSV.replace(",", ";").encode(), "Excel; remove that line"),
    "zipped CSV": (zipped("t.csv", CSV.encode()), "a table in a .zip; unpack it, or compress it with gzip"),
    "damaged gzip": (gzip.compress(CSV.encode())[:-9], "no readable .gz"),
    "xz": (b"\xfd7zXZ\x00" + bytes(40), "compressed with xz"),
    "HTML": (b"<!doctype html>\n<p>a,b,label", "HTML or XML"),
    "a comment in HTML": (b"<!-- a,b,label -->\n<p>", "HTML or XML"),
    "XML": (b'<?xml version="1.0"?>\n<a>,', "HTML or XML"),
    "rows of numbers in JSON": (b"[0.5, 1]\n[1, 2]\n", "it is a list in JSON; records are read"),
    "a list in JSON, over lines": (b"[0.5,\n1,\n", "it is a list in JSON; records are read"),
    "one .npy": (
        npz(a=np.ones(3))[:0] + b"\x93NUMPY" + bytes(50),
        r"one .npy array; .* \(with --labels FILE\)",
    ),
    "the predicted class alone": (
        b"label,predicted,confidence\n" + b"ape,ape,0.9\nbee,cat,.7\ncat,cat,.8\n" * 9,
        "are `confidence`; `predicted` holds 'ape'. .*scores of all classes.* 1 if the prediction is right",
    ),
    "a list of lists": (b'[[{"label": "ape", "score": 0.9}, ...', "it is a list in JSON; records are read"),
    "an empty list": (
        b'[{"label": 0, "logits": []}, {"label": 1, "logits": []}]',
        "must hold lists of numbers",
    ),
    "pairs of one label": (
        b'[{"label": 0, "p": [{"label": "a", "score": null}, {"label": "a", "score": 0.5}]}, {"label": 1}]',
        r"A record of the document has more than one value of 'p\.a'",
    ),
    "records that differ": (b'[{"a": 1, "label": 0}, {"b": 1}]', "Record 1 .* members of the first"),
    "a line cut off": (b'{"a": 1, "label": 0}\n\n{"a": 1', "Line 3 of the document is not JSON"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_files_are_named_for_what_they_are(name: str, tmp_path: Path) -> None:
    body, says = FOREIGN[name]
    with pytest.raises(BoxcalError, match=says):
        read(body, tmp_path)


@pytest.mark.parametrize("form", TABLES)
def test_the_column_of_labels_can_be_named(form: str, tmp_path: Path) -> None:
    body = TABLES[form](frame(ONE).rename(columns={"label": "target"}))
    assert_same(read(body, tmp_path, declared=Declared(label="target")), ONE)


@pytest.mark.parametrize("note", ["note", "anote"], ids=["last", "first"])
def test_line_breaks_within_cells_end_no_row(note: str, tmp_path: Path) -> None:
    """In a file of several blocks: a row of the table within a cell is none."""
    labels = np.arange(30_000) % 2
    texts = ["first line" + "\n0.5,-0.5,1,x" * (row % 40) for row in range(30_000)]
    table = pd.DataFrame({"0": labels - 0.5, "1": 0.5 - labels, "label": labels, note: texts})
    body = table[sorted(table)].to_csv(index=False).encode()
    assert len(body) > 1.2 * BLOCK_BYTES
    for declared in (Declared(), Declared(ignore=(note,))):
        logits, found = read(body, tmp_path / str(declared.ignore), ("0", "1"), declared).arrays()
        np.testing.assert_array_equal(found, labels)
        np.testing.assert_array_equal(logits[:, 0], labels - 0.5)


@pytest.mark.parametrize(
    ("start", "whole"),
    [
        (b"a,b\n1,2\n3,", b"a,b\n1,2\n"),
        (b'a,b\n1,"x\ny",\n2,"x\nz', b'a,b\n1,"x\ny",\n'),
        (b'a,b\n1,"x\ny","z\n', b"a,b\n"),
        (b'"a\nb', b""),
        (b"a,b", b""),
    ],
)
def test_the_first_bytes_of_a_table_end_with_a_row(start: bytes, whole: bytes) -> None:
    assert _whole_rows(start) == whole


@pytest.mark.parametrize("form", TABLES)
def test_the_column_of_groups_can_be_named(form: str, tmp_path: Path) -> None:
    patients = np.arange(len(ONE.labels)) // 2
    body = TABLES[form](frame(ONE).assign(**{"Patient ID ": patients, "group": 1.5}))
    data = read(body, tmp_path, declared=Declared(group="Patient ID", ignore=("group",)))
    assert_same(data, ONE)
    pairs = set(zip(data.grouping["groups"].tolist(), patients.tolist(), strict=True))
    assert len(pairs) == len(set(patients))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("patent", r"no column `patent` of groups; did you mean 'patient'\? Its columns are 'ape', 'bee', "),
        ("bee", "`bee` is that of the labels, of a class or of a feature, not of groups"),
        ("label", "`label` is that of the labels"),
    ],
)
def test_a_column_that_holds_no_groups_is_refused(name: str, says: str, tmp_path: Path) -> None:
    body = TABLES["csv"](frame(ONE).assign(patient=1))
    with pytest.raises(InvalidUpload, match=says):
        read(body, tmp_path, NAMES, Declared(group=name))


@pytest.mark.parametrize(
    ("start", "is_named", "kind"),
    [
        (b"text\nhello\n", True, "csv"),
        (b"text\nhello\n", False, None),
        (b"score\r\n-1.5e-3\r\n", False, "csv"),
        (b"0.5\n0.25\n", True, None),
        (b"0.5\n0.25\n", False, None),
        (b"<p>\n1\n", True, None),
        (b"a\0b\n1\n", True, None),
        (b"a\x01b\n1\n", True, None),
        (b"text", True, None),
        (b"sep=;\r\na;b\r\n", True, None),
    ],
)
def test_a_table_of_one_column_has_numbers_or_the_name_of_a_csv(
    start: bytes, is_named: bool, kind: str | None
) -> None:
    assert table_kind(start, is_csv=is_named) == kind


def test_gzip_is_unpacked_within_the_limit(tmp_path: Path) -> None:
    with pytest.raises(BoxcalError, match=r"unpacks to more than 10,000,000 bytes"):
        read(gzip.compress(bytes(20_000_000)), tmp_path)
