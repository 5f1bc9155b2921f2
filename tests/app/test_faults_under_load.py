"""Faults of the machine while clients predict: no prediction fails, all else is refused by name."""

from __future__ import annotations

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.app.fitting.service import Service
from tests.app.fitting.test_faults import small_disk
from tests.app.fitting.test_isolation import Load
from tests.app.fitting.validation_data import validation_npz
from tests.app.waiting import until

__all__ = ["small_disk"]

DATA = validation_npz(100)
DISK_BYTES = 64 * 2**20
WRITES = ("/calibrators/0/activate", "/calibrators/rollback")
OBEY_PERMISSIONS = """
import ctypes, struct
data = (ctypes.c_uint32 * 6)()
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
libc = ctypes.CDLL(None, use_errno=True)
assert libc.capget(header, data) == 0
for word in (0, 1, 2):
    data[word] &= ~0b110  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, which let root write anywhere
assert libc.capset(header, data) == 0
"""
LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")


@contextmanager
def load(service: Service) -> Iterator[Load]:
    """Predict without a pause; at the end, no prediction has failed."""
    with Load(service.url) as predictions:
        until(lambda: predictions.answers >= 20, 120)
        yield predictions
        answered = predictions.answers
        until(lambda: predictions.answers >= answered + 20, 120)
    assert predictions.failures == []


def fit(service: Service) -> dict[str, Any]:
    done: dict[str, Any] = service.fit(DATA, method="ts", activate="always").json()
    assert (done["state"], done["activated"]) == ("succeeded", True), done
    return done


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].removeprefix("urn:boxcal:problem:")


@pytest.mark.long
def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    with Service(tmp_path / "data", prelude=OBEY_PERMISSIONS) as service:
        fit(service)
        folders = [path for path in (service.data_dir, *service.data_dir.rglob("*")) if path.is_dir()]
        with load(service):
            for folder in folders:
                folder.chmod(0o500)
            try:
                assert problem(service.fit(DATA, method="ts")) == (503, "storage-unavailable")
            finally:
                for folder in folders:
                    folder.chmod(0o700)
            fit(service)


@pytest.fixture
def whole_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system in a file."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    if shutil.which("mkfs.ext4") is None or ended("mkfs.ext4", "-q", image) or mount(image, disk):
        pytest.skip("mounting a file system takes root and a loop device")
    yield disk
    ended("umount", "--lazy", disk)


def ended(*command: str | Path) -> int:
    return subprocess.run(command, check=False, capture_output=True).returncode


def mount(image: Path, disk: Path) -> int:
    return ended("mount", "-o", "loop,errors=remount-ro", image, disk)


@pytest.mark.long
def test_a_disk_that_becomes_read_only(whole_disk: Path) -> None:
    """As Linux makes it after an error of the device; repaired, it has what was acknowledged."""
    with Service(whole_disk / "data") as service:
        fit(service)
        with load(service):
            assert ended("mount", "-o", "remount,abort", whole_disk) == 0
            with pytest.raises(OSError, match="Read-only"):
                (whole_disk / "any").touch()
            for path in WRITES:
                assert problem(service.client.post(path)) == (503, "registry-unavailable")
            assert problem(service.fit(DATA, method="ts")) == (503, "storage-unavailable")
            assert service.client.get("/health/ready").json()["calibrator"] == 1
    assert ended("umount", whole_disk) == 0
    assert ended("e2fsck", "-f", "-y", whole_disk.with_name("image")) in (0, 1)
    assert mount(whole_disk.with_name("image"), whole_disk) == 0
    with Service(whole_disk / "data") as service:
        assert service.client.get("/health/ready").json()["calibrator"] == 1
        assert service.client.post(WRITES[0]).is_success


@pytest.mark.long
def test_no_descriptors_left(tmp_path: Path) -> None:
    with Service(tmp_path / "data") as service:
        fit(service)
        with load(service):
            assert service.client.get("/health/live").is_success  # opens a connection, which stays
            pid = service.process.pid
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (service.process.num_fds(), limits[1]))
            try:
                assert problem(service.fit(DATA, method="ts")) == (503, "storage-unavailable")
                with pytest.raises(httpx.TransportError):
                    httpx.get(f"{service.url}/health/live", timeout=2)
            finally:
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
            assert httpx.get(f"{service.url}/health/live", timeout=60).is_success
            fit(service)
        assert "Too many open files" in service.log()


@pytest.mark.long
def test_a_clock_that_is_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not LIBRARY.exists():
        pytest.skip("libfaketime is not installed")
    clock = tmp_path / "clock"
    clock.write_text("+0s\n")
    monkeypatch.setenv("LD_PRELOAD", str(LIBRARY))
    monkeypatch.setenv("FAKETIME_TIMESTAMP_FILE", str(clock))
    monkeypatch.setenv("FAKETIME_NO_CACHE", "1")
    monkeypatch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
    with Service(tmp_path / "data") as service:
        before = fit(service)
        with load(service):
            clock.write_text("-1h\n")
            assert fit(service)["created_at"] < before["created_at"]
            assert service.client.post("/calibrators/rollback").json()["version"] == 1
            assert service.client.get("/health/ready").json()["calibrator"] == 1
