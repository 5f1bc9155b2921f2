"""`boxcal inspect`: what a model or calibrator reads and returns, and the declaration for an ONNX file.

An ONNX file may come from a stranger: it is opened and tried in a process in a sandbox, which reads no other
folder.
"""

# ruff: noqa: PLC0415 - help needs no model

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Annotated, Any

import typer

from boxcal.app.cli.options import Json
from boxcal.app.cli.output import UsageError, escape, messages, plain_table, screen, write_json

SHOWN_LABELS = 8
MISSING = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
INSPECT_SECONDS = 300.0
"""For an ONNX file, of which the trial run takes 60 s at most."""
MOST_FOUND_BYTES = 16 * 2**20
"""Of each file that the process in the sandbox writes, with its answer."""


def inspect(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="An ONNX file, a model as in BOXCAL_MODEL, or a saved calibrator."
        ),
    ],
    *,
    write: Annotated[bool, typer.Option("--write", help="Save the declaration beside the model.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a model reads and returns, and the `model.json` that would serve an ONNX file."""
    path = Path(model.removeprefix("onnx:"))
    if path.suffix != ".onnx":
        if write:
            raise UsageError(f"{model} needs no declaration; --write is for ONNX files")
        if path.suffix == ".safetensors" and not path.exists():
            raise UsageError(f"{path} does not exist")
        (_saved if _is_safetensors(path) else _named)(model, as_json=as_json)
        return
    beside = path.with_suffix(".json")
    if write and beside.exists():
        raise UsageError(f"{beside} exists; it was not replaced")
    found = _inspected(path)
    if write:
        beside.write_text(json.dumps(found["declaration"], indent=2) + "\n", encoding="utf-8")
        messages().print(f"saved {escape(str(beside))}", soft_wrap=True)
    if as_json:
        write_json({**found, "file": str(beside)})
        return
    table = plain_table("", "name", "type", "shape", "trial run")
    for kind in ("input", "output"):
        for one in found[f"{kind}s"]:
            name, kind_of_numbers = escape(one["name"]), escape(one["type"])
            table.add_row(kind, name, kind_of_numbers, _sizes(one["shape"]), _sizes(one["found"]))
    screen().print(table)
    screen().print(f"\n{escape(str(beside))}:", soft_wrap=True)
    typer.echo(json.dumps(found["declaration"], indent=2))
    for note in found["notes"]:
        messages().print(f"[yellow]note[/]: {escape(note)}", soft_wrap=True)


def _inspected(path: Path) -> dict[str, Any]:
    """Return what `inspect_model` finds, as a document, from a process in a sandbox."""
    from boxcal.app.fitting.sandbox import inherited

    with TemporaryDirectory() as folder, TemporaryFile("w+") as answer, TemporaryFile("w+") as errors:
        command = [sys.executable, "-P", "-m", __name__, str(path.absolute()), folder]
        try:
            run = subprocess.run(  # noqa: S603 - this interpreter and this module
                command,
                env=inherited(os.environ) | {"TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=answer,
                stderr=errors,
                timeout=INSPECT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(f"{path} could not be inspected within {INSPECT_SECONDS:g} s") from None
        answer.seek(0)
        errors.seek(0)
        if run.returncode:
            last = errors.read().strip().rpartition("\n")[2]
            if missing := MISSING.fullmatch(last):
                raise ModuleNotFoundError(last, name=missing[1])
            reason = last or f"its process ended with status {run.returncode}"
            raise UsageError(f"{path} could not be inspected: {reason}")
        document: dict[str, Any] = json.load(answer)
    if "error" in document:
        raise UsageError(document["error"])
    return document


def main(path: Path, folder: Path) -> None:
    """Inspect an ONNX file in this process, which can then read no other folder; write what was found."""
    missing = [f"it needs Linux, and this is {sys.platform}"]
    if sys.platform == "linux":
        from boxcal.app.fitting.resources import limit_files, limit_memory
        from boxcal.app.fitting.sandbox import enter_sandbox

        missing = enter_sandbox(folder, readable=(path.parent, path.resolve().parent))
        limit_files(MOST_FOUND_BYTES)
    from boxcal.models import BackboneError
    from boxcal.models.loading.inspection import inspect_model

    if sys.platform == "linux":  # what the libraries map does not count
        limit_memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    try:
        document = asdict(inspect_model(path))
    except BackboneError as error:
        document = {"error": str(error)}
    else:
        document["notes"] = [
            *document["notes"],
            *(f"This host allows only a part of the sandbox: {one}." for one in missing),
        ]
    sys.stdout.write(json.dumps(document))


def _named(model: str, *, as_json: bool) -> None:
    """Show a model that is loaded by its name."""
    from boxcal.models.loading.inspection import describe_model

    found = describe_model(model)
    if as_json:
        write_json(asdict(found))
        return
    _show(
        {
            "model": found.model,
            "reads": f"{found.inputs} ({' or '.join(found.members)})" if found.members else "no inputs",
            "input": _sizes(found.input_shape),
            "preprocessing": json.dumps(found.preprocessing) if found.preprocessing else "",
            "classes": _listed(found.labels),
            "logits of 2 inputs": _sizes(found.output_shape),
            "features for fc and ta": "yes" if found.has_features else "no",
        }
    )
    for note in found.notes:
        messages().print(f"[yellow]note[/]: {escape(note)}", soft_wrap=True)


def _is_safetensors(path: Path) -> bool:
    """Whether a file begins as saved calibrators do: a length of eight bytes, and a JSON object."""
    if not path.is_file():  # models have names, and paths after `pt2:`
        return False
    with path.open("rb") as file:
        return file.read(9)[8:] == b"{"


def _saved(path: str, *, as_json: bool) -> None:
    """Show a calibrator that `boxcal fit --output` has saved."""
    from boxcal.app.cli.validation import saved_calibrator

    found = saved_calibrator(path)
    spec, classes = found.spec, [*(found.classes or map(str, range(found.num_classes)))]
    if as_json:
        write_json({**spec, "classes": classes})
        return
    parameters = {name: json.dumps(value) for name, value in spec["parameters"].items()}
    _show({"method": found.method, "reads": found.reads, "classes": _listed(classes)} | parameters)


def _show(rows: dict[str, str]) -> None:
    table = plain_table("", "")
    for name, text in rows.items():
        if text:
            table.add_row(name, escape(text))
    screen().print(table)


def _listed(labels: Sequence[str]) -> str:
    """Give the number of classes, and the names of the first."""
    more = len(labels) - SHOWN_LABELS
    shown = ", ".join(labels[:SHOWN_LABELS])
    return f"{len(labels)}: {shown}{f', and {more} more' if more > 0 else ''}"


def _sizes(shape: tuple[Any, ...]) -> str:
    return " x ".join("?" if size is None else escape(str(size)) for size in shape)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
