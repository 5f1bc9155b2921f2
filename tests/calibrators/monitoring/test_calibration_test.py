"""The test and the duel stay silent without a change or a difference, and name what it is otherwise."""

import math

import numpy as np
import pytest

from boxcal.calibrators.monitoring import bettors
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest, EvidenceHistory, prior_shares
from boxcal.calibrators.monitoring.champion_challenger import Duel, Winner
from tests.calibrators.monitoring.streams import answers, drawn, normalised, shifted

THRESHOLD = -math.log(0.05)


@pytest.mark.parametrize(("scale", "streams", "most"), [(4.0, 100, 10), (0.5, 40, 6)], ids=["same", "harder"])
def test_intact_calibration_rarely_raises_an_alarm(scale: float, streams: int, most: int) -> None:
    """At most 5 % of streams may; at that rate 11 or more of 100 have a probability below .02.

    Inputs may become harder half-way.
    """
    alarms = 0
    for seed in range(streams):
        random = np.random.default_rng(seed)
        rows = np.concatenate([answers(random, 1000), answers(random, 1000, scale=scale)])
        alarms += CalibrationTest(10).update(rows, drawn(rows, random))[:, 0].max() >= THRESHOLD
    assert alarms <= most


@pytest.mark.parametrize(("power", "kind"), [(0.5, "overconfident"), (2.0, "underconfident")])
def test_a_changed_temperature_is_found_and_named(power: float, kind: str) -> None:
    random = np.random.default_rng(1)
    calm = answers(random, 1000)
    changed = answers(random, 1000)
    test = CalibrationTest(10)
    test.update(calm, drawn(calm, random))
    before = test.log_evidence[0]
    evidence = test.update(changed, drawn(normalised(changed**power), random))
    assert before < THRESHOLD <= evidence[:, 0].max()
    assert test.alarms == (True, True)
    diagnosis = test.diagnosis()
    assert diagnosis.kind == kind
    assert 900 <= diagnosis.since <= 1200
    assert 0 < diagnosis.recoverable_nll_lower < diagnosis.recoverable_nll


def test_a_change_after_many_calm_labels_is_dated_where_it_began() -> None:
    """A run of small gains survived: without `RUN_DRIFT` the change began 5,673 labels ago."""
    random = np.random.default_rng(28)
    rows = answers(random, 11_000, 2)
    law = rows.copy()
    law[10_000:] = normalised(law[10_000:] ** (1 / 1.5))
    test = CalibrationTest(2)
    evidence = np.exp(test.update(rows, drawn(law, random))[:, 0])
    diagnosis = test.diagnosis()
    assert diagnosis.since == 1066
    tail = math.log(2) / np.log(2 + np.arange(2, 11_001))
    gains = np.log((evidence[1:] - tail) / (evidence[:-1] - tail))
    assert diagnosis.recoverable_nll == pytest.approx(gains[-diagnosis.since :].mean(), rel=1e-6)


def test_shifted_class_frequencies_are_found_and_the_classes_named() -> None:
    random = np.random.default_rng(2)
    factors = np.array([8.0, 1, 1, 1, 1, 1, 1, 1, 1, 0.1])
    rows = shifted(random, answers(random, 20_000, scale=2.0), 3000, factors)
    test = CalibrationTest(10, np.ones(10))
    evidence = test.update(rows, drawn(normalised(rows * factors), random))
    assert evidence[:, 0].max() >= THRESHOLD
    diagnosis = test.diagnosis()
    assert diagnosis.kind in {"label_shift", "class_bias"}
    assert diagnosis.classes[0] == 0


def test_unlabelled_rows_teach_the_class_frequencies() -> None:
    random = np.random.default_rng(3)
    factors = np.array([10.0] + [1.0] * 9)
    rows = shifted(random, answers(random, 20_000), 2000, factors)
    test = CalibrationTest(10, np.ones(10))
    test.observe(rows)
    estimated = test.by_class[6] / test.by_class[6].sum()
    truth = normalised(rows * factors).mean(0)
    assert abs(estimated[0] - truth[0]) < 0.05
    assert test.count == 0
    assert test.log_evidence == (0.0, 0.0)


def test_a_change_below_the_tolerance_is_strict_but_not_material() -> None:
    random = np.random.default_rng(4)
    rows = answers(random, 60_000)
    law = normalised(rows**0.93)
    recoverable = (law * np.log(law / rows)).sum(1).mean()
    assert 0.002 < recoverable < 0.005
    test = CalibrationTest(10)
    test.update(rows, drawn(law, random))
    assert test.alarms == (True, False)


