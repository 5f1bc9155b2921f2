"""Files that become checked validation sets."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from boxcal.app.tables.columns import choose_columns
from boxcal.app.tables.formats import open_table
from boxcal.app.tables.labels import NOTHING
from boxcal.app.tables.sample_schema import ModelInputs
from boxcal.app.tables.values import samples_of_batch
from boxcal.models.inputs.rows import Column
from tests.app.fitting.files import (
    LABELS,
    LOGITS,
    PROBABILITIES,
    K,
    arrow,
    by_class,
    changed,
    compressed,
    csv,
    document,
    parquet,
    read_bytes,
    written,
    written_lists,
)
from tests.app.fitting.validation_data import npz

LISTS = {"logits": LOGITS.tolist(), "labels": LABELS.tolist()}
GOOD: dict[str, Callable[[], bytes]] = {
    "float32": lambda: npz(logits=LOGITS, labels=LABELS),
    "float64": lambda: npz(logits=LOGITS.astype(np.float64), labels=LABELS),
    "float16": lambda: npz(logits=LOGITS.astype(np.float16), labels=LABELS),
    "big endian": lambda: npz(logits=LOGITS.astype(">f4"), labels=LABELS.astype(">i2")),
    "column order": lambda: npz(logits=np.asfortranarray(LOGITS), labels=LABELS),
    "small labels": lambda: npz(logits=LOGITS, labels=LABELS.astype(np.uint8)),
    "float labels": lambda: npz(logits=LOGITS, labels=LABELS.astype(float)),
    "labels (N, 1)": lambda: npz(logits=LOGITS, labels=LABELS[:, None]),
    "JSON, (N, 1)": lambda: document(logits=LOGITS.tolist(), labels=LABELS[:, None].astype(float).tolist()),
    "JSON, with a byte order mark": lambda: b"\xef\xbb\xbf" + document(**LISTS),
    "arrow, compressed": lambda: arrow(compression="zstd"),
    "CSV, list column": lambda: csv(written_lists()),
    "parquet, float16 by class": lambda: written(by_class(np.float16)),
    "parquet, float label": lambda: parquet(label=pa.array(LABELS * 1.0)),
    "parquet, names": lambda: parquet(label=pa.array(LABELS.astype(str))),
    "parquet, categories": lambda: parquet(label=pa.array(LABELS.astype(str)).dictionary_encode()),
    "compressed": lambda: compressed(logits=LOGITS, labels=LABELS),
    "parquet": parquet,
    "parquet, fixed lists": lambda: parquet(
        pa.FixedSizeListArray.from_arrays(pa.array(LOGITS.ravel()), K), pa.array(LABELS, pa.uint8())
    ),
    "parquet, other columns beside": lambda: parquet(names=pa.array(["a"] * 50)),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_files_are_read_as_they_are(name: str, tmp_path: Path) -> None:
    data = read_bytes(GOOD[name](), tmp_path)
    logits, labels = data.arrays()
    assert data.samples == 50
    assert logits.dtype in (np.float32, np.float64)
    np.testing.assert_allclose(logits, LOGITS, rtol=1e-3 if "float16" in name else 1e-7)
    np.testing.assert_array_equal(labels, LABELS)
    assert {path.name for path in tmp_path.iterdir()} == {"body", "columns.json", "logits.npy", "labels.npy"}


PATIENTS = np.array([f"patient {n // 4}" for n in range(50)])
WEIGHTS = np.arange(50) / 7
ARRAYS = {"logits": LOGITS, "labels": LABELS, "groups": PATIENTS, "sample_weight": WEIGHTS}
COLUMNS = by_class().append_column("group", pa.array(PATIENTS)).append_column("sample_weight", [WEIGHTS])
GROUPED: dict[str, Callable[[], bytes]] = {
    "npz": lambda: npz(**ARRAYS),
    "npz, numbers": lambda: npz(**ARRAYS | {"groups": np.arange(50)[:, None] // 4 * 7}),
    "JSON": lambda: document(**{name: array.tolist() for name, array in ARRAYS.items()}),
    "CSV": lambda: csv(COLUMNS),
    "parquet": lambda: parquet(group=pa.array(PATIENTS).dictionary_encode(), sample_weight=WEIGHTS),
    "parquet, by class": lambda: written(COLUMNS.set_column(K + 1, "group", [np.arange(50) // 4])),
    "arrow": lambda: arrow(COLUMNS.rename_columns({"group": "groups"})),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_are_kept_as_numbers_and_weights_as_they_are(name: str, tmp_path: Path) -> None:
    data = read_bytes(GROUPED[name](), tmp_path)
    groups = data.grouping["groups"]
    assert len(set(zip(groups.tolist(), PATIENTS.tolist(), strict=True))) == len(set(PATIENTS)) == 13
    np.testing.assert_allclose(data.grouping["sample_weight"], WEIGHTS, rtol=1e-12)
    np.testing.assert_array_equal(data.arrays()[1], LABELS)
    np.testing.assert_allclose(data.arrays()[0], LOGITS, rtol=1e-6)


def test_a_document_may_have_features_of_any_width(tmp_path: Path) -> None:
    features = [[float(row + column) for column in range(64)] for row in range(50)]
    kept = read_bytes(document(**LISTS, features=features), tmp_path).besides("features")
    assert kept is not None
    assert (kept.shape, kept[49, 63]) == ((50, 64), 112.0)


def test_a_decimal_comma_is_read_in_every_column_of_numbers(tmp_path: Path) -> None:
    scores = b"label;score;sample_weight\n" + b"no;-1,25;0,5\nyes;2,5e-1;1,5\n" * 15
    data = read_bytes(scores, tmp_path, classes=("no", "yes"))
    np.testing.assert_array_equal(data.arrays()[0][:2], [[0, -1.25], [0, 0.25]])
    np.testing.assert_array_equal(data.grouping["sample_weight"][:2], [0.5, 1.5])


def test_a_decimal_comma_is_read_in_features_that_are_numbers() -> None:
    """A feature of texts keeps its commas."""
    columns = (Column("height", "float32", 1), Column("code", "str", 1))
    inputs = ModelInputs("model", "features", ("no", "yes"), columns, ("height", "code"))
    table = open_table(io.BytesIO(b"label;height;code\nno;1,5;7,5\nyes;-2;8\n"), "csv")
    (batch,) = table.batches(["height", "code"], (), 10)
    samples = samples_of_batch(batch, inputs, ["height", "code"], 0)
    assert samples.tolist() == [[1.5, "7,5"], [-2.0, "8"]]


def test_probabilities_become_their_logarithms(tmp_path: Path) -> None:
    probabilities = changed(PROBABILITIES, 0, np.eye(K)[0])
    logits, _ = read_bytes(npz(probabilities=probabilities, labels=LABELS), tmp_path).arrays()
    np.testing.assert_allclose(np.exp(logits), probabilities, rtol=1e-6, atol=1e-37)
    assert np.isfinite(logits).all()


def test_sums_within_a_hundredth_are_divided_out_with_a_warning(tmp_path: Path) -> None:
    off = PROBABILITIES * np.where(np.arange(50) < 5, 0.992, 1)[:, None]
    data = read_bytes(npz(probabilities=off, labels=LABELS), tmp_path)
    np.testing.assert_allclose(np.exp(data.arrays()[0]).sum(axis=1), 1, atol=1e-5)
    message = "the probabilities of 5 samples sum to 1 only within rounding; they were divided by their sums"
    assert data.notes == [
        {"code": "probabilities_scaled", "severity": "warning", "message": message, "rows": 5}
    ]


def test_many_blocks_of_rows_are_read_like_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(700, 2000))
    labels = rng.integers(0, 2000, 700)
    names = list(map(str, range(2000)))
    data = read_bytes(npz(logits=wide, labels=labels), tmp_path, 20_000_000, names)
    np.testing.assert_array_equal(data.arrays()[0], wide)


def test_few_columns_that_may_name_units_are_looked_at() -> None:
    """Each takes a pass over the table; those of the parts of the data come first."""
    units = [word + end for word in ("patient", "user", "case") for end in ("", "s", "_id", "s_id")]
    looked: list[str] = []

    def label_values(name: str) -> tuple[list[str], int]:
        looked.append(name)
        return ["7"], 30

    names = [*units, "split", "no", "yes", "label"]
    texts = dict.fromkeys([*units, "split"], "a text")
    choose_columns(names, ("no", "yes"), NOTHING, label_values=label_values, texts=lambda: texts)
    assert looked == ["split", *units[:9]]
