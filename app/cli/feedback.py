"""`boxcal feedback`: sends a file of true labels to a service, in parts."""

# ruff: noqa: PLC0415 - help needs none of what is imported late

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from boxcal.app.cli.options import Json
from boxcal.app.cli.output import UsageError, escape, messages, naming, plain_table, screen, write_json
from boxcal.app.cli.validation import unpacked

if TYPE_CHECKING:
    from boxcal.app.client import BoxcalClient, Feedback

ITEMS_PER_REQUEST = 1000
COUNTS = ("accepted", "duplicates", "conflicts", "unknown", "expired", "malformed")


def feedback(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="`.csv` or `.parquet`, also as `.gz`, with the columns id and label, and perhaps propensity "
            "and source.",
        ),
    ],
    *,
    url: Annotated[
        str, typer.Option(envvar="BOXCAL_URL", help="Address of the service.")
    ] = "http://127.0.0.1:8000",
    as_json: Json = False,
) -> None:
    """Send the true labels of earlier predictions to a service."""
    from boxcal.app.client import BoxcalClient

    with BoxcalClient(url) as client:
        parts = list(_sent(client, file))
    if not parts:
        raise UsageError(f"{file} has no rows")
    counts = {name: sum(getattr(part, name) for part in parts) for name in COUNTS}
    if as_json:
        write_json({"seq": parts[-1].seq, **counts})
        return
    table = plain_table("items", "count")
    for name, count in counts.items():
        table.add_row(name, str(count))
    screen().print(table)
    for problem in [problem for part in parts for problem in part.problems][:5]:
        messages().print(escape(problem.detail))


def _sent(client: BoxcalClient, path: Path) -> Iterator[Feedback]:
    """Send the rows of a file, or the file itself where the packages that read tables are missing."""
    from boxcal.app.client.calls import TABLES

    try:
        import boxcal.app.tables.label_rows  # noqa: F401
    except ModuleNotFoundError:
        if path.suffix.lower() not in TABLES:
            raise
        yield client.feedback(path)
    else:
        for items in _parts(path):
            yield client.feedback(items)


def _parts(path: Path) -> Iterator[list[Any]]:
    """Yield the items of a file, some at a time."""
    from boxcal.app.tables.formats import open_table, readable
    from boxcal.app.tables.kinds import START_BYTES, table_kind
    from boxcal.app.tables.label_rows import finite, label_rows

    part: list[Any] = []
    with naming(path), unpacked(path) as plain, plain.open("rb") as file:
        kind = table_kind(file.peek(START_BYTES)) or "csv"
        with readable(kind):
            for row in label_rows(open_table(file, kind)):
                part.append(finite(row))
                if len(part) == ITEMS_PER_REQUEST:
                    yield part
                    part = []
    if part:
        yield part
