"""The `boxcal` command: its commands in the order of its help, and its exit codes.

A command is in the file of its name, which imports large packages such as torch inside functions: help and
usage errors appear at once. The arguments of `evaluate`, `monitor` and `doctor` are here, because nearly all
of their functions need such packages; and so are commands of a few lines.
"""

# ruff: noqa: PLC0415 - see above

import gc
import sys
from pathlib import Path
from typing import Annotated

import typer

from boxcal.app.cli import options
from boxcal.app.cli.compare import compare
from boxcal.app.cli.deploy import deploy
from boxcal.app.cli.feedback import feedback
from boxcal.app.cli.fit import fit
from boxcal.app.cli.inspect import inspect
from boxcal.app.cli.keys import LONGEST_DAYS, keys
from boxcal.app.cli.output import (
    EXIT_CODES,
    UsageError,
    escape,
    failure_of,
    messages,
    printable,
    screen,
    write_json,
)
from boxcal.app.cli.predict import predict
from boxcal.app.cli.settings import SettingsCommand, read_settings
from boxcal.app.cli.validation import saved_calibrator

cli = typer.Typer(
    name="boxcal",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


cli.command()(predict)
cli.command()(fit)
cli.command()(feedback)


@cli.command()
def evaluate(
    file: options.ValidationFile,
    *,
    calibrator: options.CalibratorName = None,
    labels: options.Labels = None,
    scores: options.Scores = None,
    label: options.LabelColumn = None,
    group: options.GroupColumn = None,
    classes: options.ClassColumns = None,
    ignore: options.Ignored = None,
    labels_as: options.LabelsAs = None,
    class_mix: options.ClassMix = None,
    url: options.Url = None,
    as_json: options.Json = False,
) -> None:
    """Measure the calibration of a model, without and with a calibrator."""
    from boxcal.app.cli.evaluate import run

    declared = options.declared_of(
        scores=scores,
        label=label,
        group=group,
        classes=classes,
        ignore=ignore,
        labels_as=labels_as,
        class_mix=class_mix,
    )
    run(file, labels, calibrator=calibrator, declared=declared, url=url, as_json=as_json)


cli.command()(compare)


@cli.command()
def monitor(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="`.npz`, `.parquet`, `.arrow`, `.csv` or records (`.json`, `.jsonl`), also as `.gz`, with "
            "label, empty or -1 where it is unknown, and logits, probabilities or one column per class; a "
            "column time, where there is one, gives the order.",
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
    scores: options.Scores = None,
    label: options.LabelColumn = None,
    classes: options.ClassColumns = None,
    ignore: options.Ignored = None,
    labels_as: options.LabelsAs = None,
    as_json: options.Json = False,
) -> None:
    """Replay a log of predictions and labels, and test whether the calibration still holds."""
    from boxcal.app.cli.monitor import run

    declared = options.declared_of(
        scores=scores, label=label, classes=classes, ignore=ignore, labels_as=labels_as
    )
    run(
        file,
        calibrator=calibrator,
        validation=validation,
        refit=refit,
        plot=plot,
        declared=declared,
        as_json=as_json,
    )


cli.command()(inspect)


@cli.command()
def export(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="CALIBRATOR",
            exists=True,
            dir_okay=False,
            readable=True,
            help="A calibrator saved by `boxcal fit --output`.",
        ),
    ],
    *,
    mlflow: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write a model folder of MLflow.")
    ] = None,
    onnx: Annotated[Path | None, typer.Option(metavar="FILE", help="Write an ONNX model.")] = None,
) -> None:
    """Write a saved calibrator as an MLflow or ONNX model, to be deployed beside the classifier."""
    if mlflow is None and onnx is None:
        raise UsageError("name what to write: --mlflow FOLDER or --onnx FILE")
    calibrator = saved_calibrator(file)
    if mlflow is not None:
        from boxcal.calibrators.mlflow_model import to_mlflow

        to_mlflow(calibrator, mlflow)
        messages().print(f"saved {escape(str(mlflow))}", soft_wrap=True)
    if onnx is not None:
        from boxcal.calibrators.calibrator import Calibrator

        Calibrator.on_tensors(calibrator).to_onnx(onnx)
        messages().print(f"saved {escape(str(onnx))}", soft_wrap=True)


@cli.command()
def doctor(*, config: options.Config = None, as_json: options.Json = False) -> None:
    """Check the settings, the models, the registry, the disk and the port; exit code 1 if one fails."""
    from boxcal.app.cli.doctor import run

    run(config, as_json=as_json)


@cli.command(cls=SettingsCommand)
def serve(ctx: typer.Context, *, config: options.Config = None) -> None:
    """Start the service. Options come before environment variables, and these before the config file."""
    from boxcal.app.cli.preflight import check_start

    settings = read_settings(config, **ctx.obj)
    check_start(settings)
    if settings.workers > 1:
        gc.enable()
        from boxcal.app.workers.supervisor import supervise

        supervise(settings)
        return
    from boxcal.app.cli.quick_start import prepare, release_hangup

    prepare()
    release_hangup()
    from boxcal.app.server import serve as run

    run(settings)


@cli.command()
def worker(*, config: options.Config = None) -> None:
    """Run the fits of services with BOXCAL_FITS=queue, and continue those of processes that stopped."""
    settings = read_settings(config)
    if settings.shared_dir is None:
        raise UsageError("`boxcal worker` needs BOXCAL_SHARED_DIR, the directory of the validation sets")
    from boxcal.app.fitting.server.build import run

    run(settings)


@cli.command()
def migrate(*, config: options.Config = None) -> None:
    """Update the tables of the registry that BOXCAL_DATABASE_URL or BOXCAL_DATA_DIR selects."""
    from boxcal.app.registry.maintenance import migrate as run

    screen().print(f"The registry has the tables of revision {run(read_settings(config).registry_url)}.")


@cli.command()
def prune(
    *,
    keep_versions: Annotated[
        int, typer.Option(min=1, max=2**31, help="Newest calibrators of each model to keep.")
    ],
    keep_days: Annotated[
        float,
        typer.Option(min=0, max=LONGEST_DAYS, help="Days for which calibrators that were active are kept."),
    ] = 30,
    as_json: options.Json = False,
) -> None:
    """Delete artifacts and reports of old calibrators from the registry; their entries stay."""
    from boxcal.app.registry.maintenance import prune_and_compact

    url = read_settings().registry_url
    pruned = prune_and_compact(url, keep_versions=keep_versions, keep_days=keep_days)
    if as_json:
        write_json({"pruned": pruned})
    else:
        screen().print(f"Pruned {len(pruned)} calibrators: {', '.join(map(str, pruned)) or 'none'}.")


cli.add_typer(keys, name="keys")
cli.command()(deploy)


def show_version(asked: bool) -> None:
    """Print the version and end."""
    if asked:
        from importlib.metadata import version

        typer.echo(f"boxcal {version('boxcal')}")
        raise typer.Exit


@cli.callback()
def common(
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
            typer.echo(f"boxcal: error: {printable(message)}", err=True)
    sys.exit(code)
