"""`boxcal doctor`: whether the service can start here, one line per check; nothing is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sqlalchemy
import typer

from boxcal.app.access.access import check_openness
from boxcal.app.cli.offline import bounds_of
from boxcal.app.cli.output import CannotStart, UsageError, escape, screen, write_json
from boxcal.app.cli.preflight import AlreadyRuns, check_port
from boxcal.app.cli.settings import read_settings
from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.http.problems import BoxcalError
from boxcal.app.registry.maintenance import look
from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings


def run(config: Path | None, *, as_json: bool) -> None:
    """Run every check and show its result; exit code 1 where one failed."""
    settings = read_settings(config)
    checks: dict[str, Callable[[Settings], str]] = {
        "model": model, "registry": registry, "disk": disk, "port": port, "sandbox": sandbox,
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
            screen().print(f"{mark} {entry['check']:<9} {escape(str(entry['found']))}", soft_wrap=True)
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
    """Connect to the database, and look for an API key; a SQLite file that does not exist is not created."""
    url = sqlalchemy.make_url(settings.registry_url)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        found, has_keys = "does not exist; it will be created", False
    else:
        tables, has_keys = look(settings.registry_url)
        file = Path(url.database or "")
        if url.get_backend_name() == "sqlite" and not (
            os.access(file, os.W_OK) and os.access(file.parent, os.W_OK)
        ):
            raise PermissionError(f"{file} cannot be written")
        found = f"answers and has {tables} tables"
    check_openness(settings, has_keys=has_keys)
    return f"{url} {found}"


def port(settings: Settings) -> str:
    """Find the port free, or used by a boxcal, beside which this command is run."""
    try:
        return check_port(settings)
    except AlreadyRuns as error:
        return str(error)


def sandbox(settings: Settings) -> str:
    """Try what workers that read uploads give up, in a process of its own."""
    code = (
        "import sys; from pathlib import Path; from boxcal.app.fitting.sandbox import enter_sandbox; "
        "print('; '.join(enter_sandbox(Path(sys.prefix))), end='')"
    )
    command = [sys.executable, "-c", code]
    refused = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
    if refused:
        return f"uploads are read without secrets; not allowed here: {refused}"
    return "uploads are read without a network, secrets, files of the service, processes and more rights"


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
