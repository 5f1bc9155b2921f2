"""Tables of labels, as the worker reads them."""

import asyncio
import io
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from pyarrow import parquet

from boxcal.app.fitting.messages import BODY_FILE, ITEMS_FILE, Tabled, TableTask
from boxcal.app.fitting.server.worker_process import Worker
from boxcal.app.fitting.worker.label_table import read_labels
from boxcal.app.http.problems import BoxcalError


def converted(
    folder: Path, body: bytes, max_rows: int = 100, max_bytes: int = 10_000, max_row_bytes: int = 9_000
) -> list[Any]:
    (folder / BODY_FILE).write_bytes(body)
    rows = read_labels(TableTask(folder, max_rows, max_bytes, max_row_bytes)).rows
    items = [item for line in (folder / ITEMS_FILE).read_bytes().splitlines() for item in orjson.loads(line)]
    assert len(items) == rows
    return items


def parquet_of(columns: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pa.table(columns), file)
    return file.getvalue()


NAMES = pa.array(["dog", "cat"]).dictionary_encode()
NAN, INF = float("nan"), float("inf")
TABLES: dict[str, tuple[bytes, list[dict[str, Any]]]] = {
    "CSV": (
        b"\xef\xbb\xbfid,label,propensity,source\na,dog,0.5,\n\na,1,,me\na,7,,\n\na,1,x,\n",
        [
            {"id": "a", "label": "dog", "propensity": 0.5},
            {"id": "a", "label": "1", "source": "me"},
            {"id": "a", "label": "7"},
            {"id": "a", "label": "1", "propensity": "x"},
        ],
    ),
    "CSV of logits": (
        b'key,logits,label\nx,"[1.5, 2, 3]",cat\ny,nothing,0\n',
        [
            {"key": "x", "logits": [1.5, 2, 3], "label": "cat"},
            {"key": "y", "logits": "nothing", "label": "0"},
        ],
    ),
    "names": (
        parquet_of({"id": ["a", "b"], "label": NAMES, "propensity": [0.5, None]}),
        [{"id": "a", "label": "dog", "propensity": 0.5}, {"id": "b", "label": "cat"}],
    ),
    "logits": (
        parquet_of({"key": ["x"], "label": [2], "logits": [[1.5, -2.0, 3.0]]}),
        [{"key": "x", "label": 2, "logits": [1.5, -2.0, 3.0]}],
    ),
    "not finite": (
        parquet_of({"key": ["x"], "label": [2], "propensity": [NAN], "logits": [[1.5, -INF, NAN]]}),
        [{"key": "x", "label": 2, "propensity": None, "logits": [1.5, "-inf", None]}],
    ),
    "an infinite propensity": (
        parquet_of({"id": ["a"], "label": [2], "propensity": [INF]}),
        [{"id": "a", "label": 2, "propensity": "inf"}],
    ),
    "CSV, an index of pandas": (b",id,label,Unnamed: 0\n0,a,cat,0\n", [{"id": "a", "label": "cat"}]),
    "Parquet, an index of pandas": (
        parquet_of({"id": ["a"], "label": [1], "__index_level_0__": [3]}),
        [{"id": "a", "label": 1}],
    ),
    "decimals": (
        parquet_of(
            {
                "id": ["a"],
                "label": pa.array([2]).cast(pa.decimal128(38, 0)),
                "propensity": pa.array([0.25]).cast(pa.decimal128(9, 2)),
            }
        ),
        [{"id": "a", "label": 2, "propensity": 0.25}],
    ),
    "CSV, an infinite propensity": (
        b"id,label,propensity\na,1,inf\nb,1,nan\n",
        [{"id": "a", "label": "1", "propensity": "inf"}, {"id": "b", "label": "1", "propensity": None}],
    ),
    "CSV with decimal commas": (
        b"id; label; propensity\na;dog;0,5\nb;cat; 1\n",
        [{"id": "a", "label": "dog", "propensity": 0.5}, {"id": "b", "label": "cat", "propensity": 1.0}],
    ),
    "Parquet with spaces": (
        parquet_of({" id": ["a"], "label ": [1], "propensity ": [0.5]}),
        [{"id": "a", "label": 1, "propensity": 0.5}],
    ),
}
for cell in ("[NaN]", "[1e400, Infinity]", "[" * 5000, "[" + "1" * 5000 + "]"):
    table = f'key,logits,label\nx,"{cell}",0\n'.encode()
    TABLES[f"no JSON: {cell[:9]}"] = (table, [{"key": "x", "logits": cell, "label": "0"}])


