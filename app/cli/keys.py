"""`boxcal keys`: creates, lists and revokes API keys in the registry of the settings."""

# ruff: noqa: PLC0415 - help needs none of what is imported late

from __future__ import annotations

import getpass
import os
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from boxcal.app.cli.options import Json
from boxcal.app.cli.output import UsageError, escape, messages, plain_table, screen, write_json
from boxcal.app.cli.settings import read_settings
from boxcal.app.http.scopes import Scope

if TYPE_CHECKING:
    from boxcal.app.access.keys import KeyRecord, KeyStore
    from boxcal.app.registry.audit import Caller

LONGEST_NAME = 128
LONGEST_DAYS = 36_500
MOST = 2**31 - 1
"""The largest number of a column of the registry."""

keys = typer.Typer(no_args_is_help=True, help="Create, list and revoke API keys in the registry.")


@keys.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Name of the key, for example of the program that uses it.")],
    *,
    scope: Annotated[
        list[Scope],
        typer.Option(help="What the key permits; can be repeated. `admin` permits everything."),
    ],
    expires_days: Annotated[
        float | None,
        typer.Option(min=0, max=LONGEST_DAYS, help="Days until the key expires.", show_default=False),
    ] = None,
    per_minute: Annotated[
        int | None,
        typer.Option(min=1, max=MOST, help="Requests per minute to each replica.", show_default=False),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST,
            help="Requests in progress at the same time in each replica.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write the key to this new file, which only you can read. If the file exists, nothing is "
            "created, and the document of --json is null.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Create an API key and print it; it cannot be shown again."""
    if not 1 <= len(name) <= LONGEST_NAME:
        raise UsageError(f"the name of a key has 1 to {LONGEST_NAME} characters, got {len(name)}")
    if output is not None and output.exists():
        if as_json:
            write_json(None)
        messages().print(f"{escape(str(output))} exists; no key was created.", soft_wrap=True)
        return
    with _store() as store:
        new = partial(
            store.create,
            name,
            set(scope),
            _caller(),
            valid_for=None if expires_days is None else timedelta(days=expires_days),
            per_minute=per_minute,
            concurrency=concurrency,
        )
        record, key = new() if output is None else _in_file(output, new, store)
    if as_json:
        write_json(_document(record) | ({} if output is not None else {"key": key}))
    elif output is not None:
        said = f"The API key {record.id} ({escape(name)}) is in {escape(str(output))}."
        messages().print(said, soft_wrap=True)
    else:
        messages().print("The key cannot be shown again:")
        print(key)  # noqa: T201 - alone on stdout, so that a script can read it


@keys.command("list")
def show(*, as_json: Json = False) -> None:
    """List all API keys, without their secrets."""
    from boxcal.app.access.keys import ID_DIGITS

    with _store() as store:
        records = store.list()
    if as_json:
        write_json([_document(record) for record in records])
        return
    table = plain_table("id", "name", "scopes", "limits", "state", "last used (UTC)")
    table.columns[0].no_wrap, table.columns[0].min_width = True, ID_DIGITS
    for record in records:
        used = record.last_used_at
        table.add_row(
            record.id,
            escape(record.name),
            " ".join(sorted(record.scopes)),
            _limits(record),
            _state(record),
            "" if used is None else f"{used:%F %T}",
        )
    screen().print(table)


@keys.command("revoke")
def revoke(key_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the key.")]) -> None:
    """Revoke an API key; running services refuse it within seconds."""
    with _store() as store:
        store.revoke(key_id, _caller())
    messages().print(f"The API key {key_id} is revoked.")


def _in_file(
    path: Path, create: Callable[[], tuple[KeyRecord, str]], store: KeyStore
) -> tuple[KeyRecord, str]:
    """Create a key in a file that only the owner may read: whole, or not at all."""
    new, record = path.with_name(f"{path.name}.{os.getpid()}"), None
    # Opened before there is a key: from the first key on, even a revoked one, a service refuses requests.
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        try:
            record, key = create()
            file.write(f"{key}\n")
            file.flush()
            os.fsync(file.fileno())
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            if record is not None:
                store.revoke(record.id, _caller())
            raise
    return record, key


def _store() -> closing[KeyStore]:
    from boxcal.app.access.keys import KeyStore

    return closing(KeyStore.at(read_settings().registry_url))


def _caller() -> Caller:
    from boxcal.app.registry.audit import Caller

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = str(os.getuid())
    return Caller(f"command line ({user})"[:LONGEST_NAME])


def _limits(record: KeyRecord) -> str:
    limits = []
    if record.per_minute is not None:
        limits.append(f"{record.per_minute} per minute")
    if record.concurrency is not None:
        limits.append(f"{record.concurrency} at once")
    return ", ".join(limits)


def _state(record: KeyRecord) -> str:
    if record.revoked_at is not None:
        return f"revoked {record.revoked_at:%F}"
    if record.expires_at is None:
        return "valid"
    verb = "expired" if record.expires_at <= datetime.now(UTC) else "expires"
    return f"{verb} {record.expires_at:%F %H:%M}"


def _document(record: KeyRecord) -> dict[str, object]:
    moments = ("created_at", "expires_at", "revoked_at", "last_used_at")
    return {
        "id": record.id,
        "name": record.name,
        "scopes": sorted(record.scopes),
        "per_minute": record.per_minute,
        "concurrency": record.concurrency,
        **{name: None if (at := getattr(record, name)) is None else at.isoformat() for name in moments},
    }
