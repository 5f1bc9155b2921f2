"""`boxcal inspect`: what a model reads and returns, and the declaration that would serve an ONNX file."""

# ruff: noqa: PLC0415 - help needs no model

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from boxcal.app.cli.options import Json
from boxcal.app.cli.output import UsageError, escape, messages, plain_table, screen, write_json

SHOWN_LABELS = 8


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="An ONNX file, or a model as in BOXCAL_MODEL.")
    ],
    *,
    write: Annotated[bool, typer.Option("--write", help="Save the declaration beside the model.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a model reads and returns, and the `model.json` that would serve an ONNX file."""
    from boxcal.models.loading.inspection import inspect_model

    path = Path(model.removeprefix("onnx:"))
    if path.suffix != ".onnx":
        if write:
            raise UsageError(f"{model} needs no declaration; --write is for ONNX files")
        _named(model, as_json=as_json)
        return
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


def _named(model: str, *, as_json: bool) -> None:
    """Show a model that is loaded by its name."""
    from boxcal.models.loading.inspection import describe_model

    found = describe_model(model)
    if as_json:
        write_json(asdict(found))
        return
    shown = ", ".join(found.labels[:SHOWN_LABELS])
    more = len(found.labels) - SHOWN_LABELS
    table = plain_table("", "")
    for name, text in {
        "model": found.model,
        "reads": f"{found.inputs} ({' or '.join(found.members)})" if found.members else "no inputs",
        "input": _sizes(found.input_shape),
        "preprocessing": json.dumps(found.preprocessing) if found.preprocessing else "",
        "classes": f"{len(found.labels)}: {shown}{f', and {more} more' if more > 0 else ''}",
        "logits of 2 inputs": _sizes(found.output_shape),
        "features for fc and ta": "yes" if found.has_features else "no",
    }.items():
        if text:
            table.add_row(name, escape(text))
    screen.print(table)
    for note in found.notes:
        messages.print(f"[yellow]note[/]: {escape(note)}", soft_wrap=True)


def _sizes(shape: tuple[Any, ...]) -> str:
    return " x ".join("?" if size is None else escape(str(size)) for size in shape)
