"""`kill -9` at any moment of a fit or of an activation costs that fit and nothing else.

A round sets the service to work, kills it at a moment that is drawn from a seed, starts it again and looks
at everything it may have left behind. Together the rounds cover the upload, the start of the worker, every
stage of the fit, the commit and the swap.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from boxcal.calibrators import Calibrator
from tests.app.fitting.service import Service
from tests.app.fitting.validation_data import overconfident, validation_npz

UPLOAD = validation_npz(400)
METHODS = ("ts", "pb")
BEFORE_THE_FIT = 0.2  # the share of the moments that lie in the upload and in the start of the worker
UPLOAD_SECONDS = 0.5
ACTIVATIONS_SECONDS = 0.6
LOGITS, _ = overconfident(5, seed=9)


class Client:
    """Asks for one thing after the other until the service dies, and notes what was asked and answered."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.acknowledged: list[dict[str, Any]] = []
        self.asked: list[str] = []

    def post(self, path: str, **arguments: Any) -> dict[str, Any] | None:
        self.asked.append(path)
        try:
            with httpx.Client(base_url=self._service.url, timeout=280) as client:
                response = client.post(path, **arguments)
        except httpx.TransportError:
            return None
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json()
        self.acknowledged.append(answer)
        return answer

    def may_be_active_version(self, before: int, newest: int) -> set[int]:
        """The last version that was answered, or what the request in the air was about to activate."""
        versions: list[int] = [a["version" if "version" in a else "calibrator"] for a in self.acknowledged]
        if self.asked[-1].startswith("/fit"):
            return {versions[-1], versions[-1] + 1} if versions else {before, newest + 1}
        known = [before, *versions]
        if self.asked[-1].endswith("/activate"):
            return {known[-1], int(self.asked[-1].split("/")[2])}
        return {known[-1], known[-2]}

    def fit(self) -> None:
        """Upload a validation set and wait for its activation, again and again."""
        turn = 0
        while True:
            fields = {"method": METHODS[turn % 2], "activate": "always"}
            turn += 1
            if self.post("/fit?wait=240", files={"file": ("v.npz", UPLOAD)}, data=fields) is None:
                return

    def activate(self) -> None:
        """Activate one calibrator after the other, and roll back now and then."""
        turn = 0
        while True:
            turn += 1
            path = "/calibrators/rollback" if turn % 3 == 0 else f"/calibrators/{1 + turn % 2}/activate"
            if self.post(path) is None:
                return


@contextlib.contextmanager
def database(service: Service) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(service.data_dir / "boxcal.sqlite3")
    try:
        yield connection
    finally:
        connection.close()


def committed(service: Service) -> int:
    """The version of the last committed activation."""
    with database(service) as connection:
        row = connection.execute("SELECT version FROM activations ORDER BY id DESC LIMIT 1").fetchone()
    return 0 if row is None else int(row[0])


