"""The `boxcal` command's arguments and exit codes; the work of each command is in the file of its name.

Those files import much (torch among it), so each is imported when its command runs: help and a mistyped
option answer at once.
"""

# ruff: noqa: PLC0415 - see above

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from boxcal.app.cli.failures import EXIT_CODES, failure_of

__all__ = ["cli", "main"]

cli = typer.Typer(
    name="boxcal",
    help="Classifier probabilities people can act on: calibrated, and inside the bounds you set.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


class Activate(StrEnum):
    """When a new calibrator replaces the active one."""

    IF_BETTER = "if_better"
    ALWAYS = "always"
    NEVER = "never"


Url = Annotated[
    str | None,
    typer.Option(envvar="BOXCAL_URL", help="Work through the service running there.", show_default=False),
]
Json = Annotated[
    bool, typer.Option("--json", help="Write one JSON document to stdout; messages go to stderr.")
]
ValidationFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        exists=True,
        readable=True,
        help="`.npz` with logits (N, K) and labels (N,); `.parquet` with columns logits and label; or "
        "labelled images: a folder, or a `.zip`, with a folder for each class.",
    ),
]


@cli.command()
def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.", show_default=False)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="`digits`, `torchvision:NAME`, `onnx:PATH` or `pt2:PATH`.", show_default=False),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the registry lives.", show_default=False)
    ] = None,
) -> None:
    """Start the service. Options go before the environment's BOXCAL_* settings."""
    from boxcal.app.cli.huge_pages import ask_for_huge_pages

    ask_for_huge_pages()  # before the imports that take a second
    from boxcal.app.cli import serve as command

    command.run(host=host, port=port, model=model, data_dir=data_dir)


@cli.command()
def predict(
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE...", exists=True, dir_okay=False, readable=True)
    ],
    *,
    lower: Annotated[
        list[str] | None,
        typer.Option(
            metavar="BOUND", help="Least probability: 0.01 for all classes, or LABEL=0.02; may be repeated."
        ),
    ] = None,
    upper: Annotated[
        list[str] | None, typer.Option(metavar="BOUND", help="Greatest probability, in the same form.")
    ] = None,
    top_k: Annotated[int, typer.Option(help="How many classes to list.")] = 5,
    calibrator: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|VERSION",
            help="A calibrator saved by `boxcal fit --output`; with --url a version of the registry.",
            show_default=False,
        ),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Classify images with calibrated probabilities, inside the bounds you set."""
    from boxcal.app.cli import predict as command

    command.run(
        images,
        lower=lower or [],
        upper=upper or [],
        top_k=top_k,
        calibrator=calibrator,
        url=url,
        as_json=as_json,
    )


@cli.command()
def fit(
    file: ValidationFile,
    *,
    method: Annotated[
        str, typer.Option(help="A calibration method, such as `ts+pb`; `auto` chooses by cross-validation.")
    ] = "auto",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the calibrator here (safetensors).")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Save the full report here (JSON).")] = None,
    diagram: Annotated[Path | None, typer.Option(help="Save the reliability diagram here (SVG).")] = None,
    activate: Annotated[
        Activate, typer.Option(help="With --url: when the new calibrator goes into force.")
    ] = Activate.IF_BETTER,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Fit a calibrator to validation logits and report, on unseen folds, what it changes."""
    from boxcal.app.cli import fit as command

    command.run(
        file,
        method=method,
        output=output,
        report=report,
        diagram=diagram,
        activate=activate.value,
        url=url,
        as_json=as_json,
    )


@cli.command()
def evaluate(
    file: ValidationFile,
    *,
    calibrator: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|VERSION",
            help="A calibrator saved by `boxcal fit --output`; with --url a version of the registry.",
            show_default=False,
        ),
    ] = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Measure how well calibrated probabilities are, before and after a calibrator."""
    from boxcal.app.cli import evaluate as command

    command.run(file, calibrator=calibrator, url=url, as_json=as_json)


@cli.command()
def compare(
    file: ValidationFile,
    *,
    test: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            readable=True,
            help="Judge on this file; else on folds that no fit saw.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A method to compare; may be repeated. Default: those of the paper's main table, save `nc`."
        ),
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Save the table here (Markdown).")] = None,
    csv: Annotated[Path | None, typer.Option(help="Save every number here (CSV).")] = None,
    as_json: Json = False,
) -> None:
    """Fit many methods to the same data and compare them, the paper's main table for your model."""
    from boxcal.app.cli import compare as command

    command.run(file, test=test, methods=method or [], markdown_file=markdown, csv_file=csv, as_json=as_json)


def main() -> None:
    """Run the command line; a mistake or a failure ends it in one line and the exit code of its kind."""
    try:
        code = cli(standalone_mode=False)
    except Exception as error:
        failure = failure_of(error)
        if failure is None:
            raise
        message, code = failure
        if message:  # empty where help was shown instead
            typer.echo(f"boxcal: error: {message}", err=True)
    sys.exit(code)
