"""The monitor against real services: alarms, acknowledgement, streams, restarts, replicas, the demo."""

import hashlib
import hmac
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from httpx_sse import connect_sse
from safetensors.numpy import load, save

from boxcal.app.client import BoxcalClient
from boxcal.app.demo import __main__ as demo
from boxcal.app.monitoring.monitor import POLL_SECONDS
from boxcal.models.digits_data import load_digits_split
from tests.app.answering import Quiet, answering
from tests.app.client.scripted import Reply, scripted
from tests.app.fitting.validation_data import validation_npz
from tests.app.monitoring.traffic import client_of, evidence, folded, label, play, predict, stream
from tests.app.running import running
from tests.app.waiting import until

SECRET = "a key of signatures"  # noqa: S105


class Received(Quiet):
    """Takes deliveries; answers the first with 500."""

    deliveries: list[tuple[dict[str, str], bytes]]
    enough: threading.Event

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["content-length"]))
        self.deliveries.append(({name.lower(): value for name, value in self.headers.items()}, body))
        self.send_response(500 if len(self.deliveries) == 1 else 204)
        self.send_header("content-length", "0")
        self.end_headers()
        if len(self.deliveries) >= 3:
            self.enough.set()


@pytest.fixture
def webhook() -> Iterator[tuple[str, type[Received]]]:
    handler = type("Handler", (Received,), {"deliveries": [], "enough": threading.Event()})
    with answering(handler) as url:
        yield f"{url}/alarm", handler


def test_from_calm_traffic_to_an_alarm_and_its_acknowledgement(
    data_dir: Path, webhook: tuple[str, type[Received]]
) -> None:
    url, received = webhook
    settings = {"alarm_webhook": url, "alarm_secret": SECRET, "auto_refit": "off"}
    with client_of(data_dir, **settings) as client:
        calm = folded(client, play(client, *stream(600)))
        assert calm["labels"] == 600
        assert not calm["alarms"]["strict"]["alarm"]
        assert calm["expected_accuracy"]["basis"] == "labels"
        with connect_sse(client, "GET", "/monitor/events") as events:
            seq = play(client, *stream(600, 3.0, seed=1))
            found = []
            for event in events.iter_sse():
                found.append(event.event)
                if {"alarm", "material_alarm"} <= set(found):
                    break
        document = folded(client, seq)
        assert document["diagnosis"]["kind"] == "overconfident"
        assert {alarm["alarm"] for alarm in document["alarms"].values()} == {True}
        metrics = client.get("/metrics").text
        assert 'boxcal_calibration_alarm{test="material"} 1.0' in metrics
        decisions = client.get("/refits").json()["decisions"]
        assert {"alarm", "material_alarm"} == {one["kind"] for one in decisions} - {"activated"}
        assert all(len(one["sentence"]) > 20 for one in decisions)
        after = client.post("/monitor/acknowledge", json={"note": "seen"}).raise_for_status().json()
        assert {alarm["alarm"] for alarm in after["alarms"].values()} == {False}
        assert "seen" in client.get("/refits?limit=1").json()["decisions"][0]["sentence"]
        assert received.enough.wait(30)
    kinds = []
    for headers, body in received.deliveries:
        signed = headers["boxcal-timestamp"].encode() + b"." + body
        expected = hmac.new(SECRET.encode(), signed, hashlib.sha256).hexdigest()
        assert headers["boxcal-signature"] == f"sha256={expected}"
        kinds.append(orjson.loads(body)["kind"])
    assert kinds[0] == kinds[1]  # it was retried
    assert set(kinds) <= {"alarm", "material_alarm"}


class Missing(Received):
    """Answers as a service of chats whose webhook was removed."""

    def do_POST(self) -> None:  # noqa: N802
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()


