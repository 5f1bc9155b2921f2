"""Fits wait their turn, report, are cancelled, crash and end; a workspace outlives no process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from prometheus_client import generate_latest

from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.messages import BODY_FILE
from boxcal.app.fitting.server.build import FitService, open_refits
from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.fitting.server.workspace import Workspace
from boxcal.app.http.problems import FitAlreadyOver, FitNotFound, FitQueueFull
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.registry.records import ActivatePolicy, FitRecord, FitState
from boxcal.models.loading.specifications import load_backbone
from tests.app.fitting.test_images import archive
from tests.app.fitting.validation_data import CONTENT_TYPE, DIGITS, form, validation_npz
from tests.app.raising import raises_problem

pytestmark = pytest.mark.anyio

SOURCE = BackboneSource("digits", None, None, "cpu", "float32")
BACKBONE = load_backbone("digits", device="cpu")
QUICK = validation_npz(200)
SLOW = validation_npz(5000)


@asynccontextmanager
async def refits(folder: Path) -> AsyncIterator[tuple[FitService, Telemetry]]:
    telemetry = Telemetry({})
    url = f"sqlite:///{folder / 'boxcal.db'}"
    async with open_refits(
        folder, url, DIGITS, backbone=BACKBONE, source=SOURCE, memory_bytes=2**32, telemetry=telemetry
    ) as opened:
        yield opened, telemetry


async def submit(
    jobs: FitJobs, data: bytes, method: str = "ts", activate: ActivatePolicy = ActivatePolicy.NEVER
) -> str:
    async with jobs.reserve_slot() as folder:
        (folder / BODY_FILE).write_bytes(form(data, method=method, activate=activate))
        return (await jobs.submit(folder, CONTENT_TYPE)).id


async def until(jobs: FitJobs, fit_id: str, reached: Callable[[FitRecord], bool]) -> FitRecord:
    async with asyncio.timeout(240):
        async for record in jobs.watch(fit_id):
            if reached(record):
                return record
    raise AssertionError(f"{record.state}: {record.error}")


def ended(record: FitRecord) -> bool:
    return record.state.is_final


def fitting(record: FitRecord) -> bool:
    return record.progress > 0


def fit_workers() -> set[psutil.Process]:
    """Give this process's fit workers; those of services that other test files started are among them."""
    return {
        child for child in psutil.Process().children() if "boxcal.app.fitting.worker.main" in child.cmdline()
    }


@asynccontextmanager
async def refits_alone(folder: Path) -> AsyncIterator[tuple[FitService, Telemetry]]:
    """As `refits`; at the end no folder and no worker is left."""
    others = fit_workers()
    async with refits(folder) as opened:
        yield opened
    assert [path for path in (folder / "work").iterdir() if path.is_dir()] == []
    assert fit_workers() <= others


async def test_fits_run_one_after_the_other_and_tell_how_far_they_are(tmp_path: Path) -> None:
    async with refits_alone(tmp_path) as (opened, telemetry):
        jobs = opened.jobs
        first = await submit(jobs, QUICK, activate=ActivatePolicy.ALWAYS)
        second = await submit(jobs, QUICK, "pb", ActivatePolicy.IF_BETTER)
        assert [record.id for record in await jobs.list(10)] == [second, first]
        seen = [record async for record in jobs.watch(first)]
        assert (await jobs.get(second)).state is not FitState.SUCCEEDED
        assert [record.progress for record in seen] == sorted(record.progress for record in seen)
        assert {"starting", "fitting ts", "done"} <= {record.stage for record in seen}
        assert {record.state for record in seen[:-1]} <= {FitState.QUEUED, FitState.RUNNING}
        assert seen[-1].state is FitState.SUCCEEDED
        assert (seen[-1].calibrator, seen[-1].activated) == (1, True)
        last = await jobs.wait(second, 240)
        assert (last.state, last.calibrator) == (FitState.SUCCEEDED, 2)
        assert "compared with version 1, on unseen folds NLL" in (last.decision or "")
        assert opened.registry.report(2)["fit"]["certificate"]["starts"] >= 1
        assert opened.registry.reliability(2, "svg").lstrip().startswith(b"<?xml")
        assert (await jobs.get(first)) == seen[-1]
        exposition = generate_latest(telemetry.registry)
        assert b'boxcal_fits_total{state="succeeded"} 2.0' in exposition
        assert b'boxcal_fit_seconds_count{method="pb"} 1.0' in exposition


