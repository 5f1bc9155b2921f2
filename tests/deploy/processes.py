"""Starts the real service and Debian's real Prometheus on free ports, and ends them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.app.fitting.service import free_port

ROOT = Path(__file__).parents[2]
SCRAPE_SECONDS = 0.5


def wait_until(
    is_done: Callable[[], bool], what: str, seconds: float, process: subprocess.Popen[bytes] | None = None
) -> None:
    """Return when `is_done` says so; fail after `seconds`, or at once when the process has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process is not None and process.poll() is not None:
            raise AssertionError(f"{what}: the process ended with {process.returncode}")
        with contextlib.suppress(httpx.TransportError):
            if is_done():
                return
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {seconds} s")


def probe(**settings: str) -> subprocess.CompletedProcess[str]:
    """Run the health check of the container with these settings."""
    return subprocess.run(
        [sys.executable, "-I", str(ROOT / "deploy" / "healthcheck.py")],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )


@contextlib.contextmanager
def running(command: list[str], log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command until the block ends, its output in `log`; SIGTERM must end it."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            env={**os.environ, **environment},
        )
        try:
            yield process
        except AssertionError as error:
            error.add_note(log.read_text()[-4000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise


@contextlib.contextmanager
def service(folder: Path, boxcal: Path | None = None) -> Iterator[str]:
    """Yield the address of a service that is ready, on a registry of its own.

    With the command of another environment it sees nothing of this checkout.
    """
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    settings = {
        "BOXCAL_MODEL": "digits",
        "BOXCAL_PORT": str(port),
        "BOXCAL_DATA_DIR": str(folder / "data"),
        "BOXCAL_DEVICE": "cpu",
    }
    if boxcal is not None:
        settings["PYTHONPATH"] = ""
    command = [str(boxcal or Path(sys.executable).with_name("boxcal")), "serve"]
    with running(command, folder / "service.log", **settings) as process:
        wait_until(lambda: httpx.get(f"{url}/health/ready").is_success, "the service", 120, process)
        yield url


def prometheus_configuration(scraped: str) -> dict[str, Any]:
    """Return the deployed configuration with the replicas' name turned into an address, and in a hurry."""
    folder = ROOT / "deploy" / "prometheus"
    configuration: dict[str, Any] = yaml.safe_load((folder / "prometheus.yml").read_text())
    configuration["rule_files"] = [str(folder / name) for name in configuration["rule_files"]]
    every = f"{int(SCRAPE_SECONDS * 1000)}ms"
    configuration["global"] = {"scrape_interval": every, "evaluation_interval": every}
    (job,) = [each for each in configuration["scrape_configs"] if each["job_name"] == "boxcal"]
    del job["dns_sd_configs"], job["authorization"]
    job["static_configs"] = [{"targets": [scraped.removeprefix("http://")]}]
    configuration["scrape_configs"] = [job]
    return configuration


@contextlib.contextmanager
def prometheus(scraped: str, folder: Path) -> Iterator[str]:
    configuration = folder / "prometheus.yml"
    configuration.write_text(yaml.safe_dump(prometheus_configuration(scraped)))
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--log.level=warn",
    ]
    with running(command, folder / "prometheus.log") as process:
        wait_until(lambda: httpx.get(f"{url}/-/ready").is_success, "Prometheus", 30, process)
        yield url