def test_the_secret_path_of_a_webhook_is_not_logged(
    data_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boxcal.app.monitoring.webhook.ATTEMPTS", 1)
    with answering(Missing) as url:
        secret = f"{url.replace('//', '//user:password@')}/services/T000/SECRET?token=abc"
        with client_of(data_dir, alarm_webhook=secret, alarm_secret=SECRET) as client:
            fields = {"method": "ts", "activate": "always"}
            fit = client.post("/fit?wait=60", files={"file": ("v", validation_npz(200))}, data=fields)
            assert fit.json()["state"] == "succeeded"
            until(lambda: "could not be sent" in caplog.text)
    (line,) = [one.getMessage() for one in caplog.records if "could not be sent" in one.getMessage()]
    assert line.endswith("could not be sent to 127.0.0.1: it answers 404")


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_state_that_cannot_be_read_is_begun_anew_with_the_next_label(
    data_dir: Path, caplog: pytest.LogCaptureFixture, is_damaged: bool
) -> None:
    """Each step failed for ever: of a release that has another state, after a return to this one."""
    with client_of(data_dir) as client:
        assert folded(client, play(client, *stream(300)))["labels"] == 300
    with closing(sqlite3.connect(data_dir / "boxcal.sqlite3")) as connection, connection:
        (state,) = connection.execute("SELECT state FROM monitors").fetchone()
        arrays = {name: np.append(array, 0) for name, array in load(state).items() if name != "facts"}
        state = b"nothing" if is_damaged else save({**load(state), **arrays})
        connection.execute("UPDATE monitors SET state = ?", [state])
    with client_of(data_dir) as client:
        again = folded(client, play(client, *stream(100, seed=1)))
        assert again["labels"] == 100
        assert client.post("/monitor/acknowledge", json={}).status_code == 200
    assert caplog.text.count("the monitor begins anew") == 1


def test_labels_sent_twice_and_conflicting_ones_change_no_test(data_dir: Path) -> None:
    with client_of(data_dir) as client:
        logits, labels = stream(400)
        ids = predict(client, logits)
        before = folded(client, label(client, ids, labels)["seq"])
        again = label(client, ids, labels)
        assert again["duplicates"] == 400
        other = label(client, ids[:50], [(one + 1) % 10 for one in labels[:50]])
        assert other["conflicts"] == 50
        bad = client.post("/feedback", json={"items": [{"id": "x"}, {"id": "f" * 32, "label": 1}]}).json()
        assert (bad["malformed"], bad["unknown"]) == (1, 1)
        more, their = stream(100, seed=1)
        after = folded(client, play(client, more, their))
        assert after["labels"] == before["labels"] + 100
    with client_of(data_dir / "plain") as client:
        label(client, predict(client, logits), labels)
        alone = folded(client, play(client, more, their))
    assert evidence(after) == evidence(alone)


HOLDER = """
import sys, psycopg
from boxcal.app.monitoring.monitor import MONITOR_LOCK
with psycopg.connect(sys.argv[1]) as connection:
    connection.execute("SELECT pg_advisory_xact_lock(%s, id) FROM backbones", [MONITOR_LOCK])
    print("locked", flush=True)
    input()
"""


def test_entries_are_folded_after_a_process_that_had_the_lock_was_killed(url: str, data_dir: Path) -> None:
    logits, labels = stream(2)
    with client_of(data_dir, database_url=url) as client:
        folded(client, play(client, logits[:1], labels[:1]))
        command = [sys.executable, "-c", HOLDER, url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "locked\n"
            seq = play(client, logits[1:], labels[1:])
            time.sleep(3 * POLL_SECONDS)  # until the monitor has found the lock taken
            assert client.get("/monitor").json()["seq"] < seq
            holder.kill()
        assert folded(client, seq, 60)["labels"] == 2


@pytest.mark.long
def test_two_replicas_on_postgresql_agree_with_one(url: str, data_dir: Path) -> None:
    """Half of the predictions go to each; labels go to the other one."""
    logits, labels = stream(600, 1.5)
    with client_of(data_dir / "one") as client:
        expected = evidence(folded(client, play(client, logits, labels, 50)))
    with (
        running(data_dir / "a", database_url=url) as one,
        running(data_dir / "b", database_url=url) as other,
        httpx.Client(base_url=one.url, timeout=60) as first,
        httpx.Client(base_url=other.url, timeout=60) as second,
    ):
        seq = 0
        for number, start in enumerate(range(0, 600, 50)):
            asked, told = (first, second) if number % 2 else (second, first)
            ids = predict(asked, logits[start : start + 50])
            answer = label(told, ids, labels[start : start + 50])
            assert answer["accepted"] == 50
            seq = answer["seq"]
        assert evidence(folded(first, seq)) == evidence(folded(second, seq)) == expected
        assert len(first.get("/refits").json()["decisions"]) == len(second.get("/refits").json()["decisions"])


def active(version: int, method: str) -> list[Reply]:
    at = {"reason": "rollback", "activated_at": "2026-11-21T02:51:59Z"}
    return [Reply(document={"version": version, "method": method, **at})]


def test_the_last_steps_say_what_each_of_them_activates(capsys: pytest.CaptureFixture[str]) -> None:
    """After two activations a rollback leads to the first; another step leads to what was before the demo."""
    replies = {
        "calibrators_rollback": active(1, "ts"),
        "calibrators_0_activate": active(0, "uncalibrated"),
    }
    with scripted(**replies) as script, BoxcalClient(script.url) as client:
        demo.restore(client, 0)
        assert capsys.readouterr().out.splitlines() == [
            "6. Roll back:",
            "   calibrator 1 (ts) is active",
            "7. Activate the calibrator from before the demo:",
            "   calibrator 0 (uncalibrated) is active",
        ]
        demo.restore(client, 1)
    assert capsys.readouterr().out == "6. Roll back:\n   calibrator 1 (ts) is active\n"


@pytest.mark.long
def test_the_act_of_the_demo(data_dir: Path) -> None:
    digits = load_digits_split()
    said: list[str] = []
    with running(data_dir) as service, BoxcalClient(service.url, timeout=120) as client:
        answer = client.predict_tensors(digits.validation.levels, logits=True, calibrator=0)
        logits = np.array([prediction.logits for prediction in answer.predictions])
        fit = client.fit_arrays(logits, digits.validation.labels, method="ts", activate="always", wait=120)
        assert fit.activated
        demo.run_shift(client, digits.test, said.append)
        kinds = [decision["kind"] for decision in client.refits()][::-1]
        assert client.activations()["activations"][0]["version"] > fit.version
    assert "no alarm" in said[0]
    assert "Activated calibrator" in said[-1]
    order = ["alarm", "refit", "candidate", "duel_won", "activated"]
    assert [kind for kind in kinds if kind in order][-5:] == order
