"""A duel names the calibrator with the lower NLL, and seldom decides where there is none."""

import numpy as np

from boxcal.calibrators.monitoring.champion_challenger import Duel, Winner
from tests.calibrators.monitoring.streams import answers, drawn, normalised


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


def test_a_decision_stays_and_the_state_continues() -> None:
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


def test_a_label_that_one_side_excludes_costs_a_bounded_amount() -> None:
    duel = Duel(2)
    evidence = duel.update(np.array([[0.5, 0.5]]), np.array([[1.0, 0.0]]), np.array([1]))
    assert np.isfinite(evidence).all()
    assert duel.winner is Winner.UNDECIDED
