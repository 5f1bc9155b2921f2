"""`boxcal doctor`: whether the service can start here, one line per check; nothing is changed.

What a service needs before it loads its model: a folder that it may write, and ports that are free.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy
import typer
from rich.markup import escape

from boxcal.app.cli.offline import bounds_of
from boxcal.app.cli.output import CannotStart, UsageError, screen, write_json
from boxcal.app.cli.settings import read_settings
from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.http.problems import BoxcalError
from boxcal.app.registry.maintenance import count_tables
from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings

SERVICE_SECONDS = 2.0
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}  # noqa: S104 - addresses that mean all


def check_start(settings: Settings) -> None:
    """Check what would otherwise fail after the model has been loaded."""
    folder = settings.data_dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise CannotStart(f"BOXCAL_DATA_DIR: cannot write to {folder}: {error.strerror}") from error
    check_port(settings)


def check_port(settings: Settings) -> str:
    """Listen on the addresses for a moment, and say that they are free."""
    if settings.uds is not None:
        folder = settings.uds.absolute().parent
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CannotStart(f"{folder}, the folder of the socket, is not writable")
        found = f"{settings.uds} can be created"
    else:
        address = f"{settings.address}:{settings.port}"
        try:
            _listen(settings.address, settings.port)
        except OSError as error:
            if (served := running_model(settings)) is not None:
                raise CannotStart(
                    f"{address} is in use by a running boxcal, which serves {served}"
                ) from error
            raise CannotStart(f"cannot listen on {address}: {error.strerror or error}") from error
        found = f"{address} is free"
    if settings.grpc_port is None:
        return found
    address = f"{settings.address}:{settings.grpc_port}"
    try:
        _listen(settings.address, settings.grpc_port)
    except OSError as error:
        raise CannotStart(f"cannot listen on {address} for gRPC: {error.strerror or error}") from error
    return f"{found}; {address} is free for gRPC"


def _listen(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family).close()


def running_model(settings: Settings) -> str | None:
    """Return the model of the boxcal that listens on the address; None if something else does."""
    from boxcal.app.client import BoxcalClient, calls  # noqa: PLC0415 - only after a failure
    from boxcal.app.client.clients import ONCE  # noqa: PLC0415
    from boxcal.app.client.errors import ClientError  # noqa: PLC0415

    host = LOOPBACK.get(settings.address, settings.address)
    try:
        with BoxcalClient(f"http://{host}:{settings.port}", timeout=SERVICE_SECONDS) as client:
            return client.send(calls.ready(), ONCE).model
    except ClientError:
        return None


DATABASE_SECONDS = 5


def run(config: Path | None, *, as_json: bool) -> None:
    """Run every check and show its result; exit code 1 where one failed."""
    settings = read_settings(config)
    checks: dict[str, Callable[[Settings], str]] = {
        "model": model, "registry": registry, "disk": disk, "port": check_port,
    }  # fmt: skip
    found = []
    for name, check in checks.items():
        try:
            found.append({"check": name, "ok": True, "found": check(settings)})
        except (ValueError, OSError, CannotStart, BoxcalError, sqlalchemy.exc.SQLAlchemyError) as error:
            found.append({"check": name, "ok": False, "found": " ".join(str(error).split())})
    if as_json:
        write_json(found)
    else:
        for entry in found:
            mark = "[green]ok    [/]" if entry["ok"] else "[red]failed[/]"
            screen.print(f"{mark} {entry['check']:<9} {escape(str(entry['found']))}", soft_wrap=True)
    if not all(entry["ok"] for entry in found):
        raise typer.Exit(1)


def model(settings: Settings) -> str:
    """Load the models, one after the other."""
    return "; ".join(
        loaded(entry.name, entry.settings, entry.lower, entry.upper) for entry in settings.entries()
    )


def loaded(name: str, settings: Settings, lower: Any, upper: Any) -> str:
    """Load one model, check its bounds, and describe it."""
    try:
        backbone = BackboneSource.of(settings).load()
        sides = [
            dict(zip(backbone.labels, side, strict=True)) if isinstance(side, list) else side
            for side in (lower, upper)
        ]
        bounds_of(sides[0], sides[1], backbone.labels)
    except (ValueError, UsageError) as error:
        raise ValueError(f"{name}: {error}" if name else str(error)) from error
    shown = name or backbone.name
    if backbone.inputs.kind == "none":
        return f"{shown}: no model; /calibrate takes logits of {backbone.num_classes} classes"
    return f"{shown}: {backbone.num_classes} classes on {backbone.device}"


def registry(settings: Settings) -> str:
    """Connect to the database; a SQLite file that does not exist is not created."""
    url = sqlalchemy.make_url(settings.registry_url)
    if url.drivername == "postgresql":
        url = url.set(drivername="postgresql+psycopg", query={"connect_timeout": str(DATABASE_SECONDS)})
    is_sqlite = url.get_backend_name() == "sqlite"
    if is_sqlite and not Path(url.database or "").exists():
        return f"{url} does not exist; it will be created"
    return f"{url} answers and has {count_tables(sqlalchemy.create_engine(url))} tables"


def disk(settings: Settings) -> str:
    """Compare the free space of the data directory with the largest upload."""
    folder = settings.data_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(f"{existing} is not writable")
    free = shutil.disk_usage(existing).free
    if free < limits.MAX_UPLOAD_BYTES:
        raise OSError(f"{existing} has {free:,} bytes free; an upload may have {limits.MAX_UPLOAD_BYTES:,}")
    return f"{existing} is writable and has {free / 2**30:.1f} GiB free"
