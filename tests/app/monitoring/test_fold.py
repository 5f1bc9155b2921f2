"""The fold over the log: the same to the last bit however the log is cut, and wherever it is resumed."""

from typing import Any

import numpy as np
import pytest

from boxcal.app.monitoring.fold import ActiveVersion, MonitorFold, document_of, meaning_of
from boxcal.app.monitoring.records import NONE, Array, PredictionBlock, entries
from boxcal.calibrators.monitoring.stored_logits import pack
from boxcal.calibrators.temperature_fast_path import TemperatureRows
from tests.app.monitoring.traffic import CLASSES, stream

VERSIONS = {1: TemperatureRows(1.0, 0.0, 1.0, CLASSES), 2: TemperatureRows(2.0, 0.0, 1.0, CLASSES)}


def answers(version: int, logits: Any) -> Any:
    return VERSIONS[version](np.ascontiguousarray(logits))[0]


def active(version: int = 1, activation: int = 1) -> ActiveVersion:
    return ActiveVersion(version, "ts", activation, np.full(CLASSES, 0.1), 0.0, reads_logits=True)


def log(count: int, temperature: float = 1.0, version: int = 1, start: float = 0.0) -> Array:
    """Predictions whose labels arrive ten entries later, and some that never get one."""
    logits, labels = stream(count, temperature)
    rows: list[tuple[int, bool]] = []
    for n in range(count):
        rows.append((n, True))
        if n >= 10 and n % 7:
            rows.append((n - 10, False))
    which, are_predictions = np.array([n for n, _ in rows]), np.array([made for _, made in rows])
    return entries(
        np.arange(1, len(rows) + 1),
        np.full(len(rows), version),
        start + which,
        pack(logits[which]),
        labels=np.where(are_predictions, NONE, np.array(labels)[which]),
        are_predictions=are_predictions,
    )


def whole(events: Array) -> MonitorFold:
    fold = MonitorFold(CLASSES, answers, active(), refits=True)
    fold.fold(events)
    return fold


@pytest.mark.parametrize("offset", [3e3, 6e3, -1e6, 1e6])
def test_logits_with_a_common_offset_give_the_evidence_of_those_without(offset: float) -> None:
    """Log-likelihoods, as those of naive Bayes: the softmax does not depend on what all of them share."""
    logits, labels = stream(3000)
    found = []
    for shift in (0.0, offset):
        block = PredictionBlock(CLASSES, len(logits))
        block.add(1, logits + shift, 0.0)
        made = entries(np.arange(1, len(logits) + 1), **block.columns(), labels=np.array(labels))
        found.append(document_of(whole(made), "0123456789"))
    calm, shifted = found
    assert not shifted["alarms"]["strict"]["alarm"]
    assert shifted["alarms"]["strict"]["log_evidence"] == pytest.approx(
        calm["alarms"]["strict"]["log_evidence"], abs=0.01
    )
    assert shifted["metrics"]["nll"] == pytest.approx(calm["metrics"]["nll"], abs=1e-3)


def same(one: MonitorFold, other: MonitorFold) -> None:
    mine, theirs = one.loop.state_dict(), other.loop.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert value.tobytes() == theirs[name].tobytes(), name
    assert one.loop.test.history.points().tolist() == other.loop.test.history.points().tolist()
    assert document_of(one, "0123456789")["alarms"] == document_of(other, "0123456789")["alarms"]


@pytest.mark.parametrize("seed", range(3))
def test_a_log_may_be_cut_and_resumed_anywhere(seed: int) -> None:
    events = log(1500, 1.5)
    rng = np.random.default_rng(seed)
    fold = MonitorFold(CLASSES, answers, active(), refits=True)
    start = 0
    while start < len(events):
        stop = start + int(rng.integers(1, 200))
        fold.fold(events[start:stop])
        fold = MonitorFold.from_bytes(fold.to_bytes(), CLASSES, answers, refits=True)
        start = stop
    same(fold, whole(events))
    assert fold.seq == len(events)


def test_one_sentence_says_what_the_document_means() -> None:
    assert meaning_of({}).startswith("No label has arrived")
    classes = "0123456789"
    assert "not enough labels" in meaning_of(document_of(whole(log(30)), classes))
    assert meaning_of(document_of(whole(log(800)), classes)).startswith("Version 1 is calibrated as far as ")
    assert "worthwhile: the answers are too confident" in meaning_of(
        document_of(whole(log(1500, 2.5)), classes)
    )


def test_entries_of_other_versions_are_counted_and_not_tested() -> None:
    fold = whole(log(100))
    before = fold.loop.state_dict()
    fold.fold(log(50, version=5))
    assert fold.skipped == len(log(50))
    assert all(value.tobytes() == before[name].tobytes() for name, value in fold.loop.state_dict().items())


def test_the_shift_is_found_dated_and_described() -> None:
    calm, shifted = log(2000), log(1500, 2.5, start=2000.0)
    fold = whole(calm)
    assert fold.loop.test.alarms == (False, False)
    decisions = fold.fold(shifted)
    assert {decision.kind.value for decision in decisions} >= {"alarm", "material_alarm", "refit"}
    document = document_of(fold, "0123456789")
    assert document["alarms"]["material"]["alarm"]
    assert document["diagnosis"]["kind"] == "overconfident"
    assert document["diagnosis"]["recoverable_nll"] > document["diagnosis"]["recoverable_nll_lower"] > 0.005
    assert 1700 < document["diagnosis"]["began_at"] < 2300
    request = fold.loop.request
    assert request is not None
    assert shifted["seq"][request.last - request.first - 200] < fold.refit_seq <= shifted["seq"][-1]


def test_expected_accuracy_is_by_labels_once_there_are_enough() -> None:
    events = log(1000)
    fold = MonitorFold(CLASSES, answers, active(), refits=True)
    fold.fold(events[:40])
    early = fold.expected_accuracy()
    assert early is not None
    assert (early.basis, early.low) == ("validation", None)
    fold.fold(events[40:])
    late = fold.expected_accuracy()
    assert late is not None
    logits, labels = stream(1000)
    right = np.mean(logits.argmax(1) == labels)
    assert late.basis == "labels"
    assert late.low is not None
    assert late.high is not None
    assert late.low < right < late.high


def test_acknowledging_begins_the_test_anew() -> None:
    fold = whole(log(800, 3.0))
    assert fold.loop.test.alarms[0]
    fold.acknowledge("2026-11-22T00:00:00+00:00")
    assert document_of(fold, "0123456789")["alarms"]["strict"]["alarm"] is False
    assert document_of(fold, "0123456789")["acknowledged_at"] == "2026-11-22T00:00:00+00:00"
    decisions = fold.fold(log(800, 3.0))
    assert "alarm" in {decision.kind.value for decision in decisions}


def test_another_activation_begins_anew_and_keeps_the_former_for_a_rollback() -> None:
    fold = whole(log(300))
    fold.activated(active(2, 2))
    assert fold.loop.champion == 2
    assert fold.loop.earlier_versions == [1]
    assert fold.metrics.result().count == 0
    fold.loop.forget(1)
    assert fold.loop.earlier_versions == []


def test_without_refits_an_alarm_asks_for_nothing() -> None:
    fold = MonitorFold(CLASSES, answers, active(), refits=False)
    decisions = fold.fold(log(2500, 3.0))
    assert {decision.kind.value for decision in decisions} == {"alarm", "material_alarm"}
    fold.activated(active(2, 2))
    assert fold.loop.earlier_versions == []
