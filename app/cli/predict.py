"""`boxcal predict`: calibrated probabilities of images, from a service or from the model on this machine."""

# ruff: noqa: PLC0415 - help needs none of what is imported late

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from boxcal.app.cli.options import (
    CalibratorName,
    ClassColumns,
    Json,
    LabelColumn,
    Scores,
    Url,
    declared_of,
)
from boxcal.app.cli.output import UsageError, escape, messages, plain_table, screen, write_json

if TYPE_CHECKING:
    from boxcal.app.client import Answer

IMAGES_PER_REQUEST = 32
TABLES = {".csv", ".tsv", ".parquet", ".arrow", ".feather", ".json", ".jsonl", ".npy", ".npz"}


def predict(
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            exists=True,
            readable=True,
            help="Images; with --output, a folder of them or a table (`.parquet`, `.arrow`, `.csv`, `.npz`, "
            "`.npy`) of logits, probabilities, features or texts.",
        ),
    ],
    *,
    lower: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BOUND", help="Lower bound: 0.01 for all classes, or LABEL=0.02; can be repeated."
        ),
    ] = None,
    upper: Annotated[
        list[str] | None, typer.Option(metavar="BOUND", help="Upper bound, in the same form.")
    ] = None,
    top_k: Annotated[int, typer.Option(help="Number of classes to list.")] = 5,
    calibrator: CalibratorName = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the predictions of a folder or of a table, in its order, to this `.parquet` or "
            "`.csv`. A run that was stopped continues. With a calibrator, a table of scores needs no model.",
        ),
    ] = None,
    scores: Scores = None,
    label: LabelColumn = None,
    classes: ClassColumns = None,
    ignore: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Columns that are no scores; the output keeps them beside the predictions."
        ),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Classify images with calibrated probabilities within bounds that you set."""
    if top_k < 1:
        raise UsageError(f"top_k is {top_k}; it must be at least 1")
    bounds = {"lower": read_bounds("lower", lower or ()), "upper": read_bounds("upper", upper or ())}
    if output is not None:
        if len(images) != 1:
            raise UsageError("--output takes one folder or one table")
        if url is not None:
            raise UsageError("--output runs the model on this machine: leave out --url, or unset BOXCAL_URL")
        from boxcal.app.cli import bulk

        declared = declared_of(scores=scores, label=label, classes=classes, ignore=ignore)
        rows = bulk.run(images[0], output, **bounds, calibrator=calibrator, declared=declared)
        if as_json:
            write_json({"rows": rows, "output": str(output)})
        return
    for image in images:
        if image.is_dir():
            raise UsageError(f"{image} is a folder; add --output FILE.parquet (or .csv)")
        if image.suffix in TABLES:
            raise UsageError(
                f"{image} is a table, not an image. A table is predicted by this machine with --output"
                " FILE.parquet; a service takes rows at POST /predict"
            )
    if url is not None:
        answer = _through_service(images, {"top_k": top_k, **bounds}, calibrator, url)
    else:
        from boxcal.app.cli import offline

        answer = offline.predict(images, **bounds, top_k=top_k, calibrator=calibrator)
    if as_json:
        write_json(answer.model_dump(exclude_unset=True))
    else:
        _show(images, answer, url)


def _through_service(
    images: Sequence[Path], options: dict[str, Any], calibrator: str | None, url: str
) -> Answer:
    from boxcal.app.client import BoxcalClient

    if calibrator is not None:
        options["calibrator"] = version_of(calibrator)
    answers: list[Answer] = []
    with BoxcalClient(url) as client:
        for first in range(0, len(images), IMAGES_PER_REQUEST):
            answers.append(client.predict(*images[first : first + IMAGES_PER_REQUEST], **options))
            options["calibrator"] = answers[0].calibrator.version  # the same for all requests
    return answers[0].model_copy(
        update={
            "bounds_relaxed": any(answer.bounds_relaxed for answer in answers),
            "predictions": tuple(p for answer in answers for p in answer.predictions),
            "timing_ms": dict(sum((Counter(answer.timing_ms) for answer in answers), Counter())),
        }
    )


def version_of(calibrator: str) -> int:
    """Read a registry version; UsageError where a path was given beside --url."""
    if not calibrator.isdecimal():
        raise UsageError(f"--calibrator {calibrator!r}: with --url, name a version, such as 3")
    return int(calibrator)


def _show(images: Sequence[Path], answer: Answer, url: str | None) -> None:
    table = plain_table("image", "label", "probability", "bound")
    for image, prediction in zip(images, answer.predictions, strict=True):
        for position, entry in enumerate(prediction.top):
            name = escape(image.name) if position == 0 else ""
            table.add_row(name, escape(entry.label), f"{entry.probability:.4f}", entry.bound or "")
    screen().print(table)
    version = "" if url is None else f"calibrator {answer.calibrator.version}: "
    messages().print(
        f"[dim]{escape(answer.model)}, {version}{answer.calibrator.method}"
        + ("; fitted bounds were relaxed" if answer.bounds_relaxed else "")
    )


def read_bounds(side: str, typed: Sequence[str]) -> float | dict[str, float] | None:
    """Read the values of `--lower` or `--upper`: one number for all classes, or LABEL=NUMBER, repeated."""
    named: dict[str, float] = {}
    overall: float | None = None
    for text in typed:
        label, equals, value = text.rpartition("=")
        number = _number(side, text, value)
        if not equals:
            if overall is not None:
                raise UsageError(f"--{side} is given twice for all classes: {overall:g} and {number:g}")
            overall = number
        elif label in named:
            raise UsageError(f"--{side} is given twice for {label!r}: {named[label]:g} and {number:g}")
        else:
            named[label] = number
    if overall is not None and named:
        raise UsageError(f"--{side} takes one number for all classes or LABEL=NUMBER, not both: {typed!r}")
    return named or overall


def _number(side: str, text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"--{side} {text!r}: {value!r} is not a number") from None
    if not math.isfinite(number):
        raise UsageError(f"--{side} {text!r}: {value!r} is not a probability")
    return number
