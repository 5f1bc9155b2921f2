"""Replicas that share a registry wake each other, cancel each other's fits and continue them."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import AsyncMock

import httpx
import psycopg
import pytest

from boxcal.app.fitting.server.build import FitService, open_refits
from boxcal.app.http.problems import DamagedArtifact, FitElsewhere, FitQueueFull
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.registry.fits import MAX_ATTEMPTS
from boxcal.app.registry.records import ActivatePolicy, Decision, FitRecord, FitState, FittedCalibrator
from boxcal.app.registry.storage import SharedArtifacts, SharedDirectory, SharedSets
from boxcal.app.registry.store import Registry
from boxcal.calibrators import Calibrator
from tests.app.fitting.service import Service
from tests.app.fitting.test_jobs import BACKBONE, QUICK, SLOW, SOURCE, ended, submit, until
from tests.app.fitting.validation_data import DIGITS
from tests.app.raising import raises_problem
from tests.app.waiting import eventually

pytestmark = pytest.mark.anyio

ARTIFACT = Calibrator.uncalibrated(10).to_bytes()
FITTED = FittedCalibrator("ts", ARTIFACT, {}, {"warnings": []}, b"<svg/>", b"png", 7)


@asynccontextmanager
async def replica(
    folder: Path, url: str, *, shared: Path | None = None, queues_only: bool = False
) -> AsyncIterator[FitService]:
    async with open_refits(
        folder,
        url,
        DIGITS,
        backbone=BACKBONE,
        source=SOURCE,
        memory_bytes=2**32,
        telemetry=Telemetry({}),
        shared_dir=shared,
        queues_only=queues_only,
    ) as opened:
        yield opened


def started(record: FitRecord) -> bool:
    return record.state is FitState.RUNNING


async def listeners(url: str) -> int:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        cursor = await connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN boxcal' AND state = 'idle' "
            "AND datname = current_database()"
        )
        row = await cursor.fetchone()
    assert row is not None
    return int(row[0])


async def test_a_notification_wakes_a_replica_that_polls_rarely(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boxcal.app.fitting.server.build.FOLLOW_SECONDS", 600.0)

    async with replica(tmp_path / "one", url) as one, replica(tmp_path / "other", url) as other:
        async with asyncio.timeout(60):
            while await listeners(url) < 2:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
        fit = one.registry.fits.add("fit", "ts", ActivatePolicy.ALWAYS, 7)
        one.registry.record_fit(fit, FITTED, lambda _: Decision(True, "so"))
        await eventually(lambda: other.activator.active.current.version == 1)


async def test_a_fit_is_cancelled_through_any_replica(tmp_path: Path, url: str) -> None:
    async with replica(tmp_path / "one", url) as one, replica(tmp_path / "other", url) as other:
        running, waiting = [await submit(one.jobs, SLOW) for _ in range(2)]
        await until(one.jobs, running, started)
        for fit_id in (waiting, running):
            record = await other.jobs.cancel(fit_id)
            assert (record.state, record.error) == (FitState.CANCELLED, "Cancelled on request.")
            assert (await one.jobs.get(fit_id)).state is FitState.CANCELLED


async def test_an_activation_that_cannot_be_followed_holds_up_no_fit(tmp_path: Path, url: str) -> None:
    async with replica(tmp_path / "one", url) as one, replica(tmp_path / "other", url) as other:
        running = await submit(one.jobs, SLOW)
        await until(one.jobs, running, started)
        fit = other.registry.fits.add("fit", "ts", ActivatePolicy.ALWAYS, 7)
        damaged = replace(FITTED, artifact=b"damaged")
        other.registry.record_fit(fit, damaged, lambda _: Decision(True, "so"))
        assert (await other.jobs.cancel(running)).state is FitState.CANCELLED


async def test_a_request_to_cancel_that_its_replica_does_not_read_is_recorded(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boxcal.app.fitting.server.jobs.ELSEWHERE_SECONDS", 0.0)

    async with replica(tmp_path, url) as opened:
        opened.registry.fits.owner = "stopped"
        opened.registry.fits.add("fit", "ts", ActivatePolicy.NEVER, 7)
        opened.registry.fits.owner = "me"
        with raises_problem(FitElsewhere, match="The request is recorded"):
            await opened.jobs.cancel("fit")
        opened.registry.fits.owner = "stopped"
        assert opened.registry.fits.cancel_requests() == ["fit"]


async def test_a_replica_that_stops_hands_its_fits_over(tmp_path: Path, url: str) -> None:
    shared = tmp_path / "shared"
    async with replica(tmp_path / "other", url, shared=shared) as other:
        async with replica(tmp_path / "one", url, shared=shared) as one:
            running = await submit(one.jobs, QUICK)
            waiting = await submit(one.jobs, QUICK, "pb")
            await until(one.jobs, running, started)
            released = asyncio.create_task(until(one.jobs, running, lambda record: record.stage == "waiting"))
        await released
        for fit_id, method in ((running, "ts"), (waiting, "pb")):
            record = await until(other.jobs, fit_id, ended)
            assert (record.state, record.method) == (FitState.SUCCEEDED, method), record.error
        assert [record.version for record in other.registry.list()] == [2, 1, 0]
    assert [folder.name for folder in shared.iterdir()] == ["artifacts"]


@pytest.mark.parametrize("shares_file", [False, True], ids=["PostgreSQL", "SQLite"])
async def test_a_fit_of_the_queue_is_run_by_a_worker_or_cancelled_before(
    tmp_path: Path, url: str, shares_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boxcal.app.fitting.server.build.SWEEP_SECONDS", 0.5)
    url = f"sqlite:///{tmp_path / 'shared.db'}" if shares_file else url

    shared = tmp_path / "shared"
    # Processes that share a SQLite file also share the data folder, which tells who is alive.
    async with replica(tmp_path, url, shared=shared, queues_only=True) as service:
        unwanted = await submit(service.jobs, SLOW)
        assert len(list(shared.glob(f"{unwanted}.*"))) == 1
        assert (await service.jobs.cancel(unwanted)).state is FitState.CANCELLED
        assert not list(shared.glob(f"{unwanted}.*"))
        fit_id = await submit(service.jobs, QUICK, activate=ActivatePolicy.ALWAYS)
        assert (await service.jobs.get(fit_id)).state is FitState.QUEUED
        async with replica(tmp_path, url, shared=shared):
            record = await until(service.jobs, fit_id, ended)
            assert (record.state, record.attempt) == (FitState.SUCCEEDED, 1), record.error
            await eventually(lambda: service.activator.active.current.version == 1)


async def test_a_queue_that_is_full_refuses(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boxcal.app.settings.limits.MAX_QUEUED_FITS", 1)

    async with replica(tmp_path, url, shared=tmp_path / "shared", queues_only=True) as service:
        await submit(service.jobs, QUICK)
        with raises_problem(FitQueueFull, match="1 fits wait for a worker"):
            await submit(service.jobs, QUICK)


def test_artifacts_are_read_from_the_shared_directory(tmp_path: Path, url: str) -> None:
    files = SharedArtifacts(SharedDirectory(tmp_path))
    one, other = (Registry(url, DIGITS, owner=name, files=files) for name in ("one", "other"))
    fit = one.fits.add("fit", "ts", ActivatePolicy.ALWAYS, 7)
    version, _ = one.record_fit(fit, FITTED, lambda _: Decision(True, "so"))
    file = tmp_path / "artifacts" / (one.get(version).sha256 or "")
    assert file.read_bytes() == ARTIFACT
    with other.database.write() as connection:
        connection.exec_driver_sql("ALTER TABLE calibrators DISABLE TRIGGER ALL")
        connection.exec_driver_sql("UPDATE calibrators SET artifact = 'other'")
    assert other.artifact(version) == ARTIFACT
    file.write_bytes(b"damaged")
    with raises_problem(DamagedArtifact):
        other.artifact(version)
    for registry in (one, other):
        registry.close()


def test_only_the_newest_artifacts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("boxcal.app.registry.storage.KEPT", 2)
    files = SharedArtifacts(SharedDirectory(tmp_path))
    names = [hashlib.sha256(bytes([number])).hexdigest() for number in range(3)]
    for number, name in enumerate(names):
        files.write(name, bytes([number]))
        os.utime(tmp_path / "artifacts" / name, (number, number))
    files.write("ab" * 32, b"new")
    assert files.read(names[0]) is None
    assert files.read(names[2]) == bytes([2])
    assert len(list((tmp_path / "artifacts").iterdir())) == 2


@pytest.mark.long
def test_boxcal_worker_runs_the_fits_of_a_service(tmp_path: Path, url: str) -> None:
    settings = {"database_url": url, "shared_dir": str(tmp_path / "shared"), "device": "cpu", "fits": "queue"}
    with Service(tmp_path / "one", **settings) as service:
        environment = {**service.environment, "BOXCAL_DATA_DIR": str(tmp_path / "worker")}
        command = [sys.executable, "-c", "from boxcal.app.cli import main; main()", "worker"]
        sent = service.fit(QUICK, wait=0, method="ts", activate="always")
        assert sent.json()["state"] == "queued"
        with subprocess.Popen(command, env=environment) as worker:
            path = f"{service.url}/fits/{sent.json()['id']}/events"
            with httpx.stream("GET", path, timeout=280) as events:
                assert '"state":"succeeded"' in [line for line in events.iter_lines() if line][-1]
            worker.terminate()
            assert worker.wait(60) == 0


async def test_a_replica_that_was_only_paused_leaves_its_fit_to_the_one_that_adopted_it(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = AsyncExitStack()
    shared = tmp_path / "shared"
    async with replica(tmp_path / "one", url, shared=shared) as one:
        fit_id = await submit(one.jobs, QUICK)
        await until(one.jobs, fit_id, started)
        with monkeypatch.context() as patched:  # the sweep at the start adopts it
            patched.setattr("boxcal.app.registry.fits.ADOPTED_AFTER", timedelta(seconds=-1))
            patched.setattr(one.jobs, "_adopt", AsyncMock())  # which would take it back at once
            other = await stack.enter_async_context(replica(tmp_path / "other", url, shared=shared))
        async with stack:
            record = await until(other.jobs, fit_id, ended)
            assert (record.state, record.attempt) == (FitState.SUCCEEDED, 2), record.error
            assert (await until(one.jobs, fit_id, ended)).calibrator == record.calibrator == 1
            assert [record.version for record in other.registry.list()] == [1, 0]


async def test_a_fit_that_stopped_several_replicas_is_interrupted(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ADOPTED_AFTER", "SILENT_AFTER"):
        monkeypatch.setattr(f"boxcal.app.registry.fits.{name}", timedelta(seconds=-1))

    shared = tmp_path / "shared"
    async with replica(tmp_path, url) as opened:
        fits = opened.registry.fits
        fits.owner = "first"
        fit = fits.add("fit", "ts", ActivatePolicy.NEVER, 7, shared=True)
        for number in range(MAX_ATTEMPTS):
            fit = fits.start(fit)
            fits.owner = f"next {number}"
            adopted = fits.adopt(set())
            assert (adopted is None) == (number == MAX_ATTEMPTS - 1)
        assert fits.interrupt_abandoned(set()) == 1
        fits.owner = "first"
        fits.add("gone", "ts", ActivatePolicy.NEVER, 7, shared=True)
    async with replica(tmp_path, url, shared=shared) as opened:
        record = await opened.registry.run(opened.registry.fits.get, "gone")
        assert record.state is FitState.INTERRUPTED
        assert "There is no folder gone.first" in (record.error or "")


def test_old_folders_of_ended_fits_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = SharedSets(SharedDirectory(tmp_path), "me", Path)
    ended, running, gone, me, other = (number * 16 for number in "abc01")
    for name in (f"{ended}.{me}", f"{gone}.", f"{running}.{other}"):
        (tmp_path / name).mkdir()
    vanished = tmp_path / f"{gone}.{other}"  # listed, but gone when it is looked at
    vanished.symlink_to("nowhere")
    shared.sweep({running})
    assert len(list(tmp_path.glob("*.*"))) == 4
    vanished.unlink()
    monkeypatch.setattr("boxcal.app.registry.storage.ORPHAN_SECONDS", -1.0)
    shared.sweep({running})
    assert {folder.name for folder in tmp_path.iterdir()} == {"artifacts", f"{running}.{other}"}


def test_what_others_keep_in_the_shared_directory_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boxcal.app.registry.storage.ORPHAN_SECONDS", -1.0)
    monkeypatch.setattr("boxcal.app.registry.storage.KEPT", 1)
    names = (".venv", ".git", "backup.2026", "model.v1", "a" * 16, f"{'a' * 16}.tar", "artifacts/model.pkl")
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text("of others")
    (tmp_path / "artifacts" / "notes.txt").write_text("of others")
    storage = SharedDirectory(tmp_path)
    SharedSets(storage, "0" * 16, Path).sweep(set())
    for content in (b"one", b"two"):
        SharedArtifacts(storage).write(hashlib.sha256(content).hexdigest(), content)
    assert all((tmp_path / name / "file").read_text() == "of others" for name in names)
    kept = {path.name for path in (tmp_path / "artifacts").iterdir()}
    assert kept == {"model.pkl", "notes.txt", hashlib.sha256(b"two").hexdigest()}


PRELUDE = """
from datetime import timedelta
from boxcal.app.registry import fits
from tests.app.raising import raises_problem
fits.ADOPTED_AFTER = timedelta(seconds=3)
"""


@pytest.mark.long
def test_a_fit_whose_replica_is_killed_is_finished_by_another(tmp_path: Path, url: str) -> None:
    settings = {"database_url": url, "shared_dir": str(tmp_path / "shared"), "device": "cpu"}
    with (
        Service(tmp_path / "one", prelude=PRELUDE, **settings) as one,
        Service(tmp_path / "other", prelude=PRELUDE, **settings) as other,
    ):
        sent = one.fit(SLOW, wait=0, method="ts", activate="always")
        assert sent.status_code == 202, sent.text
        path = f"/fits/{sent.json()['id']}"
        with httpx.stream("GET", f"{one.url}{path}/events", timeout=280) as events:
            next(line for line in events.iter_lines() if '"state":"running"' in line)
        one.kill()
        with httpx.stream("GET", f"{other.url}{path}/events", timeout=280) as events:
            assert '"state":"succeeded"' in [line for line in events.iter_lines() if line][-1]
        assert other.client.get("/health/ready").json()["calibrator"] == 1
