"""Uploads are parsed and fitted in worker processes, and a worker that dies costs its own upload alone."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.messages import TASK, FitTask, TableTask
from boxcal.app.fitting.server.runner import Job
from boxcal.app.fitting.server.worker_process import MODULE, Worker
from boxcal.app.fitting.worker import fit as worker_fit
from boxcal.app.fitting.worker import main
from boxcal.app.registry.records import FitRecord
from boxcal.models.digits_data import load_digits_split
from tests.app.fitting.files import parquet
from tests.app.fitting.service import Service
from tests.app.fitting.test_images import archive
from tests.app.fitting.validation_data import validation_npz
from tests.app.running import PNG, running
from tests.app.running import Service as RunningService

PAUSE = 0.01
"""Seconds between two predictions, so that the service has time for the fit that is watched."""
RECORDED = """
import atexit, json, os, sys, zipfile
opened, original = [], zipfile.ZipFile.__init__
def recorded(self, file, *arguments, **options):
    opened.append(str(file))
    original(self, file, *arguments, **options)
def report():
    ours = [name for name in sys.modules if name.startswith("boxcal")]
    users = [name for name in ours if getattr(sys.modules[name], "zipfile", None) is zipfile]
    others = [path for path in opened if path not in sys.path]
    with open(os.environ["REPORT"], "w") as file:
        json.dump({"modules": sorted(sys.modules), "opened": others, "users": users}, file)
zipfile.ZipFile.__init__ = recorded
atexit.register(report)
"""


def test_the_server_never_imports_the_readers_of_uploads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch imports `zipfile`; importlib.metadata opens zip files of `sys.path`. Our modules do neither."""
    report = tmp_path / "modules.json"
    monkeypatch.setenv("REPORT", str(report))
    with Service(tmp_path / "data", prelude=RECORDED) as service:
        for data in (validation_npz(50), parquet(), archive()):
            done = service.fit(data, method="ts", activate="never").json()
            assert done["state"] == "succeeded", done
        assert service.stop() == 0
    seen = json.loads(report.read_text())
    assert "boxcal.app.fitting.server.worker_process" in seen["modules"]
    assert [name for name in seen["modules"] if name.startswith("boxcal.app.fitting.worker")] == []
    assert [name for name in seen["modules"] if name.startswith("pyarrow")] == []
    assert (seen["users"], seen["opened"]) == ([], [])
    # Their import takes longer than the rest of the start; nothing that `digits` needs is in them.
    assert not {"torchvision", "torch._dynamo"} & set(seen["modules"])


class Load:
    """Asks again and again, by default for the prediction of an image, and keeps the answers."""

    def __init__(self, url: str, path: str = "/predict", pause: float = PAUSE, **request: Any) -> None:
        self._client = httpx.Client(base_url=url, timeout=60)
        self._request = request or {"content": load_digits_split().test.png(0), "headers": PNG}
        self._path, self._pause = path, pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.documents: list[dict[str, Any]] = []
        self.failures: list[str] = []

    @property
    def answers(self) -> int:
        return len(self.documents) + len(self.failures)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _run(self) -> None:
        while not self._stop.wait(self._pause):
            answer = self._client.post(self._path, **self._request)
            if answer.is_success:
                self.documents.append(answer.json())
            else:
                self.failures.append(answer.text)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with running(tmp_path_factory.mktemp("isolation")) as service:
        yield service


def fit(service: RunningService, data: bytes, wait: int = 300, method: str = "ts") -> httpx.Response:
    fields = {"method": method, "activate": "never"}
    url = f"{service.url}/fit?wait={wait}"
    return httpx.post(url, files={"file": ("v", data)}, data=fields, timeout=310)


def pid_of(worker: Worker) -> int:
    assert worker._process is not None
    return worker._process.pid


def out_of_memory(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_AS, (1, 1))


def ends_with_its_task(worker: Worker, end: Callable[[int], None]) -> Callable[[], Any]:
    """Replace `worker._started`: the process is stopped until it has its next task, and then ended."""
    started = worker._started

    async def started_and_stopped() -> Any:
        streams = await started()
        pid = pid_of(worker)
        os.kill(pid, signal.SIGSTOP)

        def end_it() -> None:
            end(pid)
            os.kill(pid, signal.SIGCONT)

        asyncio.get_running_loop().call_soon(end_it)
        return streams

    return started_and_stopped


