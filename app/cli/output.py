"""What a command shows: one JSON document on stdout for scripts, or tables and a progress bar for people.

An error that a user can cause is one line and an exit code, without a traceback. Rich is imported with
the first line that it formats: `boxcal serve` starts without it.
"""

# ruff: noqa: PLC0415 - see above

from __future__ import annotations

import http
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer.exceptions import TyperException

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

EXTRAS = {
    "pyarrow": "tables",
    "psycopg": "postgres",
    **dict.fromkeys(("matplotlib", "numba", "orjson", "pydantic_settings"), "methods"),
    **dict.fromkeys(("PIL", "safetensors", "scipy", "threadpoolctl"), "methods"),
    "sklearn": "calibrators",
    **dict.fromkeys(("fastapi", "fastapi_offline", "google", "httptools", "onnx"), "onnx"),
    **dict.fromkeys(("onnxruntime", "prometheus_client", "sqlalchemy", "uvicorn", "uvloop"), "onnx"),
}
"""Packages, and the extras that bring them; any other is in `serve`."""
ON_FILES = ("fit", "evaluate", "compare", "monitor", "feedback")
"""Commands that need no more than the methods: those are in `calibrators`, and in `onnx` with the service."""

Advance = Callable[[float, str], None]
"""Takes a fraction from 0 to 1 and the name of the present stage."""


@cache
def screen() -> Console:
    from rich.console import Console

    return Console(highlight=False)


@cache
def messages() -> Console:
    """Return the console that writes to stderr."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def printable(text: str) -> str:
    """Write what a terminal would obey as Python does in a literal."""
    return "".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in text)


def escape(text: str) -> str:
    """Show a text as it is: neither markup in it nor what a terminal would obey has an effect."""
    shown = printable(text)
    if "[" not in shown and not shown.endswith("\\"):
        return shown
    from rich import markup

    return markup.escape(shown)


def write_json(document: Any) -> None:
    """Write the one document of a `--json` run."""
    is_ascii = "utf" not in (sys.stdout.encoding or "").lower()
    text = json.dumps(document, ensure_ascii=is_ascii, allow_nan=False)
    # JSON lets the control characters above 127 pass, which terminals obey.
    sys.stdout.write("".join(one if one.isprintable() else _escaped(one) for one in text) + "\n")


def _escaped(character: str) -> str:
    """Write a character as JSON does, by the units of UTF-16: two above U+FFFF."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


@contextmanager
def progress_bar(title: str) -> Iterator[Advance]:
    """Show progress on stderr while the block runs; nothing where that is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("[dim]{task.fields[stage]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=messages(), transient=True, disable=not messages().is_terminal) as bar:
        task = bar.add_task(title, total=1.0, stage="")

        def advance(fraction: float, stage: str) -> None:
            bar.update(task, completed=fraction, stage=stage)

        yield advance


def show_warnings(warnings: Iterable[Mapping[str, Any]], file: Path | None = None) -> None:
    """Show what is wrong with data: on stderr with the name of a file, or as a part of the result."""
    console, name = (screen(), "") if file is None else (messages(), f"{escape(file.name)}: ")
    for warning in warnings:
        style = "bold red" if warning["severity"] == "serious" else "yellow"
        said = f"[{style}]{warning['severity']}[/]: {escape(warning['message'])}"
        console.print(name + said, soft_wrap=True)


def plain_table(*headings: str) -> Table:
    """Start a table whose first column is text and whose others are numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position == 0 else "right", overflow="fold")
    return table


FAILED, MISUSED, UNAVAILABLE = 1, 2, 3

EXIT_CODES = (
    "Exit codes: 0 success; 1 the operation failed; 2 invalid usage or input; 3 the service cannot start, is "
    "unreachable or is temporarily unavailable; 130 interrupted."
)


DECLARED = r"\b(scores|label|group|classes|ignore|labels_as|class_mix)="
"""Options that say what a file holds, as errors about uploads write them."""


class UsageError(Exception):
    """The arguments of a command do not make sense together; the message says which."""


def check_outputs(outputs: Iterable[Path | None], *sources: Path | None) -> None:
    """Refuse, before any work, outputs that cannot be written or would replace what is read."""
    read = [source for source in sources if source is not None and source.exists()]
    for path in filter(None, outputs):
        if path.is_dir():
            raise UsageError(f"{path} is a folder; name a file in it")
        if not path.parent.is_dir():
            raise UsageError(f"{path}: there is no folder {path.parent}")
        if path.exists() and any(path.samefile(source) for source in read):
            raise UsageError(f"{path} is the source itself; name another file")


