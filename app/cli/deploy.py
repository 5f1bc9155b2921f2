"""`boxcal deploy`: checks a Serve config, sends it to a Ray cluster and waits until it serves."""

# ruff: noqa: PLC0415 - help needs none of what is imported late

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from boxcal.app.cli.output import UsageError, escape, screen

if TYPE_CHECKING:
    import httpx

APPLICATIONS = "/api/serve/applications/"
REQUEST_SECONDS = 30.0
POLL_SECONDS = 1.0


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
    import httpx

    from boxcal.app.client.errors import UnreachableError
    from boxcal.app.protocols.ray.serve_config import read_config

    try:
        config = read_config(file)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if check:
        screen().print(f"{escape(str(file))} is valid.", soft_wrap=True)
        return
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    names = [application["name"] for application in config["applications"]]
    try:
        with httpx.Client(base_url=address, headers=headers, timeout=REQUEST_SECONDS) as client:
            sent = client.put(APPLICATIONS, json=config)
            if not sent.is_success:
                raise UsageError(f"{address} answers {sent.status_code}: {' '.join(sent.text.split())[:500]}")
            wait(client, names, timeout)
    except httpx.HTTPError as error:
        raise UnreachableError(f"the cluster at {address} does not answer: {error}") from error
    screen().print(f"{escape(', '.join(names))}: every replica runs.", soft_wrap=True)


def wait(client: httpx.Client, names: list[str], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        found: dict[str, Any] = client.get(APPLICATIONS).raise_for_status().json()["applications"]
        states = {name: found.get(name, {}) for name in names}
        for name, state in states.items():
            if state.get("status") in {"DEPLOY_FAILED", "UNHEALTHY"}:
                raise UsageError(f"{name}: {state['status']}: {state.get('message')}")
        if all(state.get("status") == "RUNNING" for state in states.values()):
            return
        if time.monotonic() > deadline:
            raise UsageError(f"not every replica runs after {timeout:.0f} s: {states}")
        time.sleep(POLL_SECONDS)