CAUSES: dict[str, tuple[Callable[[int], None], str]] = {
    "kill": (lambda pid: os.kill(pid, signal.SIGKILL), "ended by SIGKILL; the machine may have run out of"),
    "bus": (lambda pid: os.kill(pid, signal.SIGBUS), "ended by SIGBUS"),
    "memory": (out_of_memory, ""),
}


STAGES = ("check", "fitting", "drawing")
QUICK = set(zip(CAUSES, STAGES, strict=True))


def test_a_worker_ends_with_a_service_that_has_left_its_message_unread(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", MODULE, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        with ours:
            task = TableTask(tmp_path / "missing", max_rows=1, max_bytes=1, max_row_bytes=1)
            ours.sendall(TASK.dump_json(task) + b"\n")
            assert ours.recv(1, socket.MSG_PEEK) == b"{"
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("cause", "stage"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.long])
        for pair in itertools.product(CAUSES, STAGES)
    ],
)
def test_a_worker_that_dies_costs_its_own_upload_alone(
    served: RunningService, cause: str, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies during the check, the fit or the drawing, while predictions go on; then a fit succeeds."""
    end, reason = CAUSES[cause]
    jobs, update = served.state.default.fit_jobs, Job.update
    good = validation_npz(50)
    # The worker that is left does the others, however long they take.
    monkeypatch.setattr("boxcal.app.fitting.server.worker_process.IDLE_SECONDS", 3600.0)

    def update_and_end(job: Job, record: FitRecord) -> None:
        if record.stage.startswith(stage) and not job.record.stage.startswith(stage):
            end(pid_of(jobs.workers.fits))
        update(job, record)

    with Load(served.url) as load:
        with monkeypatch.context() as patched:
            if stage == "check":
                patched.setattr(jobs.checks.worker, "_started", ends_with_its_task(jobs.checks.worker, end))
            else:
                patched.setattr(Job, "update", update_and_end)
            ended = fit(served, good)
        if stage == "check":
            assert ended.status_code == 422
            assert (reason or "could not be read within the memory limit of") in ended.json()["detail"]
        else:
            assert ended.json()["state"] == "failed", ended.text
            assert reason in ended.json()["error"]
        assert fit(served, good).json()["state"] == "succeeded"
    assert (load.failures, load.answers > 0) == ([], True)


def test_predictions_go_on_while_a_large_upload_is_read_and_fitted(served: RunningService) -> None:
    """What holds the event loop for 100 ms fails this test, as any other."""
    with Load(served.url) as load:
        started = fit(served, validation_npz(50_000), wait=3, method="ts+pb")
        cancelled = httpx.delete(served.url + started.headers["location"], timeout=60)
    assert cancelled.json()["state"] == "cancelled"
    assert (load.failures, load.answers > 10) == ([], True)


@pytest.mark.usefixtures("whole_sandbox")
def test_a_worker_has_no_secret_no_network_and_no_way_to_more_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "s3cr3t"  # noqa: S105 - one to look for
    alarms = {"alarm_webhook": "http://127.0.0.1:9", "alarm_secret": secret}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    with Service(tmp_path, model="logits:3", **alarms) as service:
        file = validation_npz()
        service.client.post("/fit", files={"file": ("v.npz", file)}, data={"method": "ts"})
        (worker,) = (one for one in service.process.children() if MODULE in one.cmdline())
        folder = Path(f"/proc/{worker.pid}")
        assert secret in Path(f"/proc/{service.process.pid}/environ").read_text()
        assert secret not in (folder / "environ").read_text()
        assert "NoNewPrivs:\t1" in (folder / "status").read_text()
        for space in ("net", "user"):
            assert (folder / "ns" / space).readlink() != Path(f"/proc/self/ns/{space}").readlink()


def test_the_wait_for_the_compiler_is_a_stage_of_the_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    notices, sent = logging.getLogger("boxcal.compiling"), io.BytesIO()
    monkeypatch.setattr(notices, "handlers", [])
    monkeypatch.setattr(notices, "propagate", True)

    def perform(task: FitTask, progress: Callable[[float, str], None]) -> None:
        progress(0.3, "fitting ts")
        notices.warning("compiling")

    monkeypatch.setattr(worker_fit, "perform", perform)
    main._result(
        FitTask(tmp_path, BackboneSource("digits", None, None, "cpu", "fp32"), "ts"), main._Reporter(sent)
    )
    replies = [json.loads(line) for line in sent.getvalue().splitlines()]
    assert [(one["progress"], one["stage"]) for one in replies] == [
        (0.3, "fitting ts"),
        (0.3, "compiling loops for this processor, once"),
    ]
    assert not caplog.records
