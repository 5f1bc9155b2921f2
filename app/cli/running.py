"""Arguments of the commands that run the service, its workers and its registry."""

# ruff: noqa: PLC0415 - as in commands.py, each command imports what it needs

from pathlib import Path
from typing import Annotated

import typer

from boxcal.app.cli.commands import Config, Json, cli
from boxcal.app.cli.settings import SettingsCommand
from boxcal.app.http.scopes import Scope


@cli.command(cls=SettingsCommand)
def serve(ctx: typer.Context, *, config: Config = None) -> None:
    """Start the service. Options come before environment variables, and these before the config file."""
    from boxcal.app.cli.preflight import check_start
    from boxcal.app.cli.settings import read_settings

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
    from boxcal.app.fitting.server.build import run

    run(settings)


@cli.command()
def migrate(*, config: Config = None) -> None:
    """Update the tables of the registry that BOXCAL_DATABASE_URL or BOXCAL_DATA_DIR selects."""
    from boxcal.app.cli.output import screen
    from boxcal.app.cli.settings import read_settings
    from boxcal.app.registry.maintenance import migrate as run

    screen.print(f"The registry has the tables of revision {run(read_settings(config).registry_url)}.")


@cli.command()
def prune(
    *,
    keep_versions: Annotated[int, typer.Option(min=1, help="Newest calibrators of each model to keep.")],
    keep_days: Annotated[
        float, typer.Option(min=0, help="Days for which calibrators that were active are kept.")
    ] = 30,
    as_json: Json = False,
) -> None:
    """Delete artifacts and reports of old calibrators from the registry; their entries stay."""
    from boxcal.app.cli.output import screen, write_json
    from boxcal.app.cli.settings import read_settings
    from boxcal.app.registry.maintenance import prune_and_compact

    url = read_settings().registry_url
    pruned = prune_and_compact(url, keep_versions=keep_versions, keep_days=keep_days)
    if as_json:
        write_json({"pruned": pruned})
    else:
        screen.print(f"Pruned {len(pruned)} calibrators: {', '.join(map(str, pruned)) or 'none'}.")


keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys in the registry.")
cli.add_typer(keys, name="keys")


@keys.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="Name of the key, for example of the program that uses it.")],
    *,
    scope: Annotated[
        list[Scope],
        typer.Option(help="What the key permits; can be repeated. `admin` permits everything."),
    ],
    expires_days: Annotated[
        float | None, typer.Option(min=0, help="Days until the key expires.", show_default=False)
    ] = None,
    per_minute: Annotated[
        int | None, typer.Option(min=1, help="Requests per minute to each replica.", show_default=False)
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, help="Requests in progress at the same time in each replica.", show_default=False
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the key to this new file, which only you can read. If the file exists, nothing is "
            "created.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create an API key and print it; it cannot be shown again."""
    options = locals()
    from boxcal.app.cli.keys import create

    create(**options)


@keys.command("list")
def list_keys(*, as_json: Json = False) -> None:
    """List all API keys, without their secrets."""
    from boxcal.app.cli.keys import show

    show(as_json=as_json)


@keys.command("revoke")
def revoke_key(key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key.")]) -> None:
    """Revoke an API key; running services refuse it within seconds."""
    from boxcal.app.cli.keys import revoke

    revoke(key_id)


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
