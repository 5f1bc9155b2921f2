"""Faults of a shared registry: PostgreSQL stops, hangs or crashes, a replica is paused, a clock is wrong."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import psycopg
import pytest

from boxcal.app.http.problems import RegistryUnavailable
from boxcal.app.registry.database import CONNECTIONS
from boxcal.app.registry.records import ActivatePolicy, Decision, FitState, FittedCalibrator
from boxcal.app.registry.store import Registry
from tests.app.fitting.validation_data import DIGITS
from tests.app.registry.pgbouncer import pgbouncer
from tests.app.registry.postgresql import PostgreSQL

FITTED = FittedCalibrator("ts", b"bytes", {"method": "ts"}, {"warnings": []}, b"<svg/>", b"png", 7)

REPLICA = """
import sys
from datetime import UTC, datetime
from boxcal.app.http.problems import FitLost
from boxcal.app.registry.records import ActivatePolicy, Decision
from tests.app.registry.test_faults import DIGITS, FITTED
from boxcal.app.registry.store import Registry

registry = Registry(sys.argv[1], DIGITS, owner="replica")
fit = registry.fits.start(registry.fits.add("fit", "ts", ActivatePolicy.ALWAYS, 7))
print(datetime.now(UTC).timestamp(), flush=True)
input()
registry.database.availability.seconds_without_gap = lambda: 1000.0
print(registry.fits.interrupt_abandoned(set()), flush=True)
try:
    registry.record_fit(fit, FITTED, lambda _: Decision(True, "so"))
    print("recorded", flush=True)
except FitLost as error:
    print(type(error).__name__, flush=True)
registry.close()
"""


@pytest.fixture
def registry(url: str) -> Iterator[Registry]:
    registry = Registry(url, DIGITS, owner="me")
    yield registry
    registry.close()


@contextmanager
def replica(url: str, *prefix: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has started a fit; told to by a line, it sweeps and then records the fit's success."""
    command = [*prefix, sys.executable, "-c", REPLICA, url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def call_all(registry: Registry, count: int) -> list[object]:
    async def calls() -> list[object]:
        return list(
            await asyncio.gather(*(registry.run(registry.list) for _ in range(count)), return_exceptions=True)
        )

    return asyncio.run(calls())


def test_a_paused_process_whose_fit_was_given_up_activates_nothing(
    registry: Registry, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replica(url) as paused:
        assert line(paused)
        psutil.Process(paused.pid).suspend()
        monkeypatch.setattr("boxcal.app.registry.fits.SILENT_AFTER", timedelta(0))
        assert registry.fits.interrupt_abandoned(set()) == 1
        psutil.Process(paused.pid).resume()
        assert paused.communicate("\n")[0].split() == ["0", "FitLost"]
    record = registry.fits.get("fit")
    assert (record.state, record.calibrator) == (FitState.INTERRUPTED, None)
    assert registry.activations.active().version == 0
    assert [each.version for each in registry.list()] == [0]


@pytest.mark.parametrize("shift", ["+90s", "-90s"])
def test_a_wrong_clock_interrupts_nothing(registry: Registry, url: str, shift: str) -> None:
    mine = registry.fits.start(registry.fits.add("mine", "ts", ActivatePolicy.ALWAYS, 7))
    with replica(url, "faketime", "-f", shift) as other:
        assert abs(float(line(other)) - time.time()) > 60
        registry.database.availability.seconds_without_gap = lambda: 1000.0  # type: ignore[method-assign]
        assert registry.fits.interrupt_abandoned(set()) == 0
        assert other.communicate("\n")[0].split() == ["0", "recorded"]
    theirs = registry.fits.get("fit")
    assert (theirs.state, registry.activations.active().version) == (FitState.SUCCEEDED, 1)
    assert abs(theirs.created_at - mine.created_at) < timedelta(seconds=60)
    assert registry.record_fit(mine, FITTED, lambda _: Decision(True, "so"))[0] == 2


def test_a_server_that_hangs_fails_every_call_and_is_used_again_afterwards(
    registry: Registry, postgresql: PostgreSQL, caplog: pytest.LogCaptureFixture
) -> None:
    assert call_all(registry, 2 * CONNECTIONS) == [registry.list()] * 2 * CONNECTIONS
    caplog.set_level(logging.WARNING, "boxcal")
    postgresql.pause()
    try:
        answers = call_all(registry, 20)
    finally:
        postgresql.resume()
    assert {type(answer) for answer in answers} == {RegistryUnavailable}
    assert answers[0].headers == {"Retry-After": "2"}  # type: ignore[attr-defined]
    assert call_all(registry, 20) == [registry.list()] * 20
    lost, found = (record.getMessage() for record in caplog.records)
    assert "does not answer" in lost
    assert "answers again after" in found


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
def test_a_restarted_server_fails_no_call(
    registry: Registry, postgresql: PostgreSQL, how: signal.Signals
) -> None:
    assert len(registry.list()) == 1
    for _ in range(3):
        postgresql.stop(how)
        try:
            with pytest.raises(RegistryUnavailable):
                registry.list()
        finally:
            postgresql.start()
        assert len(registry.list()) == 1
        postgresql.stop(how)  # so that the next call meets a connection of the server before
        postgresql.start()
        assert call_all(registry, 2 * CONNECTIONS) == [registry.list()] * 2 * CONNECTIONS


def test_after_an_outage_nobody_is_given_up_for_having_been_silent(
    registry: Registry, url: str, postgresql: PostgreSQL
) -> None:
    def fall_silent() -> None:
        with registry.database.write() as connection:
            connection.exec_driver_sql("UPDATE fits SET seen_at = seen_at - interval '2 minutes'")

    other = Registry(url, DIGITS, owner="other")
    other.list()
    other.database.availability._steady_from -= 1000
    registry.fits.add("before", "ts", ActivatePolicy.NEVER, 7)
    assert other.fits.interrupt_abandoned(set()) == 0
    fall_silent()
    registry.fits.keep_alive()
    assert other.fits.interrupt_abandoned(set()) == 0
    fall_silent()
    assert other.fits.interrupt_abandoned(set()) == 1
    postgresql.stop()
    try:
        with pytest.raises(RegistryUnavailable):
            other.list()
    finally:
        postgresql.start()
    registry.fits.add("after", "ts", ActivatePolicy.NEVER, 7)
    fall_silent()
    other.list()
    assert other.fits.interrupt_abandoned(set()) == 0
    other.close()


def test_pgbouncer_in_transaction_mode(url: str) -> None:
    with tempfile.TemporaryDirectory(prefix="boxcal-pgbouncer-") as folder:
        Path(folder).chmod(0o755)
        with pgbouncer(url, Path(folder), pool_size=2) as pooled:
            replicas = [Registry(pooled, DIGITS, owner=name) for name in ("one", "other")]

            def work(number: int) -> None:
                registry = replicas[number % 2]
                fit = registry.fits.start(registry.fits.add(f"fit-{number}", "ts", ActivatePolicy.NEVER, 7))
                version, _ = registry.record_fit(fit, FITTED, lambda _: Decision(True, "so"))
                assert registry.artifact(version) == b"bytes"
                assert len(registry.list()) > 1

            with ThreadPoolExecutor(2 * CONNECTIONS) as threads:
                list(threads.map(work, range(60)))
            assert replicas[0].activations.active() == replicas[1].activations.active()
            with psycopg.connect(url) as direct:
                (connections,) = direct.execute(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                ).fetchone() or (None,)
            assert connections == 2 + 1  # PgBouncer's, and the one that counts
            for registry in replicas:
                registry.close()
