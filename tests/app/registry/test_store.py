"""The registry keeps what it is given, answers what is active, and refuses what contradicts its record."""

import hashlib
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError

from boxcal.app.http.problems import (
    CalibratorNotFound,
    CalibratorPruned,
    DamagedArtifact,
    FitLost,
    FitNotFound,
    ForeignCalibrator,
    NoReport,
    NothingToRollBack,
    OtherVersionActive,
)
from boxcal.app.registry.records import (
    ActivatePolicy,
    BackboneIdentity,
    Decision,
    FitState,
    FittedCalibrator,
    Reason,
)
from boxcal.app.registry.store import Registry
from tests.app.fitting.validation_data import DIGITS
from tests.app.raising import raises_problem

OTHERS = [
    BackboneIdentity("vit", "ab" * 32, tuple("0123456789")),
    BackboneIdentity("digits", "cd" * 32, tuple("0123456789")),
    BackboneIdentity("digits", "ab" * 32, tuple("012345678")),
    BackboneIdentity("digits", "ab" * 32, tuple("9876543210")),
]


def fitted(method: str = "ts", artifact: bytes = b"bytes") -> FittedCalibrator:
    return FittedCalibrator(
        method, artifact, {"method": method}, {"samples": 7, "warnings": []}, b"<svg/>", b"png", 7
    )


def opened(path: Path, backbone: BackboneIdentity = DIGITS, owner: str = "me") -> Registry:
    return Registry(f"sqlite:///{path}", backbone, owner=owner)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "boxcal.db"


@pytest.fixture
def registry(path: Path) -> Iterator[Registry]:
    registry = opened(path)
    yield registry
    registry.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(path: Path, request: pytest.FixtureRequest) -> str:
    return f"sqlite:///{path}" if request.param == "sqlite" else request.getfixturevalue("url")


def add(registry: Registry, *, activate: bool = False, artifact: bytes = b"bytes") -> int:
    fit = registry.fits.add(secrets.token_hex(8), "ts", ActivatePolicy.ALWAYS, 7)
    version, _ = registry.record_fit(fit, fitted(artifact=artifact), lambda _: Decision(activate, "so"))
    return version


def test_a_new_registry_has_version_0_active(registry: Registry) -> None:
    (only,) = registry.list()
    assert (only.version, only.method, only.backbone, only.sha256) == (0, "uncalibrated", None, None)
    assert registry.activations.active().version == 0


def test_a_calibrator_comes_back_as_it_was_given(database_url: str) -> None:
    registry = Registry(database_url, DIGITS, owner="me")
    assert add(registry, artifact=b"\x00\xffbytes") == 1
    registry.close()
    again = Registry(database_url, DIGITS, owner="other")
    record = again.get(1)
    assert again.list() == [record, again.get(0)]
    assert (record.method, record.backbone, record.samples, record.size) == ("ts", DIGITS, 7, 7)
    assert record.sha256 == hashlib.sha256(b"\x00\xffbytes").hexdigest()
    assert record.created_at.tzinfo is not None
    assert again.artifact(1) == b"\x00\xffbytes"
    assert again.report(1) == {"samples": 7, "warnings": []}
    assert (again.reliability(1, "svg"), again.reliability(1, "png")) == (b"<svg/>", b"png")
    again.close()


def test_a_result_and_its_activation_are_one(registry: Registry) -> None:
    fit = registry.fits.add("fit", "auto", ActivatePolicy.IF_BETTER, 7)

    def fails(active_version: int) -> Decision:
        assert active_version == 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registry.record_fit(fit, fitted(), fails)
    assert [record.version for record in registry.list()] == [0]
    assert registry.fits.get("fit").state is FitState.QUEUED

    version, activation = registry.record_fit(fit, fitted(), lambda _: Decision(True, "better"))
    assert (version, activation) == (1, registry.activations.active())
    assert registry.activations.active().reason is Reason.FIT
    record = registry.fits.get("fit")
    assert (record.state, record.calibrator, record.activated, record.decision) == (
        FitState.SUCCEEDED, 1, True, "better",
    )  # fmt: skip


def test_rolling_back_walks_the_activations_backwards(registry: Registry) -> None:
    for _ in range(3):
        add(registry)
    with pytest.raises(NothingToRollBack, match="no activation came before"):
        registry.activations.rollback()
    for version in (1, 2, 2, 3):
        assert registry.activations.activate(version).version == version
    assert [registry.activations.rollback().version for _ in range(3)] == [2, 1, 0]
    with pytest.raises(NothingToRollBack, match="everything is rolled back"):
        registry.activations.rollback()
    assert registry.activations.activate(3).reason is Reason.REQUEST
    assert registry.activations.activate(0).method == "uncalibrated"
    assert registry.activations.rollback().version == 3
    assert (registry.activations.rollback_target(), registry.activations.rollback().version) == (0, 0)


