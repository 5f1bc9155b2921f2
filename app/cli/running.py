"""Arguments of the commands that run the service, its workers and its registry."""

# ruff: noqa: PLC0415 - as in commands.py, each command imports what it needs

from pathlib import Path
from typing import Annotated

import typer

from boxcal.app.cli.commands import cli


@cli.command()
def serve(
    *,
    host: Annotated[str | None, typer.Option(help="Address to listen on.", show_default=False)] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port to listen on; 0 selects a free port.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="`digits`, `torchvision:NAME`, `onnx:PATH`, ...", show_default=False),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Directory for the database and uploads.", show_default=False)
    ] = None,
) -> None:
    """Start the service. Options take precedence over the environment variables BOXCAL_*."""
    options = locals()
    from boxcal.app.cli.allocator import set_up_allocator

    set_up_allocator()  # before the imports, which take a second
    from boxcal.app.cli.settings import read_settings

    settings = read_settings(**options)
    if settings.workers > 1:
        from boxcal.app.workers.supervisor import supervise

        supervise(settings)
        return
    from boxcal.app.cli.quick_start import prepare

    prepare()
    from boxcal.app.server import serve as run

    run(settings)


@cli.command()
def worker() -> None:
    """Run the fits of services with BOXCAL_FITS=queue, and continue those of processes that stopped."""
    from boxcal.app.cli.failures import UsageError
    from boxcal.app.cli.settings import read_settings

    settings = read_settings()
    if settings.shared_dir is None:
        raise UsageError("`boxcal worker` needs BOXCAL_SHARED_DIR, the directory of the validation sets")
    from boxcal.app.fitting.queue_worker import run

    run(settings)


@cli.command()
def migrate() -> None:
    """Update the tables of the registry that BOXCAL_DATABASE_URL or BOXCAL_DATA_DIR selects."""
    from boxcal.app.cli.migrate import run

    run()


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
