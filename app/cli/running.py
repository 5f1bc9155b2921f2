"""Arguments of the commands that run the service, its workers and its registry."""

# ruff: noqa: PLC0415 - as in commands.py, each command imports what it needs

from pathlib import Path
from typing import Annotated

import typer

from boxcal.app.cli.commands import Config, cli
from boxcal.app.cli.setting_options import SettingsCommand


@cli.command(cls=SettingsCommand)
def serve(ctx: typer.Context, *, config: Config = None) -> None:
    """Start the service. Options come before environment variables, and these before the config file."""
    from boxcal.app.cli.settings import read_settings
    from boxcal.app.cli.starting import check_start

    settings = read_settings(config, **ctx.obj)
    check_start(settings)
    if settings.workers > 1:
        from boxcal.app.workers.supervisor import supervise

        supervise(settings)
        return
    from boxcal.app.cli.quick_start import prepare

    prepare()
    from boxcal.app.server import serve as run

    run(settings)


@cli.command()
def worker(*, config: Config = None) -> None:
    """Run the fits of services with BOXCAL_FITS=queue, and continue those of processes that stopped."""
    from boxcal.app.cli.failures import UsageError
    from boxcal.app.cli.settings import read_settings

    settings = read_settings(config)
    if settings.shared_dir is None:
        raise UsageError("`boxcal worker` needs BOXCAL_SHARED_DIR, the directory of the validation sets")
    from boxcal.app.fitting.server.queue_worker import run

    run(settings)


@cli.command()
def migrate(*, config: Config = None) -> None:
    """Update the tables of the registry that BOXCAL_DATABASE_URL or BOXCAL_DATA_DIR selects."""
    from boxcal.app.cli.migrate import run

    run(config)


@cli.command()
def deploy(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            help="A Serve config such as deploy/ray/serve.yaml, or a RayService manifest that contains one.",
        ),
    ],
    *,
    address: Annotated[
        str, typer.Option(envvar="RAY_DASHBOARD_ADDRESS", help="Address of the cluster's dashboard.")
    ] = "http://127.0.0.1:8265",
    check: Annotated[bool, typer.Option("--check", help="Only check the file.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until every replica runs.")] = 600.0,
) -> None:
    """Check a Serve config, deploy it on a Ray cluster, and wait until every replica runs."""
    options = locals()
    from boxcal.app.cli.deploy import run

    run(**options)