def test_nothing_changes_where_another_version_is_active_than_expected(registry: Registry) -> None:
    log = registry.activations
    for version in (add(registry), add(registry)):
        log.activate(version, expected=version - 1)
    before = log.list(9)
    for call in (
        lambda: log.activate(1, expected=1),
        lambda: log.activate(2, expected=1),
        lambda: log.rollback_target(expected=0),
        lambda: log.rollback(expected=1),
    ):
        with raises_problem(OtherVersionActive, match=r"Version 2 is active, not version [01] as expected"):
            call()
    assert log.list(9) == before
    assert log.rollback(expected=2).version == 1
    assert log.rollback(expected=1).version == 0
    with raises_problem(OtherVersionActive, match="Version 0 is active, not version 1"):
        log.rollback(expected=1)


def test_activating_version_0_first_changes_nothing(registry: Registry) -> None:
    registry.activations.activate(0)
    with pytest.raises(NothingToRollBack):
        registry.activations.rollback()


def test_the_active_version_survives_the_process(registry: Registry, path: Path) -> None:
    add(registry, activate=True)
    add(registry, activate=False)
    other = opened(path)
    assert other.activations.active().version == 1
    other.close()


@pytest.mark.parametrize("other", OTHERS, ids=["name", "weights", "classes", "labels"])
def test_another_backbone_refuses_a_calibrator(
    registry: Registry, path: Path, other: BackboneIdentity
) -> None:
    add(registry, activate=True)
    foreign = opened(path, other)
    assert foreign.activations.active().version == 0
    assert [record.version for record in foreign.list()] == [1, 0]
    with raises_problem(
        ForeignCalibrator, match=r"Calibrator 1 belongs to the backbone 'digits' \(10 classes"
    ):
        foreign.activations.activate(1)
    assert foreign.activations.active().version == 0
    assert foreign.fits.list(10) == []
    assert registry.activations.active().version == 1
    foreign.close()


def test_what_is_not_there_is_named(registry: Registry) -> None:
    with raises_problem(CalibratorNotFound, match="no calibrator 5; the newest is 0"):
        registry.get(5)
    with raises_problem(CalibratorNotFound):
        registry.activations.activate(5)
    with raises_problem(NoReport, match="never fitted"):
        registry.report(0)
    with raises_problem(NoReport):
        registry.artifact(0)
    with raises_problem(FitNotFound, match="'nope'"):
        registry.fits.get("nope")


def test_other_bytes_than_were_recorded_are_refused(registry: Registry, path: Path) -> None:
    add(registry)
    with sqlite3.connect(path) as connection:
        connection.execute("DROP TRIGGER calibrators_no_update")
        connection.execute("UPDATE calibrators SET artifact = x'00'")
    connection.close()
    with raises_problem(DamagedArtifact, match="calibrator 1 does not have its SHA-256"):
        registry.artifact(1)


