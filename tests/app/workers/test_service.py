"""Several processes serve on one port: one registry, one queue of fits, one document of metrics."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import psutil
import pytest

from tests.app.fitting.service import Service
from tests.app.fitting.test_isolation import Load
from tests.app.fitting.validation_data import CONTENT_TYPE, form, validation_npz
from tests.app.waiting import until

wait = partial(until, seconds=120)

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("workers"), workers="2", device="cpu") as one:
        wait(lambda: len(ready(one)) == 2)
        yield one


def ready(service: Service) -> list[str]:
    return re.findall(r"Application startup complete", service.log())


def processes(service: Service) -> list[psutil.Process]:
    found = []
    for child in service.process.children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "boxcal.app.workers.process" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_hangup_replaces_the_processes_and_fails_no_request(service: Service) -> None:
    count = len(ready(service))
    before = {child.pid for child in processes(service)}
    with Load(service.url) as load:
        service.process.send_signal(signal.SIGHUP)
        wait(lambda: len(ready(service)) == count + 2)
        wait(lambda: len(processes(service)) == 2 and not before & {one.pid for one in processes(service)})
        answered = load.answers
        wait(lambda: load.answers > answered + 20)
    assert load.failures == []


def test_fits_of_every_process_are_one_queue_and_reach_all(service: Service) -> None:
    def post() -> str:
        # A new connection for each, so that different processes take them.
        headers = {"content-type": CONTENT_TYPE, "connection": "close"}
        body = form(validation_npz(200), method="ts", activate="always")
        sent = service.client.post("/fit", content=body, headers=headers)
        assert sent.status_code == 202, sent.text
        return str(sent.json()["id"])

    ids = [post() for _ in range(4)]
    wait(lambda: all(service.client.get(f"/fits/{one}").json()["state"] == "succeeded" for one in ids))
    newest = max(service.client.get(f"/fits/{one}").json()["calibrator"] for one in ids)

    def versions() -> set[int]:
        answers = [service.client.get("/health/ready", headers={"connection": "close"}) for _ in range(12)]
        return {answer.json()["calibrator"] for answer in answers}

    wait(lambda: versions() == {newest})
