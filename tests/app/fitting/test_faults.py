"""A full disk, slow uploads, calls at a bad moment and `kill -9` cost no other fit and no slot."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from boxcal.app.fitting.server import upload_validation
from boxcal.app.http.problems import (
    BoxcalError,
    FitAlreadyOver,
    FitQueueFull,
    StorageFull,
    StorageUnavailable,
    UploadStalled,
)
from boxcal.app.registry.records import FitState
from tests.app.fitting.service import Service
from tests.app.fitting.test_hostile import left_behind
from tests.app.fitting.test_jobs import QUICK, ended, refits_alone, submit, until
from tests.app.fitting.validation_data import CONTENT_TYPE, validation_npz
from tests.app.raising import raises_problem
from tools.hostile.crashes import rounds

pytestmark = pytest.mark.anyio

DISK_BYTES = 12 * 2**20


async def test_a_cancel_that_meets_the_start_or_the_result_leaves_the_next_fit_alone(tmp_path: Path) -> None:
    async with refits_alone(tmp_path) as (opened, _):
        jobs, fits = opened.jobs, opened.registry.fits
        reached, go = threading.Event(), threading.Event()

        def held(call: Any) -> Any:
            def waits(*arguments: Any) -> Any:
                result = call(*arguments)
                reached.set()
                go.wait(60)
                return result

            return waits

        start, accept = fits.start, opened.activator.accept
        fits.start = held(start)  # type: ignore[method-assign]
        early = await submit(jobs, QUICK)
        await asyncio.to_thread(reached.wait, 60)
        cancelling = asyncio.create_task(jobs.cancel(early))
        await asyncio.sleep(0)
        go.set()
        assert (await asyncio.wait_for(cancelling, 60)).state is FitState.CANCELLED

        reached.clear()
        go.clear()
        fits.start = start  # type: ignore[method-assign]
        opened.activator.accept = held(accept)  # type: ignore[method-assign]
        late = await submit(jobs, QUICK)
        await asyncio.to_thread(reached.wait, 240)
        process = jobs.workers.fits._process
        assert process is not None
        cancelling = asyncio.create_task(jobs.cancel(late))
        await asyncio.sleep(0)
        go.set()
        with raises_problem(FitAlreadyOver, match="it has succeeded"):
            await asyncio.wait_for(cancelling, 60)

        def fails(*_: object) -> Any:
            raise ZeroDivisionError("unexpected")

        opened.activator.accept = fails  # type: ignore[method-assign, assignment]
        unexpected = await until(jobs, await submit(jobs, QUICK), ended)
        assert (unexpected.state, "see the server log" in (unexpected.error or "")) == (FitState.FAILED, True)
        opened.activator.accept = accept  # type: ignore[method-assign]
        assert (await until(jobs, await submit(jobs, QUICK), ended)).state is FitState.SUCCEEDED
        assert jobs.workers.fits._process is process


async def test_slots_are_released_whatever_goes_wrong(tmp_path: Path) -> None:
    async with refits_alone(tmp_path) as (opened, _):
        jobs, workspace = opened.jobs, opened.jobs._slots._workspace
        make = workspace.new_folder
        for number, error in ((errno.ENOSPC, StorageFull), (errno.EACCES, StorageUnavailable)):

            def fails(name: str, number: int = number) -> Path:
                raise OSError(number, "made to fail", name)

            workspace.new_folder = fails  # type: ignore[method-assign]
            for _turn in range(12):
                with raises_problem(error, match="made to fail"):
                    async with jobs.reserve_slot("one"):
                        raise AssertionError("a folder was made")
        workspace.new_folder = make  # type: ignore[method-assign]
        async with AsyncExitStack() as stack:
            for _ in range(4):
                await stack.enter_async_context(jobs.reserve_slot("one"))
            full = "4 uploads are arriving from one; the limit is 4, half"
            with raises_problem(FitQueueFull, match=full):
                await stack.enter_async_context(jobs.reserve_slot("one"))
            await stack.enter_async_context(jobs.reserve_slot("another"))
        assert jobs._slots._arriving.total() == 0


async def test_slow_uploads_of_three_addresses_leave_places_to_others(tmp_path: Path) -> None:
    async with refits_alone(tmp_path) as (opened, _):
        jobs = opened.jobs
        async with AsyncExitStack() as stack:
            taken = Counter[str]()
            for client in "aaaaabbbccc":
                with suppress(BoxcalError):
                    await stack.enter_async_context(jobs.reserve_slot(client))
                    taken[client] += 1
            assert taken.total() == 7
            for client in ("d", "e"):
                await stack.enter_async_context(jobs.reserve_slot(client))
            with raises_problem(FitQueueFull, match="9 uploads are arriving; at most 8 may wait"):
                await stack.enter_async_context(jobs.reserve_slot("f"))


async def test_a_steady_but_slow_upload_ends_within_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_validation, "PATIENCE_SECONDS", 0.2)
    headers = {"content-type": "application/json", "content-length": str(2**16)}

    async def pieces() -> AsyncGenerator[bytes, None]:
        while True:
            await asyncio.sleep(0.01)
            yield b"x"

    began = time.monotonic()
    with raises_problem(UploadStalled, match="bytes in 0 s, and did not end"):
        await upload_validation.receive(headers, pieces(), tmp_path / "body", 2**30)
    assert 0.4 < time.monotonic() - began < 15  # a quarter of a second for 64 KiB


@pytest.mark.long
def test_slow_uploads_are_given_up(service: Service) -> None:
    """Nine clients send one byte each and wait; the service ends them, and takes a fit."""
    head = (
        f"POST /fit HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {CONTENT_TYPE}\r\n"
        "Content-Length: 100000\r\n\r\n-"
    ).encode()
    address = httpx.URL(service.url)
    slow = [socket.create_connection((address.host, address.port or 0), timeout=60) for _ in range(9)]
    try:
        for connection in slow:
            connection.sendall(head)
        answers = [connection.recv(2**16) for connection in slow]
    finally:
        for connection in slow:
            connection.close()
    statuses = sorted(int(answer.split()[1]) for answer in answers)
    assert statuses == [408] * 4 + [503] * 5
    # Uploads have a higher minimum rate than other bodies, whose end says less.
    assert sum(b"upload-stalled" in answer for answer in answers) == 4
    accepted = service.fit(validation_npz(50), wait=0, method="ts")
    assert accepted.status_code == 202, accepted.text
    service.client.delete(accepted.headers["location"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={DISK_BYTES}"
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], check=False).returncode:
        pytest.skip("mounting a file system takes root")
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


def fill(disk: Path, room: int) -> Path:
    """Take all space of a file system but `room` bytes; gives the file to remove."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(2**12))
        file.truncate(max(0, file.tell() - room))
    return filler