def test_no_single_label_raises_an_alarm() -> None:
    """The answer excludes the class that occurs; the ratio is capped at 10, so log E is below log 10."""
    test = CalibrationTest(10)
    rows = np.array([[1.0] + [0.0] * 9])
    assert test.update(rows, np.array([5]))[0, 0] == pytest.approx(0.3819, abs=1e-4)
    assert test.alarms == (False, False)
    for _ in range(20):
        test.update(rows, np.array([5]))
    assert test.alarms == (True, True)
    test.largest[:] = 4.60, 2.99
    assert test.alarms == (False, False)
    test.largest[:] = 4.61, 3.00
    assert test.alarms == (True, True)


def test_each_bettor_is_fair() -> None:
    """Under the law of the answers no bettor's expected ratio exceeds 1, whatever it has learned."""
    random = np.random.default_rng(6)
    test = CalibrationTest(4, np.array([4.0, 1, 1, 1]))
    past = answers(random, 500, 4)
    test.update(past, drawn(normalised(past**0.5), random))
    for row in answers(random, 20, 4):
        expected = np.zeros(bettors.BETTORS)
        for label in range(4):
            copy = CalibrationTest(4)
            copy.load_state_dict(test.state_dict())
            copy.weights[:] = prior_shares()
            copy.progress[bettors.RUN] = 1e9
            copy.gains[:] = 0.0
            copy.update(row[None], np.array([label]))
            expected += row[label] * np.exp(copy.gains)
        assert (expected <= 1.0 + 1e-12).all()


def test_the_bet_is_fair_whatever_the_traffic_was() -> None:
    """Unlabelled rows of other class frequencies move the stake to one bettor; E stays 1 on average."""
    random = np.random.default_rng(7)
    test = CalibrationTest(4)
    past = answers(random, 500, 4)
    test.update(past, drawn(past, random))
    test.observe(past[past[:, 0] > 0.5])
    assert test.progress[bettors.TRAFFIC] == bettors.MOST_TRAFFIC
    for row in answers(random, 20, 4):
        expected = 0.0
        for label in range(4):
            copy = CalibrationTest(4)
            copy.load_state_dict(test.state_dict())
            before = copy.progress[bettors.RUN] = 1e3
            copy.update(row[None], np.array([label]))
            expected += row[label] * math.exp(copy.progress[bettors.RUN] - before + bettors.RUN_DRIFT)
        assert expected <= 1.0 + 1e-9


def test_traffic_of_other_class_frequencies_brings_the_alarm_forward() -> None:
    factors = np.array([3.0] + [1.0] * 9)
    alarms = []
    for seed in range(12):
        random = np.random.default_rng(seed)
        rows = shifted(random, answers(random, 6000), 3000, factors)
        labels = drawn(normalised(rows * factors), random)
        for unlabelled in (0, 1000):
            test = CalibrationTest(10)
            test.observe(rows[:unlabelled])
            alarms.append(np.argmax(test.update(rows[1000:], labels[1000:])[:, 0] >= THRESHOLD))
    without, with_traffic = np.median(np.reshape(alarms, (12, 2)), axis=0)
    assert with_traffic < 0.75 * without


def test_a_class_that_the_calibrator_never_saw_harms_nothing() -> None:
    test = CalibrationTest(3, np.array([1.0, 1.0, 0.0]))
    rows = np.eye(3)
    test.observe(rows)
    assert np.isfinite(test.update(rows, np.array([0, 1, 2]))).all()
    assert all(np.isfinite(value).all() for value in test.state_dict().values())


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        ([[0.5, 0.5]], [2], "label 2 of row 0 is not one of 2 classes"),
        ([[0.5, 0.6]], [0], "row 0 is no distribution: it sums to 1.1"),
        ([[float("nan"), 0.6]], [0], "row 0 is no distribution"),
        ([[0.2, 0.3, 0.5]], [0], r"shape \(1, 3\)"),
        ([[0.5, 0.5]], [0.0], "labels are integers, not float64"),
    ],
)
def test_what_is_no_row_or_label_is_refused(rows: list[list[float]], labels: list[int], message: str) -> None:
    test = CalibrationTest(2)
    before = test.state_dict()
    with pytest.raises(ValueError, match=message):
        test.update(np.array(rows), np.array(labels))
    assert all(np.array_equal(before[name], value) for name, value in test.state_dict().items())


def test_a_state_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`by_class` of the state has shape \(7, 3\), not \(7, 2\)"):
        CalibrationTest(2).load_state_dict(CalibrationTest(3).state_dict())
    with pytest.raises(ValueError, match="the state needs"):
        CalibrationTest(2).load_state_dict({})
    with pytest.raises(ValueError, match="prior probabilities"):
        CalibrationTest(2, np.array([1.0, -1.0]))


