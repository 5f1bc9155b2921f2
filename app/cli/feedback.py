"""`boxcal feedback`: sends a file of true labels to a service, in parts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from boxcal.app.cli.failures import UsageError
from boxcal.app.cli.output import messages, plain_table, screen, write_json
from boxcal.app.cli.tables import csv_rows, json_numbers, parquet_file
from boxcal.app.client import BoxcalClient, Feedback

ITEMS_PER_REQUEST = 1000
COUNTS = ("accepted", "duplicates", "conflicts", "unknown", "expired", "malformed")
COLUMNS = {"id", "label", "propensity", "source", "key", "logits"}


def run(file: Path, *, url: str, as_json: bool) -> None:
    """Send every row; show what became of them."""
    parts: list[Feedback] = []
    with BoxcalClient(url) as client:
        names = {str(name) for name in client.model()["labels"]}
        for items in _parts(file, names):
            parts.append(client.feedback(items))
    if not parts:
        raise UsageError(f"{file} has no rows")
    counts = {name: sum(getattr(part, name) for part in parts) for name in COUNTS}
    if as_json:
        write_json({"seq": parts[-1].seq, **counts})
        return
    table = plain_table("items", "count")
    for name, count in counts.items():
        table.add_row(name, str(count))
    screen.print(table)
    for problem in [problem for part in parts for problem in part.problems][:5]:
        messages.print(problem.detail, markup=False)


def _parts(file: Path, names: set[str]) -> Iterator[list[Any]]:
    """Yield the items of a file, some at a time."""
    rows = _parquet_items(file) if file.suffix.lower() in (".parquet", ".pq") else _csv_items(file, names)
    part: list[Any] = []
    for row in rows:
        part.append({name: value for name, value in row.items() if value is not None})
        if len(part) == ITEMS_PER_REQUEST:
            yield part
            part = []
    if part:
        yield part


def _csv_items(file: Path, names: set[str]) -> Iterator[dict[str, Any]]:
    with csv_rows(file) as rows:
        _check_columns(file, rows.fieldnames or ())
        for place, row in enumerate(rows):
            item: dict[str, Any] = {name: value for name, value in row.items() if name and value}
            label = item.get("label", "")
            if label not in names and label.isdecimal():
                item["label"] = int(label)
            if "propensity" in item:
                item["propensity"] = _number(item["propensity"], file, rows.line_num)
            if "logits" in item:
                item["logits"] = json_numbers(file, place, item["logits"])
            yield item


def _parquet_items(file: Path) -> Iterator[dict[str, Any]]:
    with parquet_file(file) as opened:
        _check_columns(file, opened.schema_arrow.names)
        for batch in opened.iter_batches(ITEMS_PER_REQUEST):
            yield from batch.to_pylist()


def _check_columns(file: Path, columns: Any) -> None:
    found = set(columns)
    if "label" not in found or not ({"id"} <= found or {"key", "logits"} <= found) or found - COLUMNS:
        raise UsageError(
            f"{file} has the columns {', '.join(map(str, columns)) or 'none'}; it needs id and label (or "
            "key, logits and label), and may have propensity and source"
        )


def _number(text: str, file: Path, line: int) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{file}, line {line}: propensity is {text!r}, not a number") from None