@pytest.mark.long
def test_a_full_disk_loses_nothing(small_disk: Path) -> None:
    with Service(small_disk / "data", model="logits:10") as service:
        client = service.client
        request = partial(service.fit, validation_npz(1000), wait=0, method="ts+pb", activate="always")
        filler = fill(small_disk, 2**16)
        refused = request()
        assert (refused.status_code, refused.json()["title"]) == (507, StorageFull.title), refused.text
        assert left_behind(service) == set()
        filler.unlink()

        accepted = request()
        assert accepted.status_code == 202, accepted.text
        filler = fill(small_disk, 0)
        stages = []
        with client.stream("GET", f"{accepted.headers['location']}/events") as events:
            for line in events.iter_lines():
                if line.startswith("data: "):
                    stages.append(line)
                    if "waiting for the registry" in line and filler.exists():
                        assert client.post("/calibrate", json={"logits": [[0.0] * 10]}).is_success
                        filler.unlink()
        done = client.get(accepted.headers["location"]).json()
        assert (done["state"], done["activated"]) == ("succeeded", True), done
        assert any("waiting for the registry" in stage for stage in stages)
        assert client.get("/health/ready").json()["calibrator"] == done["calibrator"]
        filler = fill(small_disk, 0)
        for path in ("/calibrators/0/activate", "/calibrators/rollback"):
            full = client.post(path)
            assert (full.status_code, full.json()["type"]) == (507, "urn:boxcal:problem:storage-full")
        filler.unlink()
        assert client.post("/calibrators/rollback").json()["version"] == 0


@pytest.mark.long
def test_a_hundred_kills(tmp_path: Path) -> None:
    found = rounds(tmp_path / "data", 100, seed=20)  # every kind in turn
    print(*found, sep="\n")  # noqa: T201 - shown by -s, and where the test fails
    for step in ("fitting", "fold", ("judging", "comparing", "preparing", "drawing", "done")):
        assert any(stage.startswith(step) for stage in found)
