"""Uploads made to break the service are refused with 4xx and the reason, and cost neither memory nor disk."""

from __future__ import annotations

import random
import re
from pathlib import Path

import httpx
import psutil
import pytest

from tests.app.fitting.files import LABELS, LOGITS, parquet
from tests.app.fitting.service import Service
from tests.app.fitting.test_images import archive as archive_of_images
from tests.app.fitting.validation_data import CONTENT_TYPE, form, npz
from tools.hostile.mutations import damage
from tools.hostile.uploads import FORMS, HOSTILE

MEMORY_BYTES = 300 * 2**20


def peak_of_checks(service: Service) -> int:
    """The most memory that the worker of checks ever had, in bytes; that of fits has loaded numba."""
    peaks = []
    for process in service.process.children():
        if not any("llvmlite" in part.path for part in process.memory_maps()):
            status = Path(f"/proc/{process.pid}/status").read_text()
            peaks.append(1024 * int(status.split("VmHWM:")[1].split()[0]))
    return max(peaks)


def left_behind(service: Service) -> set[str]:
    (own,) = [path for path in (service.data_dir / "work").iterdir() if path.is_dir()]
    return {path.name for path in own.iterdir()} - {".alive", "head.npy"}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_by_what_is_wrong(service: Service, name: str) -> None:
    status, message, make = HOSTILE[name]
    answer = service.fit(make(), method="ts", activate="never")
    assert answer.status_code == status, answer.text
    assert httpx.codes.is_client_error(answer.status_code)
    assert re.search(message, answer.json()["detail"]), answer.text
    assert peak_of_checks(service) < MEMORY_BYTES
    assert left_behind(service) == set()


@pytest.mark.parametrize("name", FORMS)
def test_a_hostile_form_is_refused(service: Service, name: str) -> None:
    kind, body = FORMS[name]
    answer = service.client.post("/fit", content=body, headers={"content-type": kind})
    assert httpx.codes.is_client_error(answer.status_code), answer.text
    assert left_behind(service) == set()


def test_no_damaged_upload_is_an_error_of_the_service(service: Service) -> None:
    """Bytes are changed, removed and repeated anywhere, in the form too; nothing is activated."""
    rng = random.Random(2)
    for good in (npz(logits=LOGITS, labels=LABELS), parquet(), archive_of_images()):
        whole = form(good, method="uncalibrated", activate="never")
        for _ in range(25):
            body = damage(rng, whole)
            answer = service.client.post("/fit", content=body, headers={"content-type": CONTENT_TYPE})
            assert answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR, answer.text
            if answer.is_success:
                service.client.delete(answer.headers["location"])
    assert psutil.pid_exists(service.process.pid)
