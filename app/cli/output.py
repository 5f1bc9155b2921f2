"""What a command shows: one JSON document on stdout for scripts, or tables and a progress bar for people."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

screen = Console(highlight=False)
messages = Console(stderr=True, highlight=False)

Advance = Callable[[float, str], None]
"""Takes a fraction from 0 to 1 and the name of the present stage."""


def write_json(document: Any) -> None:
    """Write the one document of a `--json` run."""
    json.dump(document, sys.stdout, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """Show progress on stderr while the block runs; nothing where that is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("[dim]{task.fields[stage]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as bar:
        task = bar.add_task(title, total=1.0, stage="")

        def advance(fraction: float, stage: str) -> None:
            bar.update(task, completed=fraction, stage=stage)

        yield advance


def show_warnings(warnings: Iterable[Mapping[str, Any]], file: Path | None = None) -> None:
    """Show what is wrong with data: on stderr with the name of a file, or as a part of the result."""
    console, name = (screen, "") if file is None else (messages, f"{escape(file.name)}: ")
    for warning in warnings:
        style = "bold red" if warning["severity"] == "serious" else "yellow"
        said = f"[{style}]{warning['severity']}[/]: {escape(warning['message'])}"
        console.print(name + said, soft_wrap=True)


def plain_table(*headings: str) -> Table:
    """Start a table whose first column is text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position == 0 else "right", overflow="fold")
    return table
