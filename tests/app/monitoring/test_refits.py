"""From an alarm to a better calibrator against real services, with the worker that fits."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from sqlalchemy import Connection, insert

from boxcal.app.fitting.server.worker_process import WorkerFailed
from boxcal.app.monitoring import refits
from boxcal.app.monitoring.events import EventLog
from boxcal.app.monitoring.fold import MonitorFold
from boxcal.app.monitoring.monitor import Monitor
from boxcal.app.monitoring.refits import RefitRunner
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.records import FittedCalibrator
from boxcal.app.registry.store import Registry
from boxcal.app.registry.tables import monitors, utc_now
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.monitoring.decisions import Phase
from boxcal.calibrators.monitoring.refit_loop import PHASE
from tests.app.monitoring.test_feedback import TINY, direct, opened
from tests.app.monitoring.traffic import client_of, folded, play, stream
from tests.app.running import Service, running


def kinds(client: httpx.Client) -> list[str]:
    """The decisions so far, oldest first."""
    return [one["kind"] for one in client.get("/refits").json()["decisions"]][::-1]


def until(client: httpx.Client, kind: str, seed: int = 100, seconds: float = 280.0) -> list[str]:
    """Send shifted traffic until a decision of a kind has been made; a fit is awaited."""
    deadline = time.monotonic() + seconds
    while kind not in (found := kinds(client)):
        assert time.monotonic() < deadline, found
        if client.get("/monitor").json()["phase"] == "fitting":
            time.sleep(0.1)
            continue
        folded(client, play(client, *stream(500, 2.5, seed), 500))
        seed += 1
    return found


def test_a_refit_is_proposed_and_activated_by_a_person(data_dir: Path) -> None:
    (labels := data_dir / "labels.txt").parent.mkdir(exist_ok=True)
    labels.write_text("\n".join(f"class {k}" for k in range(10)))
    with client_of(data_dir, labels=labels) as client:
        found = until(client, "duel_won")
        assert [kind for kind in found if kind in ("refit", "candidate", "duel_won")] == [
            "refit", "candidate", "duel_won",
        ]  # fmt: skip
        state = client.get("/monitor").json()
        assert state["phase"] == "proposed"
        version = state["challenger"]
        record = client.get(f"/calibrators/{version}").json()
        assert not record["active"]
        artifact = client.get(f"/calibrators/{version}/artifact").content
        assert (ArrayCalibrator.from_bytes(artifact).classes or ())[9:] == ("class 9",)
        report = client.get(f"/calibrators/{version}/report").json()
        assert report["metrics"]["nll"]["after"]["value"] < report["metrics"]["nll"]["before"]["value"]
        assert sum(report["class_prior"]) == pytest.approx(1.0)
        for part in ("report.html", "reliability.svg"):
            assert client.get(f"/calibrators/{version}/{part}").is_success
        client.post(f"/calibrators/{version}/activate").raise_for_status()
        after = folded(client, play(client, *stream(200, 2.5, seed=9)))
        assert (after["calibrator"]["version"], after["phase"]) == (version, "watching")
        assert not after["alarms"]["strict"]["alarm"]


@pytest.mark.parametrize("is_decided", [False, True], ids=["duel", "proposal"])
def test_a_version_that_is_pruned_ends_its_duel_or_proposal(data_dir: Path, is_decided: bool) -> None:
    registry, log = opened(data_dir)
    activator = Activator(registry, 3, Mock())
    events = EventLog(registry.database, registry.backbone_id)
    monitor = Monitor(registry, activator, log, events, Mock(), classes="abc", refits=True)
    fitted = FittedCalibrator("ts", ArrayCalibrator.uncalibrated(3).to_bytes(), {}, {}, b"", b"", 7)
    challenger = registry.add(fitted)

    def begin(fold: MonitorFold, _: Connection) -> None:
        fold.loop.numbers[PHASE] = Phase.FITTING
        fold.loop.fitted(challenger, name="ts", nll=0.1, champion_nll=0.2)
        fold.loop.numbers[PHASE] = Phase.PROPOSED if is_decided else Phase.DUEL

    monitor.change(begin)
    assert registry.prune(0, 0.0) == [1]
    if is_decided:
        runner = RefitRunner(registry, activator, Mock(), log, monitor, owner="x", activate=True)
        asyncio.run(runner.step())
    log.write([], [[direct(0)]])
    monitor.step()
    assert monitor.document is not None
    assert (monitor.document["labels"], monitor.document["phase"]) == (1, "watching")
    assert [(event.kind, event.document["sentence"]) for event in events.newest(9)] == [
        (
            "forgotten",
            "Version 0 stays: version 1, which was compared with it, was pruned or is damaged.",
        )
    ]
    registry.close()


@pytest.mark.long
def test_a_refit_is_activated_by_itself_where_that_is_asked_for(data_dir: Path) -> None:
    with client_of(data_dir, auto_refit="activate") as client:
        until(client, "activated")
        activation = client.get("/activations").json()["activations"][0]
        assert activation["reason"] == "refit"


@pytest.mark.long
def test_a_refit_that_fails_is_recorded_and_a_proposal_can_be_declined(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(data_dir) as service, httpx.Client(base_url=service.url, timeout=60) as client:

        async def fail(*_: Any) -> None:
            raise WorkerFailed("Its process was ended by SIGKILL.")

        with monkeypatch.context() as patched:
            patched.setattr(service.state.default.fit_jobs, "refit", fail)
            found = until(client, "no_candidate")
        assert found.count("refit") == 1
        last = client.get("/refits").json()["decisions"]
        failed = next(one for one in last if one["kind"] == "no_candidate")
        assert "SIGKILL" in failed["evidence"]["reason"]
        until(client, "duel_won", seed=200)
        after = client.post("/monitor/acknowledge").raise_for_status().json()
        assert after["phase"] == "watching"
        assert "dismissed" in kinds(client)


def test_claims_go_by_the_clock_of_the_database(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is behind loses no claim, and one that is ahead holds none longer."""
    registries = [Registry(url, TINY, owner=owner) for owner in ("one", "other")]
    with registries[0].database.write() as connection:
        row = {
            "seq": 0,
            "revision": 1,
            "activation": 0,
            "state": b"",
            "document": {},
            "updated_at": utc_now(),
        }
        connection.execute(insert(monitors).values(backbone_id=registries[0].backbone_id, **row))
    runner, waiting = (
        RefitRunner(registry, Mock(), Mock(), Mock(), Mock(), owner=registry.fits.owner, activate=False)
        for registry in registries
    )
    real = time.time

    def at(shift: float, call: Callable[[], Any]) -> Any:
        with monkeypatch.context() as clock:
            clock.setattr("time.time", lambda: real() + shift)
            return call()

    assert at(-90, runner._claim)
    at(-90, runner._keep_claim)
    assert not waiting._claim()
    assert at(3600, runner._claim)
    monkeypatch.setattr(refits, "SILENT_SECONDS", 0.0)
    assert waiting._claim()

    events, others = (EventLog(registry.database, registry.backbone_id) for registry in registries)
    with registries[0].database.write() as connection:
        events.append(connection, "alarm", {"sentence": "so"})
    assert at(-180, lambda: events.claim(["alarm"]))
    assert others.claim(["alarm"]) is None
    for registry in registries:
        registry.close()


@pytest.mark.long
def test_after_a_restart_an_unfinished_refit_is_done_again(data_dir: Path) -> None:
    def never(service: Service) -> None:
        async def wait(*_: Any) -> None:
            import asyncio

            await asyncio.Event().wait()

        service.state.default.fit_jobs.refit = wait  # type: ignore[method-assign,assignment]

    with running(data_dir) as service, httpx.Client(base_url=service.url, timeout=60) as client:
        never(service)
        until(client, "refit")
        assert client.get("/monitor").json()["phase"] == "fitting"
        service.state.default.monitor.change(lambda _fold, connection: release(connection))
    with client_of(data_dir) as client:
        until(client, "candidate")


def release(connection: Any) -> None:
    from sqlalchemy import update

    connection.execute(update(monitors).values(refit_seen_at=0.0))