def test_threads_and_replicas_that_activate_at_once_leave_one_chain(database_url: str) -> None:
    replicas = [Registry(database_url, DIGITS, owner=f"r{number}") for number in range(3)]

    def work(registry: Registry, version: int) -> None:
        for _ in range(15):
            registry.activations.activate(version)

    pairs = [(replicas[number % 3], add(replicas[0])) for number in range(4)]
    threads = [threading.Thread(target=work, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    walked = [replicas[0].activations.active().version]
    while walked[-1] != 0:
        walked.append(replicas[len(walked) % 3].activations.rollback().version)
    assert all(one != other for one, other in pairwise(walked))
    for registry in replicas:
        registry.close()


@pytest.mark.parametrize(
    "change",
    [
        "DELETE FROM calibrators",
        "UPDATE calibrators SET method = 'x'",
        "DELETE FROM activations",
        "UPDATE activations SET reason = 'x'",
        "DELETE FROM audit",
        "UPDATE audit SET actor = 'x'",
        "TRUNCATE audit",
    ],
)
def test_the_database_itself_refuses_to_change_the_record(database_url: str, change: str) -> None:
    if change.startswith("TRUNCATE") and database_url.startswith("sqlite"):
        pytest.skip("SQLite has no TRUNCATE")
    registry = Registry(database_url, DIGITS, owner="me")
    registry.activations.activate(add(registry))
    with pytest.raises(DBAPIError, match="is append-only"), registry.database.write() as connection:
        connection.exec_driver_sql(change)
    registry.close()


def test_a_fit_that_is_over_stays_as_it_ended(registry: Registry) -> None:
    fit = registry.fits.start(registry.fits.add("fit", "ts", ActivatePolicy.NEVER, 7))
    registry.fits.end(fit, FitState.CANCELLED, "asked to")
    with pytest.raises(FitLost, match="attempt 1"):
        registry.fits.advance(fit, 0.9, "late news")
    with pytest.raises(FitLost):
        registry.fits.end(fit, FitState.FAILED, "later still")
    with pytest.raises(FitLost):
        registry.record_fit(fit, fitted(), lambda _: Decision(True, "so"))
    assert (len(registry.list()), registry.activations.active().version) == (1, 0)
    record = registry.fits.get("fit")
    assert (record.state, record.error, record.progress) == (FitState.CANCELLED, "asked to", 0.0)
    assert record.finished_at is not None


def test_a_fit_that_nobody_adopts_is_interrupted_in_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, living = opened(path, owner="stopped"), opened(path, owner="living")
    stopped.fits.add("silent", "ts", ActivatePolicy.NEVER, 7, shared=True)
    stopped.fits.release(stopped.fits.add("released", "ts", ActivatePolicy.NEVER, 7, shared=True))
    assert living.fits.interrupt_abandoned(set()) == 0
    monkeypatch.setattr("boxcal.app.registry.fits.GIVEN_UP_AFTER", timedelta(seconds=-60))
    assert living.fits.interrupt_abandoned(set()) == 2
    assert {fit.state for fit in living.fits.list(10)} == {FitState.INTERRUPTED}
    for registry in (stopped, living):
        registry.close()


def test_only_fits_of_dead_processes_are_interrupted(path: Path) -> None:
    dead, living = opened(path, owner="dead"), opened(path, owner="living")
    for registry in (dead, living):
        for state in ("queued", "running"):
            fit = registry.fits.add(f"{registry is dead}-{state}", "ts", ActivatePolicy.NEVER, 7)
        registry.fits.start(fit)
    new = opened(path, owner="new")
    assert new.fits.interrupt_abandoned({"living"}) == 2
    states = {record.id: (record.state, record.error) for record in new.fits.list(10)}
    assert states["False-queued"] == (FitState.QUEUED, None)
    assert states["False-running"] == (FitState.RUNNING, None)
    for fit_id in ("True-queued", "True-running"):
        assert states[fit_id][0] is FitState.INTERRUPTED
        assert "upload the validation set again" in (states[fit_id][1] or "")
    for registry in (dead, living, new):
        registry.close()


def test_only_the_owner_and_the_last_attempt_may_change_a_fit(registry: Registry, path: Path) -> None:
    queued = registry.fits.add("fit", "ts", ActivatePolicy.NEVER, 7)
    other = opened(path, owner="other")
    with pytest.raises(FitLost, match="other may not change fit fit"):
        other.fits.start(queued)
    running = registry.fits.start(queued)
    for stale in (queued, replace(running, attempt=2)):
        with pytest.raises(FitLost):
            registry.record_fit(stale, fitted(), lambda _: Decision(True, "so"))
    assert registry.record_fit(running, fitted(), lambda _: Decision(False, "so")) == (1, None)
    other.close()


def test_old_fits_are_forgotten_but_never_one_that_is_not_over(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("boxcal.app.registry.fits.KEPT", 3)
    registry.fits.add("waiting", "ts", ActivatePolicy.NEVER, 7)
    for number in range(5):
        fit = registry.fits.add(f"over-{number}", "ts", ActivatePolicy.NEVER, 7)
        registry.fits.end(fit, FitState.FAILED, "so")
    assert [record.id for record in registry.fits.list(10)] == ["over-4", "over-3", "over-2", "waiting"]


def test_activations_are_listed_newest_first(registry: Registry) -> None:
    assert registry.activations.list(10) == []
    first = add(registry, activate=True)
    registry.activations.activate(0)
    registry.activations.rollback()
    assert [(one.version, one.method) for one in registry.activations.list(10)] == [
        (first, "ts"),
        (0, "uncalibrated"),
        (first, "ts"),
    ]
    assert [one.version for one in registry.activations.list(1)] == [first]


def test_lists_come_in_pages(registry: Registry) -> None:
    for _ in range(5):
        add(registry)
    assert [record.version for record in registry.list(2)] == [5, 4]
    assert [record.version for record in registry.list(3, before=4)] == [3, 2, 1]
    newest = registry.fits.list(10)
    assert newest == [*registry.fits.list(2), *registry.fits.list(10, before=newest[1].id)]
    assert registry.fits.list(10, before=newest[-1].id) == []


def test_pruning_keeps_the_newest_the_active_and_the_last_ones(database_url: str) -> None:
    registry = Registry(database_url, DIGITS, owner="me")
    other = Registry(database_url, OTHERS[0], owner="other")
    versions = [add(registry) for _ in range(6)]
    foreign = add(other)
    for version in (2, 3, 4):
        registry.activations.activate(version)
    assert registry.prune(1, 1.0) == [1, 5]  # 2 was active within the day, 3 is the target of a rollback
    assert registry.prune(1, 0.0) == [2]
    assert registry.prune(1, 0.0) == []
    assert [record.version for record in registry.list() if record.pruned_at is None] == [foreign, 6, 4, 3, 0]
    record = registry.get(1)
    assert (record.method, record.size, record.spec) == ("ts", None, None)
    for call in (registry.artifact, registry.report, registry.activations.activate):
        with raises_problem(CalibratorPruned, match="Calibrator 1 was pruned at 20"):
            call(versions[0])
    assert registry.activations.rollback().version == 3
    with raises_problem(CalibratorPruned, match="Calibrator 2"):
        registry.activations.rollback()
    for own in (registry, other):
        own.close()
