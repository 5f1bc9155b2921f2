"""`kill -9` at random moments of what a service does costs what was under way, and nothing else.

A round sets the service to work, kills it at a moment that is drawn from a seed, starts it again and looks at
everything that it may have left behind.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch

from boxcal.calibrators import Calibrator
from tests.app.fitting.validation_data import CONTENT_TYPE, form, overconfident, validation_npz
from tools.hostile.cases import request
from tools.hostile.kept_keys import Keys, database
from tools.hostile.preloaded import Preloaded, PreloadedService
from tools.hostile.seeds import Seed

UPLOAD = validation_npz(400)
METHODS = ("ts", "pb")
CHECK_SECONDS, PRUNE_SECONDS, KEYS_SECONDS = 0.6, 0.3, 0.4
CALL_SECONDS = 0.02
"""Of an activation or a rollback."""
LOGITS, _ = overconfident(5, seed=9)
KEPT_BYTES_PER_FIT = 4096
SLACK_BYTES = 3 * 2**20
"""For the reports of the versions that a prune keeps: the newest, the active one and the one before it."""


class Client:
    """Sends one request after the other until the service dies, and notes what was asked and answered."""

    def __init__(self, service: PreloadedService, newest: int) -> None:
        self._service = service
        self._versions = (0, newest)
        self.acknowledged: list[dict[str, Any]] = []
        self.asked: list[str] = []

    def post(self, path: str, **arguments: Any) -> dict[str, Any] | None:
        self.asked.append(path)
        try:
            headers = self._service.client.headers
            with httpx.Client(base_url=self._service.url, headers=headers, timeout=280) as client:
                response = client.post(path, **arguments)
        except httpx.TransportError:
            return None
        assert response.is_success, response.text
        answer: dict[str, Any] = response.json()
        self.acknowledged.append(answer)
        return answer

    def may_be_active_version(self, before: int, newest: int) -> set[int]:
        """The last version that was answered, or what the request under way was about to activate."""
        versions: list[int] = [
            a["version" if "version" in a else "calibrator"]
            for a in self.acknowledged
            if "activate" not in a or a["activate"] == "always"
        ]
        known = [before, *versions]
        if not self.asked or self.asked[-1] == "/fit":
            return {known[-1]}
        if self.asked[-1].startswith("/fit"):
            return {versions[-1], versions[-1] + 1} if versions else {before, newest + 1}
        if self.asked[-1].endswith("/activate"):
            return {known[-1], int(self.asked[-1].split("/")[2])}
        return {known[-1], known[-2] if len(known) > 1 else before}

    def fit(self) -> None:
        """Upload a validation set and wait for its activation, again and again."""
        turn = 0
        while True:
            fields = {"method": METHODS[turn % 2], "activate": "always"}
            turn += 1
            if self.post("/fit?wait=240", files={"file": ("v.npz", UPLOAD)}, data=fields) is None:
                return

    def submit(self) -> None:
        """Upload a validation set whose fit is not waited for."""
        self.post("/fit", files={"file": ("v.npz", UPLOAD)}, data={"method": "ts", "activate": "never"})

    def activate(self) -> None:
        """Activate one calibrator after the other, and roll back now and then."""
        turn = 0
        while True:
            turn += 1
            version = self._versions[turn % 2]
            path = "/calibrators/rollback" if turn % 3 == 0 else f"/calibrators/{version}/activate"
            if self.post(path) is None:
                return


def committed(service: PreloadedService) -> int:
    """The version of the last committed activation."""
    with database(service) as connection:
        row = connection.execute("SELECT version FROM activations ORDER BY id DESC LIMIT 1").fetchone()
    return 0 if row is None else int(row[0])


def newest_version(service: PreloadedService) -> int:
    """The version of the last recorded calibrator."""
    return int(service.client.get("/calibrators").json()["calibrators"][0]["version"])


def wait_for_the_end_of(processes: list[psutil.Process]) -> None:
    _, found = psutil.wait_procs(processes, timeout=120)
    # Its parent is gone; where nothing collects orphans, a worker that has ended stays a zombie.
    alive = [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    assert alive == [], "a worker outlived its service"


def check_answers(service: PreloadedService, version: int) -> None:
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


def check_remains(service: PreloadedService) -> None:
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


def disturb_upload(service: PreloadedService, _: Client, moment: float) -> str:
    """Send a part of an upload; the connection stays open."""
    body = form(UPLOAD, method="ts", activate="never")
    address = httpx.URL(service.url)
    line = socket.create_connection((address.host, address.port or 0), timeout=60)
    key = f"Authorization: {service.client.headers['Authorization']}"
    whole = request(Seed("POST", "/fit", CONTENT_TYPE, body), [key])
    line.sendall(whole[: int(moment * len(whole))])
    folder = next(path for path in (service.data_dir / "work").iterdir() if path.is_dir())
    while moment > 0.5 and not any(path.is_dir() for path in folder.iterdir()):
        time.sleep(0.001)
    line.close()
    return "upload"


def disturb_check(_: PreloadedService, client: Client, moment: float) -> str:
    """Let an upload be checked, and its fit begin."""
    while not client.asked:
        time.sleep(0.001)
    time.sleep(moment * CHECK_SECONDS)
    return "check"


def disturb_fit(service: PreloadedService, _: Client, moment: float) -> str:
    """Let a fit come as far as the moment says; gives the stage it is in then."""
    while not (fits := service.client.get("/fits", params={"limit": 1}).json()["fits"]) or (
        fits[0]["state"] not in ("queued", "running")
    ):
        time.sleep(0.01)
    with service.client.stream("GET", f"/fits/{fits[0]['id']}/events") as stream:
        for line in stream.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: ") else {"progress": -1.0}
            if event["progress"] >= moment:
                return str(event["stage"])
    raise AssertionError("the stream ended before the fit did")


def disturb_activation(_: PreloadedService, client: Client, moment: float) -> str:
    return _disturb_call(client, "/activate", moment)


def disturb_rollback(_: PreloadedService, client: Client, moment: float) -> str:
    return _disturb_call(client, "/rollback", moment)


def _disturb_call(client: Client, end: str, moment: float) -> str:
    """Wait for a few calls, and for a moment within the next that ends so."""
    deadline = time.monotonic() + 280
    while len(client.asked) < 5 or not client.asked[-1].endswith(end):
        assert time.monotonic() < deadline, "the client has stopped"
        time.sleep(0.0005)
    time.sleep(moment * CALL_SECONDS)
    return end[1:]


def disturb_prune(service: PreloadedService, _: Client, moment: float) -> str:
    """Kill `boxcal prune` on its own at a moment of its work."""
    pruning = service.spawn("prune", "--keep-versions", "1", "--keep-days", "0")
    time.sleep(moment * PRUNE_SECONDS)
    pruning.send_signal(signal.SIGKILL)
    pruning.wait()
    return "prune"


def disturb_key_creation(service: PreloadedService, _: Client, moment: float) -> str:
    """Kill `boxcal keys create` on its own at a moment of its work."""
    created = Keys(service).create("predict", moment * KEYS_SECONDS)
    return "key creation, acknowledged" if created else "key creation"


def disturb_revocation(service: PreloadedService, _: Client, moment: float) -> str:
    """Kill `boxcal keys revoke` on its own at a moment of its work."""
    revoked = Keys(service).revoke(moment * KEYS_SECONDS)
    return "revocation, acknowledged" if revoked else "revocation"


Disturb = Callable[[PreloadedService, Client, float], str]
KINDS: dict[str, tuple[Disturb, Callable[[Client], None] | None]] = {
    "activation": (disturb_activation, Client.activate),
    "upload": (disturb_upload, None),
    "rollback": (disturb_rollback, Client.activate),
    "check": (disturb_check, Client.submit),
    "prune": (disturb_prune, None),
    "key creation": (disturb_key_creation, None),
    "revocation": (disturb_revocation, None),
    "fit": (disturb_fit, Client.fit),
}
"""What is under way at the kill: how the moment is found, and what a client does until then."""


def crash(service: PreloadedService, kind: str, moment: float) -> str:
    """One round; says in what stage the kill found the service."""
    disturb, work = KINDS[kind]
    before, newest = committed(service), newest_version(service)
    client = Client(service, newest)
    thread = threading.Thread(target=work, args=(client,)) if work else None
    if thread is not None:
        thread.start()
    stage = disturb(service, client, moment)
    descendants = service.process.children(recursive=True)
    service.kill()
    if thread is not None:
        thread.join(timeout=280)
        assert not thread.is_alive()
    wait_for_the_end_of(descendants)
    last = committed(service)
    assert last in client.may_be_active_version(before, newest)

    service.start()
    assert service.client.get("/health/ready").json()["calibrator"] == last
    check_answers(service, last)
    check_remains(service)
    Keys(service).check()
    for answer in client.acknowledged:
        if "state" in answer:
            assert service.client.get(f"/fits/{answer['id']}").is_success
    return stage


def rounds(folder: Path, count: int, seed: int, report: Callable[[str], None] = lambda _: None) -> list[str]:
    """Kill as often as asked, spread over the kinds and over the moments of each; gives the stages found."""
    rng = np.random.default_rng(seed)
    quick = [kind for kind in KINDS if kind != "fit"]
    order = (
        ["fit", *quick, *quick] if count > len(KINDS) else list(KINDS)
    )  # a fit takes longer than the others
    kinds = [order[turn % len(order)] for turn in range(count)]
    moments = {kind: iter(spread(rng, kinds.count(kind))) for kind in set(kinds)}
    found = []
    with Preloaded() as preloaded, PreloadedService(preloaded, folder) as service:
        service.client.headers["Authorization"] = f"Bearer {Keys(service).create('admin')}"
        fit_and_activate(service)
        before = compacted(service)
        for turn, kind in enumerate(kinds):
            moment = next(moments[kind])
            stage = crash(service, kind, moment)
            found.append(stage)
            report(f"{turn + 1} of {count}: {kind} at {moment:.2f}, {stage}")
        fit_and_activate(service)
        fits = len(service.client.get("/fits", params={"limit": 1000}).json()["fits"])
        growth = compacted(service) - before
        report(f"the registry has grown by {growth:,} bytes with {fits} fits")
        assert growth < SLACK_BYTES + KEPT_BYTES_PER_FIT * fits
    return found


def spread(rng: np.random.Generator, count: int) -> list[float]:
    """Draw moments, 0 to 1, one in each of as many equal parts, in a random order."""
    moments = (np.arange(count) + rng.random(count)) / count
    return [float(moment) for moment in rng.permutation(moments)]


def fit_and_activate(service: PreloadedService) -> None:
    """A fit succeeds and is activated."""
    done = service.client.post(
        "/fit?wait=240", files={"file": ("v.npz", UPLOAD)}, data={"method": "ts", "activate": "always"}
    ).json()
    assert (done["state"], done["activated"]) == ("succeeded", True), done
    check_answers(service, committed(service))


def compacted(service: PreloadedService) -> int:
    """Prune, and return the bytes of the data folder without the log."""
    service.spawn("prune", "--keep-versions", "1", "--keep-days", "0").wait()
    files = [path for path in service.data_dir.rglob("*") if path.is_file() and path.name != "service.log"]
    return sum(path.stat().st_size for path in files if not path.name.endswith(("-wal", "-shm")))
