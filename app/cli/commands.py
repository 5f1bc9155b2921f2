"""Arguments and exit codes of the `boxcal` command; each command is implemented in the file of its name.

Those files import large packages such as torch, so each is imported when its command runs. Help and usage
errors appear at once.
"""

# ruff: noqa: PLC0415 - see above

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from boxcal.app.cli.failures import EXIT_CODES, failure_of

cli = typer.Typer(
    name="boxcal",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


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
        help="`.npz` or `.json` with logits (N, K) and labels (N,); `.parquet`, `.arrow` or `.csv` with the "
        "column label and either logits (lists) or one column per class; or images: a folder or a `.zip` "
        "with one folder per class; or labelled rows or texts for the model (BOXCAL_MODEL).",
    ),
]


Scores = Annotated[
    Literal["logits", "probabilities", "percent"] | None,
    typer.Option(help="What the scores of the file are. Default: as they are named, else logits."),
]
LabelColumn = Annotated[
    str | None, typer.Option("--label", help="The column of the labels.", show_default="label")
]
ClassColumns = Annotated[
    str | None,
    typer.Option(
        "--classes", metavar="A,B,C", help="The columns of the classes, in the order of their indices."
    ),
]
Ignored = Annotated[str | None, typer.Option(metavar="A,B", help="Columns to leave out.")]
LabelsAs = Annotated[
    Literal["index", "name"] | None,
    typer.Option(help="What numbers among the labels are, where classes are named by numbers."),
]


def declared_of(options: dict[str, Any]) -> dict[str, Any]:
    """Join the options that say what a file holds to one, `declared`."""
    from boxcal.app.tables.labels import Declared

    classes, ignore = options.pop("classes"), options.pop("ignore")
    declared = Declared(
        options.pop("scores"),
        options.pop("label"),
        None if classes is None else tuple(classes.split(",")),
        () if ignore is None else tuple(ignore.split(",")),
        options.pop("labels_as"),
    )
    return {**options, "declared": declared}


@cli.command()
def predict(
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            exists=True,
            readable=True,
            help="Images; with --output, a folder or a `.parquet` of features, texts or logits.",
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
            help="Write the predictions of a folder of images, or of a `.parquet` of logits, probabilities "
            "or features, to this `.parquet`. A run that was stopped continues.",
        ),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Classify images with calibrated probabilities within bounds that you set."""
    options = locals()
    from boxcal.app.cli.predict import run

    run(**options)


@cli.command()
def fit(
    file: ValidationFile,
    *,
    method: Annotated[
        str,
        typer.Option(help="Calibration method, for example `ts+pb`; `auto` selects one by cross-validation."),
    ] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the calibrator to this file (safetensors).")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Save the report to this file (JSON).")] = None,
    diagram: Annotated[
        Path | None, typer.Option(help="Save the reliability diagram to this file (SVG).")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Save the report to this file as a web page.")] = None,
    activate: Annotated[
        Literal["if_better", "always", "never"],
        typer.Option(help="With --url: when to activate the new calibrator."),
    ] = "if_better",
    budget_seconds: Annotated[
        float, typer.Option(min=0.001, max=3600, help="Seconds for which `auto` compares methods.")
    ] = 120.0,
    labels: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Labels in `.npy`, where FILE is a `.npy` of logits."),
    ] = None,
    scores: Scores = None,
    label: LabelColumn = None,
    classes: ClassColumns = None,
    ignore: Ignored = None,
    labels_as: LabelsAs = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Fit a calibrator to validation data and report its effect on data that the fit did not use."""
    options = declared_of(locals())
    from boxcal.app.cli.fit import run

    run(**options)


@cli.command()
def feedback(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="`.csv` or `.parquet` with the columns id and label, and perhaps propensity and source.",
        ),
    ],
    *,
    url: Annotated[
        str, typer.Option(envvar="BOXCAL_URL", help="Address of the service.")
    ] = "http://127.0.0.1:8000",
    as_json: Json = False,
) -> None:
    """Send the true labels of earlier predictions to a service."""
    from boxcal.app.cli.feedback import run

    run(file, url=url, as_json=as_json)


@cli.command()
def evaluate(
    file: ValidationFile,
    *,
    calibrator: CalibratorName = None,
    scores: Scores = None,
    label: LabelColumn = None,
    classes: ClassColumns = None,
    ignore: Ignored = None,
    labels_as: LabelsAs = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Measure the calibration of a model, without and with a calibrator."""
    options = declared_of(locals())
    from boxcal.app.cli.evaluate import run

    run(**options)


@cli.command()
def compare(
    file: ValidationFile,
    *,
    test: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            readable=True,
            help="Evaluate on this file (default: cross-fitting).",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method to compare; can be repeated. Default: the methods of the paper, except `nc`."
        ),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Save the table to this file (Markdown).")] = None,
    csv: Annotated[Path | None, typer.Option(help="Save all numbers to this file (CSV).")] = None,
    scores: Scores = None,
    label: LabelColumn = None,
    classes: ClassColumns = None,
    ignore: Ignored = None,
    labels_as: LabelsAs = None,
    as_json: Json = False,
) -> None:
    """Fit several methods to the same data and compare them."""
    options = declared_of(locals())
    from boxcal.app.cli.compare import run

    run(**options)


@cli.command()
def monitor(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="`.npz`, `.parquet` or `.csv` with logits (or probabilities) and label, empty or -1 where "
            "it is not known; the rows are sorted by a column time, where there is one.",
        ),
    ],
    *,
    calibrator: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="The active calibrator (default: softmax)."
        ),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The data that it was fitted to, in the same form."),
    ] = None,
    refit: Annotated[
        bool, typer.Option("--refit", help="Replay also refits, duels, activations and rollbacks.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Save a plot to this file (.svg or .png).")] = None,
    as_json: Json = False,
) -> None:
    """Replay a log of predictions and labels, and test whether the calibration still holds."""
    from boxcal.app.cli.monitor import run

    run(file, calibrator=calibrator, validation=validation, refit=refit, plot=plot, as_json=as_json)


@cli.command()
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="An ONNX file, or a model as in BOXCAL_MODEL.")
    ],
    *,
    write: Annotated[bool, typer.Option("--write", help="Save the declaration beside the model.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a model reads and returns, and the `model.json` that would serve an ONNX file."""
    from boxcal.app.cli.inspect import run

    run(model, write=write, as_json=as_json)


@cli.command()
def doctor(*, config: Config = None, as_json: Json = False) -> None:
    """Check the settings, the models, the registry, the disk and the port; exit code 1 if one fails."""
    from boxcal.app.cli.doctor import run

    run(config, as_json=as_json)


def show_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        from importlib.metadata import version

        typer.echo(f"boxcal {version('boxcal')}")
        raise typer.Exit


@cli.callback()
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Calibrated classifier probabilities within bounds that you set."""


def main() -> None:
    """Run the command line; an expected error ends it with a message of one line and an exit code."""
    try:
        code = cli(standalone_mode=False)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        message, code = failure
        if message:  # empty if help was shown
            typer.echo(f"boxcal: error: {message}", err=True)
    sys.exit(code)