@pytest.mark.parametrize(("body", "items"), TABLES.values(), ids=TABLES)
def test_tables_become_items(tmp_path: Path, body: bytes, items: list[dict[str, Any]]) -> None:
    assert converted(tmp_path, body) == items


@pytest.mark.parametrize(("rows", "lines"), [(0, 1), (1638, 1), (1639, 1), (1640, 2), (4917, 3), (4918, 4)])
def test_lines_end_with_the_item_that_makes_them_64_kib(tmp_path: Path, rows: int, lines: int) -> None:
    body = b"id,label\n" + b"aaaaaaaaaaaaaaaaaaa,1\n" * rows  # 40 bytes each as JSON
    assert len(converted(tmp_path, body, 50_000, 2**25)) == rows
    written = (tmp_path / ITEMS_FILE).read_bytes().splitlines()
    assert len(written) == lines
    assert max(map(len, written)) <= 65_560 + 1640 + 1


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"label\n1\n", "it needs label and id"),
        (b"id,label,other\na,1,2\n", "other"),
        (b"id,label,label\na,1,2\n", "label"),
        (b"\xff\xfe", "no readable .csv"),
        (b'id,label\n"a,1\n', "no readable .csv"),
        (b"id,label\na,1\na\n", "no readable .csv.*Expected 2 columns, got 1"),
        (b"id,label\n" + b"a,1\n" * 101, "more than 100 rows"),
        (b"id,label\n" + b"a" * 10_000 + b",1\n", "more than 10,000 bytes"),
        (b"id,label\n" + b"a" * 10_001 + b",1\n", "more than 10,000 bytes"),
        (b"id,label\na,1\n" + b"a" * 9_000 + b",1\n", "Row 2 of the table has 9,021 bytes as JSON"),
        (b"PAR1 and something else", "no readable .parquet"),
        (parquet_of({"id": ["a"], "label": [True]}), "The column `label` has the type bool"),
        (parquet_of({"id": [1], "label": [1]}), "The column `id` has the type int64"),
        (parquet_of({"key": ["a"], "label": [1], "logits": ["1"]}), "The column `logits`"),
        (parquet_of({"id": ["a"] * 200, "label": [1] * 200}), "more than 100 rows"),
        (parquet_of({"id": ["a"], "label": [1], "more": [1]}), "more"),
    ],
)
def test_what_is_no_table_of_labels_is_refused(tmp_path: Path, body: bytes, says: str) -> None:
    with pytest.raises(BoxcalError, match=says):
        converted(tmp_path, body)


LONGEST = 2**19
LONG_CELLS = {
    "The cell in row 2 of the column `logits` has 3,800,003 bytes; the limit is 524,288.": (
        b'key,label,logits\na,0,"[1]"\na,0,"[' + b"1," * 1_900_000 + b'1]"\n'
    ),
    "The cell in row 1 of the column `id` has 524,289 bytes; the limit is 524,288.": (
        b"id,label\n" + b"1" * (LONGEST + 1) + b",0\n"
    ),
    "The cell in row 3 of the column `logits` has 524,296 bytes; the limit is 524,288.": (
        parquet_of({"key": ["a"] * 3, "label": [0] * 3, "logits": [[0.0], [0.0], [0.0] * 65_537]})
    ),
    "The cell in row 2 of the column `id` has 524,289 bytes; the limit is 524,288.": (
        parquet_of({"id": pa.array(["a", "b" * (LONGEST + 1)]).dictionary_encode(), "label": [0, 0]})
    ),
}


@pytest.mark.parametrize(("says", "body"), LONG_CELLS.items(), ids=LONG_CELLS)
def test_a_cell_that_is_too_long_is_refused_with_its_place(tmp_path: Path, body: bytes, says: str) -> None:
    with pytest.raises(BoxcalError) as caught:
        converted(tmp_path, body, 100, 2**25, 2**22)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(b'a,0,"[' + b"1," * 262_142 + b'1]"\n', id="numbers"),
        pytest.param(b"a,0," + b"\1" * 2**19 + b"\n", id="text"),
    ],
)
def test_the_longest_cells_fit_in_the_memory_of_a_worker(tmp_path: Path, row: bytes) -> None:
    (tmp_path / BODY_FILE).write_bytes(b"key,label,logits\n" + row * 30)

    async def read() -> int:
        worker = Worker(240)
        try:
            task = TableTask(tmp_path, 50_000, 2**27, 2**22, (256 + 64) * 2**20)
            return (await worker.run(task, Tabled)).rows
        finally:
            await worker.close()

    assert asyncio.run(read()) == 30