async def test_a_fit_is_cancelled_while_it_waits_and_while_it_runs(tmp_path: Path) -> None:
    async with refits_alone(tmp_path) as (opened, telemetry):
        jobs = opened.jobs
        running = await submit(jobs, SLOW, "ts+pb")
        waiting = await submit(jobs, QUICK)
        last = await submit(jobs, QUICK)
        await until(jobs, running, fitting)
        cancelled = await jobs.cancel(waiting)
        assert (cancelled.state, cancelled.error) == (FitState.CANCELLED, "Cancelled on request.")
        assert (await jobs.wait(running, 0.05)).state is FitState.RUNNING
        waiters = [asyncio.create_task(jobs.wait(running, 240)) for _ in range(5)]
        assert (await jobs.cancel(running)).state is FitState.CANCELLED
        assert (await jobs.cancel(running)).state is FitState.CANCELLED
        assert {record.state for record in await asyncio.gather(*waiters)} == {FitState.CANCELLED}
        assert (await until(jobs, last, ended)).state is FitState.SUCCEEDED
        with raises_problem(FitAlreadyOver, match=f"Fit {last} is over: it has succeeded"):
            await jobs.cancel(last)
        for call in (jobs.cancel("nonesuch"), jobs.wait("nonesuch", 1)):
            with raises_problem(FitNotFound):
                await call
        assert [record.version for record in opened.registry.list()] == [1, 0]
        assert b'boxcal_fits_total{state="cancelled"} 2.0' in generate_latest(telemetry.registry)


async def test_a_fit_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    async with refits_alone(tmp_path) as (opened, telemetry):
        data = archive(**{"3/broken.png": b"\x89PNG\r\n\x1a\n"})
        failed = await until(opened.jobs, await submit(opened.jobs, data), ended)
        assert failed.state is FitState.FAILED
        assert "3/broken.png: The PNG image of 8 bytes is damaged" in (failed.error or "")
        assert b'boxcal_fits_total{state="failed"} 1.0' in generate_latest(telemetry.registry)


async def test_the_queue_is_bounded_counts_arriving_uploads_and_says_when_to_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with refits_alone(tmp_path) as (opened, _):
        jobs = opened.jobs
        monkeypatch.setattr("boxcal.app.settings.limits.MAX_WAITING_FITS", 1)
        running = await submit(jobs, SLOW, "ts+pb")
        async with jobs.reserve_slot() as folder:
            with raises_problem(FitQueueFull, match="1 fits are running or waiting and 1 uploads") as caught:
                await submit(jobs, QUICK)
            assert int(caught.value.headers["Retry-After"]) >= 1
        assert not folder.exists()
        waiting = await submit(jobs, QUICK)
        with raises_problem(FitQueueFull):
            await submit(jobs, QUICK)
        await jobs.cancel(waiting)
        again = await submit(jobs, QUICK)
        await jobs.cancel(running)
        assert (await until(jobs, again, ended)).state is FitState.SUCCEEDED


HOLD = (
    "import sys, time; from pathlib import Path; from boxcal.app.fitting.server.workspace import Workspace; "
    "w = Workspace(Path(sys.argv[1])); (w.new_folder('upload') / 'logits.npy').write_bytes(b'x'); "
    "print(w.name, flush=True); time.sleep(60)"
)


def test_two_in_one_process_see_each_other(tmp_path: Path) -> None:
    with Workspace(tmp_path) as one, Workspace(tmp_path) as other:
        assert one.sweep() == other.sweep() == {one.name, other.name}
    with Workspace(tmp_path) as alone:
        assert alone.sweep() == {alone.name}


def test_what_others_keep_in_a_folder_called_work_stays(tmp_path: Path) -> None:
    for name in ("thesis", ".git", "2026-11"):
        (tmp_path / "work" / name).mkdir(parents=True)
    with Workspace(tmp_path) as own:
        assert own.sweep() == {own.name}
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"thesis", ".git", "2026-11", ".sweep"}


def test_the_folder_of_a_killed_process_is_removed_and_a_living_one_stays(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        name = process.stdout.readline().strip()
        with Workspace(tmp_path) as beside:
            assert beside.sweep() == {beside.name, name}
        assert (tmp_path / "work" / name / "upload").exists()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with Workspace(tmp_path) as after:
            assert after.sweep() == {after.name}
        assert not (tmp_path / "work" / name).exists()
