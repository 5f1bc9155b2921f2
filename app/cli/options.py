"""Options that several commands have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from boxcal.app.tables.labels import Declared

Url = Annotated[
    str | None,
    typer.Option(envvar="BOXCAL_URL", help="Use the service at this address.", show_default=False),
]
CalibratorName = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|VERSION",
        help="A calibrator saved by `boxcal fit --output`; with --url a version of the registry.",
        show_default=False,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Write one JSON document to stdout and messages to stderr.")
]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Settings in TOML: `name = value`, and a table `\\[models.NAME]` for each of several models. "
        "Default: BOXCAL_CONFIG.",
        show_default=False,
    ),
]
ValidationFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        exists=True,
        readable=True,
        help="`.npz` or `.json` with logits (N, K) and labels (N,); `.parquet`, `.arrow`, `.csv` or records "
        "(`.json`, `.jsonl`) with the column label and either logits (lists) or one column per class, also "
        "as `.gz`; or images: a folder or a `.zip` with one folder per class; or labelled rows or texts for "
        "the model (BOXCAL_MODEL).",
    ),
]
Labels = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Labels in `.npy`, where FILE is a `.npy` of logits."),
]
Scores = Annotated[
    Literal["logits", "probabilities", "percent"] | None,
    typer.Option(help="What the scores of the file are. Default: as they are named, else logits."),
]
LabelColumn = Annotated[
    str | None, typer.Option("--label", help="The column of the labels.", show_default="label")
]
GroupColumn = Annotated[
    str | None,
    typer.Option(
        "--group", help="The column that says which samples belong together.", show_default="group, if any"
    ),
]
ClassColumns = Annotated[
    str | None,
    typer.Option(
        "--classes",
        metavar="A,B,C|FILE",
        help="The columns of the classes, in the order of their indices; or a file with one in each line.",
    ),
]
Ignored = Annotated[str | None, typer.Option(metavar="A,B", help="Columns to leave out.")]
LabelsAs = Annotated[
    Literal["index", "name"] | None,
    typer.Option(help="What numbers among the labels are, where classes are named by numbers."),
]


ClassMix = Annotated[
    Literal["as_traffic", "resampled"] | None,
    typer.Option(
        help="How the samples were drawn: with classes as frequent as among requests, or by class, which"
        " gives them weights by what the logits expect."
    ),
]


def declared_of(
    *,
    scores: str | None,
    label: str | None,
    classes: str | None,
    ignore: str | None,
    group: str | None = None,
    labels_as: str | None = None,
    class_mix: str | None = None,
) -> Declared:
    """Join the options that say what a file holds."""
    from boxcal.app.tables.labels import Declared  # noqa: PLC0415 - help needs no tables

    return Declared(
        scores=scores,
        label=label,
        group=group,
        classes=None if classes is None else _class_names(classes),
        ignore=() if ignore is None else tuple(ignore.split(",")),
        labels_as=labels_as,
        class_mix=class_mix,
    )


def _class_names(typed: str) -> tuple[str, ...]:
    from boxcal.app.cli.output import UsageError  # noqa: PLC0415 - as above
    from boxcal.calibrators.class_columns import clean  # noqa: PLC0415 - as above
    from boxcal.models.backends.checks import read_lines  # noqa: PLC0415 - as above

    is_file = os.path.isfile(typed)  # noqa: PTH113 - False for a list that is too long for a path
    names = tuple(read_lines(Path(typed)) if is_file else typed.split(","))
    if len(set(map(clean, names))) < len(names):
        raise UsageError("--classes names a class twice")
    return names