class CannotStart(Exception):
    """Something that the service needs is not there; the message says what."""


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of a file before an error about its content, and write the options as they are typed."""
    from boxcal.app.http.problems import BoxcalError
    from boxcal.calibrators.errors import CalibrationError

    try:
        yield
    except (BoxcalError, CalibrationError) as error:
        raise UsageError(f"{path}: {_typed(str(error))}") from error


def _typed(message: str) -> str:
    return re.sub(DECLARED, lambda found: f"--{found[1].replace('_', '-')} ", message)


def failure_of(error: Exception) -> tuple[str, int] | None:
    """Return the message and exit code of an error that a user or the service causes, None for a defect.

    Only packages that are loaded already are asked, so that an error costs no imports.
    """
    if isinstance(error, TyperException):
        return str(getattr(error, "format_message", error.__str__)()), getattr(error, "exit_code", MISUSED)
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("boxcal"):
        extra = EXTRAS.get(str(error.name).partition(".")[0], "serve")
        if extra == "methods":
            extra = "calibrators" if sys.argv[1:2] and sys.argv[1] in ON_FILES else "onnx"
        return f"this command needs the package {error.name}: pip install 'boxcal[{extra}]'", MISUSED
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}", MISUSED
    if isinstance(error, MemoryError):  # of NumPy, with the array; of Python, without a word
        return f"this machine has too little memory for it: {error or 'an allocation failed'}", FAILED
    for kind, code in _kinds():
        if isinstance(error, kind):
            is_temporary = getattr(error, "status", None) == http.HTTPStatus.SERVICE_UNAVAILABLE
            return " ".join(_with_service(error).split()), UNAVAILABLE if is_temporary else code
    return None


def _with_service(error: Exception) -> str:
    """Give the message as `naming` does, and name the service that refused where only BOXCAL_URL chose it."""
    client, url = sys.modules.get("boxcal.app.client.errors"), os.environ.get("BOXCAL_URL")
    is_named = any(argument.startswith("--url") for argument in sys.argv)
    if client is None or not isinstance(error, client.ProblemError):
        return str(error)
    if not url or is_named:
        return _typed(str(error))
    return f"{_typed(error.detail)} (HTTP {error.status} from {url}, the service that BOXCAL_URL names)"


def _kinds() -> list[tuple[type[Exception], int]]:
    kinds: list[tuple[type[Exception], int]] = [
        (UsageError, MISUSED),
        (CannotStart, UNAVAILABLE),
        (OSError, MISUSED),
    ]
    for module, name, code in (
        ("boxcal.app.client.errors", "UnavailableError", UNAVAILABLE),
        ("boxcal.app.client.errors", "TransportError", UNAVAILABLE),
        ("boxcal.app.client.errors", "InvalidRequestError", MISUSED),
        ("boxcal.app.client.errors", "InvalidUrlError", MISUSED),
        ("boxcal.app.client.errors", "InvalidKeyError", MISUSED),
        ("boxcal.app.client.errors", "ClientError", FAILED),
        ("boxcal.app.http.problems", "BoxcalError", MISUSED),
        ("boxcal.calibrators.errors", "CalibrationError", MISUSED),
        ("boxcal.models", "BackboneError", MISUSED),
    ):
        if module in sys.modules:
            kinds.append((getattr(sys.modules[module], name), code))
    return kinds


TITLES = {
    "error_rate": "error rate",
    "nll": "NLL",
    "brier": "Brier score",
    "ece_width": "ECE (equal width)",
    "ece_mass": "ECE (equal mass)",
    "smooth_ece": "smooth ECE",
    "debiased_ece": "debiased ECE",
    "ks": "KS error",
    "classwise_ece": "classwise ECE",
    "brier_calibration": "Brier: calibration",
    "brier_refinement": "Brier: refinement",
    "mce": "MCE",
}


def metrics_table(metrics: dict[str, Any]) -> Table:
    """Lay out a report's `metrics`: each value with its 95 % interval, and the paired difference."""
    table = plain_table("", "before", "after", "difference (95 % interval)")
    for name, sides in metrics.items():
        table.add_row(
            TITLES.get(name, name),
            _number(sides["before"]["value"]),
            _number(sides["after"]["value"]),
            _estimate(
                sides["difference"], "infinite" if sides["after"]["value"] is None else "no longer infinite"
            ),
        )
    return table


def _estimate(estimate: dict[str, float | None], otherwise: str) -> str:
    if estimate["value"] is None:
        return otherwise
    value, low, high = (_number(estimate[part], "+.4f") for part in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _number(value: float | None, form: str = ".4f") -> str:
    return "infinite" if value is None else format(value, form)


def evaluation_table(metrics: dict[str, Any]) -> Table:
    """Lay out the metrics of one model, the calibration errors beside what perfect calibration would give."""
    table = plain_table("", "value", "95 % interval", "if calibrated", "p-value")
    for name, found in metrics.items():
        interval = f"{_number(found['low'])} to {_number(found['high'])}"
        perfect = _number(found["perfect"]) if "perfect" in found else ""
        chance = f"{found['p_value']:.3f}" if "p_value" in found else ""
        table.add_row(TITLES.get(name, name), _number(found["value"]), interval, perfect, chance)
    return table