def wait_for_the_end_of(processes: list[psutil.Process]) -> None:
    _, found = psutil.wait_procs(processes, timeout=60)
    # Its parent is gone; where nothing collects orphans, a worker that has ended stays a zombie.
    alive = [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert alive == [], "a worker outlived its service"


def check_answers(service: Service, version: int) -> None:
    """What is answered is what the active calibrator gives."""
    body = {"logits": LOGITS.tolist(), "options": {"probabilities": True}}
    answer = service.client.post("/calibrate", json=body).json()
    assert answer["calibrator"]["version"] == version
    if version:
        calibrator = Calibrator.from_bytes(service.client.get(f"/calibrators/{version}/artifact").content)
    else:
        calibrator = Calibrator.uncalibrated(10)
    np.testing.assert_allclose(
        [row["probabilities"] for row in answer["predictions"]],
        calibrator(torch.from_numpy(LOGITS)).numpy(),
        atol=1e-12,
    )


def check_remains(service: Service) -> None:
    """The database is whole, no fit is unfinished, and no file of the dead process is left."""
    with database(service) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
        states = [row[0] for row in connection.execute("SELECT state FROM fits")]
        assert set(states) <= {"succeeded", "interrupted"}
        made = connection.execute("SELECT count(*) FROM calibrators WHERE version > 0").fetchone()[0]
        assert states.count("succeeded") == made
    (own,) = [path for path in (service.data_dir / "work").iterdir() if path.is_dir()]
    assert {path.name for path in own.iterdir()} == {".alive", "head.npy"}
    assert {path.name for path in service.data_dir.iterdir()} <= {
        "boxcal.sqlite3", "boxcal.sqlite3-wal", "boxcal.sqlite3-shm", "service.log", "work",
    }  # fmt: skip


def wait_until(service: Service, moment: float) -> str:
    """Let a fit come as far as the moment, 0 to 1, says; gives the stage it is in then."""
    if moment < BEFORE_THE_FIT:
        time.sleep(moment / BEFORE_THE_FIT * UPLOAD_SECONDS)
        return "before"
    while (newest := service.client.get("/fits").json()["fits"][0])["state"] not in ("queued", "running"):
        time.sleep(0.01)
    with service.client.stream("GET", f"/fits/{newest['id']}/events") as stream:
        for line in stream.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {"progress": 0}
            if event["progress"] >= (moment - BEFORE_THE_FIT) / (1 - BEFORE_THE_FIT):
                return str(event["stage"])
    raise AssertionError("the stream ended before the fit did")


def crash(service: Service, kind: str, moment: float) -> str:
    """One round; says in what stage the kill found the fit."""
    before = committed(service)
    newest = service.client.get("/calibrators").json()["calibrators"][0]["version"]
    client = Client(service)
    work = threading.Thread(target=client.fit if kind == "fit" else client.activate)
    work.start()
    if kind == "fit":
        stage = wait_until(service, moment)
    else:
        stage = kind
        time.sleep(moment * ACTIVATIONS_SECONDS)
    descendants = service.process.children(recursive=True)
    service.kill()
    work.join(timeout=280)
    assert not work.is_alive()
    wait_for_the_end_of(descendants)
    last = committed(service)
    assert last in client.may_be_active_version(before, newest)

    service.start()
    assert service.client.get("/health/ready").json()["calibrator"] == last
    check_answers(service, last)
    check_remains(service)
    return stage


def spread(rng: np.random.Generator, count: int) -> list[float]:
    """Draw moments, 0 to 1, one in each of as many equal parts."""
    return [float(moment) for moment in (np.arange(count) + rng.random(count)) / count]


def rounds(tmp_path: Path, count: int, seed: int) -> list[str]:
    """Kill as often as asked, spread over the moments of a fit and of activations."""
    rng = np.random.default_rng(seed)
    kinds = ["activation" if turn % 4 == 3 else "fit" for turn in range(count)]
    moments = {kind: iter(spread(rng, kinds.count(kind))) for kind in set(kinds)}
    found = []
    with Service(tmp_path / "data") as service:
        for _ in range(2):
            answer = Client(service).post(
                "/fit?wait=240",
                files={"file": ("v.npz", UPLOAD)},
                data={"method": "ts", "activate": "always"},
            )
            assert answer is not None
            assert answer["state"] == "succeeded"
        for kind in kinds:
            found.append(crash(service, kind, next(moments[kind])))
        check_answers(service, committed(service))
        done = service.client.post(
            "/fit?wait=240", files={"file": ("v.npz", UPLOAD)}, data={"method": "ts", "activate": "always"}
        ).json()
        assert (done["state"], done["activated"]) == ("succeeded", True)
    return found


def test_four_kills(tmp_path: Path) -> None:
    assert len(rounds(tmp_path, 4, seed=4)) == 4


@pytest.mark.long
def test_twenty_kills(tmp_path: Path) -> None:
    found = rounds(tmp_path, 20, seed=20)
    print(*found, sep="\n")  # noqa: T201 - shown by -s, and where the test fails
    assert {"before", "activation"} < set(found)
    for step in ("fitting", "fold", ("judging", "comparing", "preparing", "drawing", "done")):
        assert any(stage.startswith(step) for stage in found)
