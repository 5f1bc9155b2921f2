"""`boxcal inspect`: what a model file reads and returns, and the declaration that would serve it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from boxcal.app.cli.failures import UsageError
from boxcal.app.cli.output import messages, plain_table, screen, write_json
from boxcal.models.inspection import inspect_model


def run(model: str, *, write: bool, as_json: bool) -> None:
    """Print the inputs, the outputs and the declaration; save it if asked to."""
    path = Path(model.removeprefix("onnx:"))
    if path.suffix != ".onnx":
        raise UsageError(f"{model}: inspect reads ONNX files; the name must end with .onnx")
    found = inspect_model(path)
    beside = path.with_suffix(".json")
    if write:
        if beside.exists():
            raise UsageError(f"{beside} exists; it was not replaced")
        beside.write_text(json.dumps(found.declaration, indent=2) + "\n")
        messages.print(f"saved {escape(str(beside))}", soft_wrap=True)
    if as_json:
        write_json({**asdict(found), "file": str(beside)})
        return
    table = plain_table("", "name", "type", "shape", "trial run")
    for kind, tensors in (("input", found.inputs), ("output", found.outputs)):
        for one in tensors:
            table.add_row(kind, escape(one.name), escape(one.type), _sizes(one.shape), _sizes(one.found))
    screen.print(table)
    screen.print(f"\n{escape(str(beside))}:", soft_wrap=True)
    typer.echo(json.dumps(found.declaration, indent=2))
    for note in found.notes:
        messages.print(f"[yellow]note[/]: {escape(note)}", soft_wrap=True)


def _sizes(shape: tuple[Any, ...]) -> str:
    return " x ".join("?" if size is None else escape(str(size)) for size in shape)