def test_the_history_of_the_evidence_stays_small() -> None:
    history = EvidenceHistory()
    log_evidence = np.repeat(np.arange(1, 20_001)[:, None] / 1000.0, 2, axis=1)
    for start in range(0, 20_000, 70):
        history.add(start, log_evidence[start : start + 70])
    points = history.points()
    assert points[:, 0].tolist() == list(range(200, 20_001, 200))
    assert points[:, 1] == pytest.approx(points[:, 0] / 1000.0)


def test_the_better_side_wins_whichever_it_is() -> None:
    random = np.random.default_rng(0)
    law = answers(random, 3000)
    sharp, labels = normalised(law**2), drawn(law, random)
    for champion, challenger, winner in ((sharp, law, Winner.CHALLENGER), (law, sharp, Winner.CHAMPION)):
        duel = Duel(10)
        duel.update(champion, challenger, labels)
        assert duel.winner is winner
        assert duel.count == 3000
        assert (duel.gain > 0) == (winner is Winner.CHALLENGER)


def test_a_side_wins_at_evidence_of_40() -> None:
    """Wrong decisions have the probability .05, half of it on each side."""
    random = np.random.default_rng(4)
    law = answers(random, 400)
    sharp, labels = normalised(law**2), drawn(law, random)
    decided = int(np.argmax(Duel(10).update(sharp, law, labels)[:, 0] >= 3.68888))
    for count, winner in ((decided, Winner.UNDECIDED), (decided + 1, Winner.CHALLENGER)):
        duel = Duel(10)
        duel.update(sharp[:count], law[:count], labels[:count])
        assert duel.winner is winner


def test_a_side_wins_only_while_it_is_ahead() -> None:
    """The stakes are low where much can be lost, so the evidence grows although the challenger lost more."""
    champion = np.full((150, 2), 0.5)
    challenger = np.array([[0.999, 0.001]] + [[0.6, 0.4]] * 149)
    labels = np.array([1] + [0] * 149)
    for count, winner in ((32, Winner.UNDECIDED), (100, Winner.UNDECIDED), (150, Winner.CHALLENGER)):
        duel = Duel(2)
        evidence = duel.update(champion[:count], challenger[:count], labels[:count])
        assert evidence[-1, 0] > 3.68888
        assert duel.winner is winner
        other = Duel(2)
        other.update(challenger[:count], champion[:count], labels[:count])
        assert other.winner is (Winner.CHAMPION if count == 150 else Winner.UNDECIDED)


def test_a_duel_that_was_stored_without_its_squares_begins_anew() -> None:
    duel, rows = Duel(2), np.full((9, 2), 0.5)
    duel.update(rows, rows, np.zeros(9, np.int64))
    state = duel.state_dict()
    state["sums"] = state["sums"][:2]
    duel.load_state_dict(state)
    assert (duel.count, duel.sums.tolist()) == (0, [0.0, 0.0, 0.0])


def test_equal_sides_are_seldom_decided() -> None:
    """Each side moves the same mass from one of two equally likely classes: both lose the same on average."""
    decided = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        law = answers(random, 1500)
        law[:, :2] = law[:, :2].mean(1, keepdims=True)
        left = law * np.array([1.4, 0.6] + [1.0] * 8)
        right = law * np.array([0.6, 1.4] + [1.0] * 8)
        duel = Duel(10)
        duel.update(left, right, drawn(law, random))
        decided += duel.winner is not Winner.UNDECIDED
    assert decided <= 7
    duel = Duel(10)
    duel.update(law, law, drawn(law, random))
    assert duel.winner is Winner.UNDECIDED
    assert duel.gain == 0.0


def test_a_decision_stays_the_state_continues_and_an_excluded_label_costs_a_bounded_amount() -> None:
    random = np.random.default_rng(2)
    law = answers(random, 2000)
    sharp, labels = normalised(law**2), drawn(law, random)
    whole, first, second = Duel(10), Duel(10), Duel(10)
    expected = whole.update(sharp, law, labels)
    seen = first.update(sharp[:700], law[:700], labels[:700])
    second.load_state_dict(first.state_dict())
    seen = np.concatenate([seen, second.update(sharp[700:], law[700:], labels[700:])])
    assert np.array_equal(seen, expected)
    second.update(law, sharp, labels)
    assert second.winner is Winner.CHALLENGER
    duel = Duel(2)
    evidence = duel.update(np.array([[0.5, 0.5]]), np.array([[1.0, 0.0]]), np.array([1]))
    assert np.isfinite(evidence).all()
    assert duel.winner is Winner.UNDECIDED
