"""A replica whose database goes away starts from its copy, keeps results, and follows again afterwards."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from boxcal.app.fitting.server.runner import WAITING
from boxcal.app.http.problems import DamagedArtifact, RegistryUnavailable
from boxcal.app.observability import supervised_task as tasks
from boxcal.app.observability.supervised_task import background
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.registry.audit import Action, Caller, entries
from boxcal.app.registry.records import ActivatePolicy, BackboneIdentity, FitState
from boxcal.app.registry.storage import FILE_NAME, CalibratorCopy
from tests.app.fitting.test_jobs import QUICK, SLOW, ended, submit, until
from tests.app.fitting.validation_data import DIGITS
from tests.app.raising import raises_problem
from tests.app.registry.postgresql import PostgreSQL
from tests.app.registry.test_replicas import replica
from tests.app.waiting import eventually

pytestmark = pytest.mark.anyio


async def test_a_fit_that_ends_during_an_outage_is_recorded_afterwards(
    tmp_path: Path, url: str, postgresql: PostgreSQL
) -> None:
    async with replica(tmp_path, url) as opened:
        fit_id = await submit(opened.jobs, QUICK, activate=ActivatePolicy.ALWAYS)
        await until(opened.jobs, fit_id, lambda record: record.state is FitState.RUNNING)
        await asyncio.to_thread(postgresql.stop)
        try:
            await until(opened.jobs, fit_id, lambda record: record.stage == WAITING)
            with pytest.raises(RegistryUnavailable):
                await opened.registry.run(opened.registry.list)
        finally:
            await asyncio.to_thread(postgresql.start)
        record = await until(opened.jobs, fit_id, ended)
        assert (record.state, record.calibrator, record.activated) == (FitState.SUCCEEDED, 1, True)
        assert opened.activator.active.current.version == 1


async def test_a_fit_that_ends_while_the_database_is_read_only_is_recorded_afterwards(
    tmp_path: Path, url: str, postgresql: PostgreSQL, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a failover to a standby; sessions that began read-only stay so."""
    async with replica(tmp_path, url) as opened:
        fit_id = await submit(opened.jobs, QUICK, activate=ActivatePolicy.ALWAYS)
        await until(opened.jobs, fit_id, lambda record: record.state is FitState.RUNNING)
        await asyncio.to_thread(postgresql.set_read_only, url, True)
        await until(opened.jobs, fit_id, lambda record: record.stage == WAITING)
        for _ in range(3):
            await opened.registry.run(opened.registry.list)
            with pytest.raises(RegistryUnavailable, match="read-only transaction"):
                await opened.registry.run(opened.activator.activate, 0)
        assert sum("read-only transaction" in record.message for record in caplog.records) == 1
        await asyncio.to_thread(postgresql.set_read_only, url, False)
        record = await until(opened.jobs, fit_id, ended)
        assert (record.state, record.calibrator, record.activated) == (FitState.SUCCEEDED, 1, True)


async def test_a_cancellation_during_an_outage_is_in_the_audit_log(
    tmp_path: Path, url: str, postgresql: PostgreSQL
) -> None:
    async with replica(tmp_path, url) as opened:
        _, waiting = [await submit(opened.jobs, SLOW) for _ in range(2)]
        await asyncio.to_thread(postgresql.stop)
        try:
            with pytest.raises(RegistryUnavailable, match="ends as soon as the registry answers"):
                await opened.jobs.cancel(waiting, Caller("someone"))
        finally:
            await asyncio.to_thread(postgresql.start)
        assert (await until(opened.jobs, waiting, ended)).state is FitState.CANCELLED
        newest = await opened.registry.run(entries, opened.registry.database, 1)
        assert [(entry.action, entry.name) for entry in newest] == [(Action.CANCEL, "someone")]


async def test_a_shared_fit_that_cannot_be_released_is_not_shown_as_interrupted(
    tmp_path: Path, url: str, postgresql: PostgreSQL
) -> None:
    async with replica(tmp_path / "one", url, shared=tmp_path / "shared") as opened:
        _, waiting = [await submit(opened.jobs, SLOW) for _ in range(2)]
        job = opened.jobs._jobs[waiting]
        await asyncio.to_thread(postgresql.stop)
        try:
            await opened.jobs.close()
        finally:
            await asyncio.to_thread(postgresql.start)
        assert (job.record.state, job.is_elsewhere) == (FitState.QUEUED, True)


async def test_a_replica_starts_from_its_copy_and_follows_once_the_database_is_back(
    tmp_path: Path, url: str, postgresql: PostgreSQL
) -> None:
    async with AsyncExitStack() as stack:
        async with replica(tmp_path / "one", url) as one:
            fit_id = await submit(one.jobs, QUICK, activate=ActivatePolicy.ALWAYS)
            await until(one.jobs, fit_id, ended)
        await asyncio.to_thread(postgresql.stop)
        try:
            with pytest.raises(RegistryUnavailable, match="no calibrator of this model"):
                async with replica(tmp_path / "other", url):
                    pass
            opened = await stack.enter_async_context(replica(tmp_path / "one", url))
            assert opened.activator.active.current.version == 1
            assert (await opened.activator.fetch(1)) is opened.activator.active.current
            with pytest.raises(RegistryUnavailable):
                await opened.activator.fetch(0)
        finally:
            await asyncio.to_thread(postgresql.start)
        async with replica(tmp_path / "other", url) as other:
            await other.registry.run(other.activator.activate, 0)
        await eventually(lambda: opened.activator.active.current.version == 0)


def test_the_copy_is_of_one_backbone_and_is_checked(tmp_path: Path) -> None:
    copy = CalibratorCopy(tmp_path, DIGITS)
    assert copy.read() is None
    copy.write(7, 3, "ts", b"artifact")
    copy.write(6, 2, "pb", b"earlier")
    assert copy.read() == (7, 3, "ts", b"artifact")
    assert CalibratorCopy(tmp_path, BackboneIdentity("digits", "cd" * 32, DIGITS.labels)).read() is None
    file = tmp_path / FILE_NAME
    file.write_bytes(file.read_bytes()[:-1])
    with raises_problem(DamagedArtifact, match="SHA-256 differs"):
        copy.read()
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


async def test_a_background_task_that_fails_or_ends_starts_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tasks, "SHORTEST_PAUSE", 0.0)
    monkeypatch.setattr(tasks, "LONGEST_PAUSE", 0.0)
    telemetry, runs, third = Telemetry({}), [0], asyncio.Event()

    async def work() -> None:
        runs[0] += 1
        if runs[0] == 1:
            raise RuntimeError("first")
        if runs[0] == 3:
            third.set()
            await asyncio.sleep(3600)

    async with background("follower", work, telemetry):
        await third.wait()
    assert b'boxcal_background_restarts_total{task="follower"} 2.0' in generate_latest(telemetry.registry)
    assert [record.exc_info is not None for record in caplog.records] == [True, False]
