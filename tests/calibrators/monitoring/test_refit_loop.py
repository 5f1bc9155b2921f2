"""The refit loop: alarm, refit, duel, activation, and back where the change goes away."""

import numpy as np
import pytest

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.errors import UnknownMethodError
from boxcal.calibrators.monitoring import refit_loop
from boxcal.calibrators.monitoring.candidates import Candidate, adjust_class_prior, candidates, mean_nll
from boxcal.calibrators.monitoring.champion_challenger import Duel, Winner
from boxcal.calibrators.monitoring.decisions import DecisionKind, LoopDecision, Phase
from boxcal.calibrators.monitoring.refit_loop import RefitLoop
from tests.calibrators.monitoring.streams import answers, drawn, normalised, shifted
from tests.calibrators.samples import Array

FREQUENCIES = np.full(10, 0.1)


class Service:
    """Fits and activates what the loop asks for, at once."""

    def __init__(self) -> None:
        self.versions = {0: (ArrayCalibrator.uncalibrated(10), FREQUENCIES)}
        self.loop = self.new_loop()
        self.decisions: list[LoopDecision] = []
        self.logits, self.labels = np.empty((0, 10)), np.empty(0, np.int64)

    def new_loop(self) -> RefitLoop:
        return RefitLoop(10, self.calibrate, version=0, class_prior=FREQUENCIES)

    def calibrate(self, version: int, logits: Array) -> Array:
        rows: Array = self.versions[version][0](logits)
        return rows

    def feed(self, logits: Array, labels: Array, piece: int = 50) -> None:
        self.logits = np.concatenate([self.logits, logits])
        self.labels = np.concatenate([self.labels, labels])
        for first in range(0, len(labels), piece):
            self.decisions += self.loop.update(logits[first : first + piece], labels[first : first + piece])
            self.answer()

    def answer(self) -> None:
        request = self.loop.request
        if request:
            champion, frequencies = self.versions[request.champion]
            rows = slice(request.first, request.last)
            logits, labels = self.logits[rows], self.labels[rows]
            best = candidates(
                champion, logits, labels, frequencies,
                earlier={v: self.versions[v] for v in self.loop.earlier_versions},
            )[0]  # fmt: skip
            version = self.store(best)
            nll = mean_nll(champion, logits, labels)
            self.decisions.append(
                self.loop.fitted(version, name=best.name, nll=best.score, champion_nll=nll, compared=4)
            )
        proposal = self.loop.proposal
        if proposal:
            frequencies = self.versions[proposal.version][1]
            self.decisions.append(self.loop.activated(proposal.version, frequencies))

    def store(self, candidate: Candidate) -> int:
        if candidate.version is not None:
            return candidate.version
        version = max(self.versions) + 1
        self.versions[version] = candidate.calibrator, candidate.class_prior
        return version

    def kinds(self) -> list[str]:
        return [decision.kind.value for decision in self.decisions]


def stream(seed: int, count: int, power: float = 1.0) -> tuple[Array, Array]:
    random = np.random.default_rng(seed)
    rows = answers(random, count)
    return np.log(rows), drawn(normalised(rows**power), random)


def test_intact_calibration_is_left_alone() -> None:
    service = Service()
    service.feed(*stream(0, 4000))
    assert service.decisions == []
    assert service.loop.phase is Phase.WATCHING
    assert (service.loop.seen, service.loop.challenger, service.loop.proposal) == (4000, None, None)


def test_a_change_is_found_refitted_and_rolled_back_when_it_goes_away() -> None:
    service = Service()
    service.feed(*stream(1, 2000))
    service.feed(*stream(2, 4000, 0.5))
    kinds = service.kinds()
    order = ["alarm", "refit", "candidate", "duel_won", "activated"]
    assert [kind for kind in kinds if kind in order][:5] == order
    assert service.loop.champion > 0
    logits, labels = stream(3, 2000, 0.5)
    active, first = (service.versions[v][0] for v in (service.loop.champion, 0))
    assert mean_nll(active, logits, labels) < mean_nll(first, logits, labels) - 0.1
    adjusted = service.loop.champion
    service.feed(*stream(4, 3000))
    assert service.loop.champion == 0
    assert adjusted in service.loop.earlier
    for decision in service.decisions:
        assert decision.sentence.endswith((".", ")."))
        assert "{" not in decision.sentence
    won = next(d for d in service.decisions if d.kind is DecisionKind.DUEL_WON)
    assert won.sentence.startswith("Version 1 is better than version 0: its NLL was lower by 0.")


def test_other_class_frequencies_are_met_by_em() -> None:
    random = np.random.default_rng(5)
    factors = np.array([8.0, 4, 1, 1, 1, 1, 1, 0.3, 0.1, 0.1])
    rows = shifted(random, answers(random, 40_000), 4000, factors)
    labels = drawn(normalised(rows * factors), random)
    service = Service()
    service.feed(np.log(rows), labels)
    chosen = [d.evidence["candidate"] for d in service.decisions if d.kind is DecisionKind.CANDIDATE]
    assert chosen[0] in {"uncalibrated+em", "uncalibrated+em+ts"}
    assert service.versions[1][0].method == chosen[0]
    assert service.loop.champion >= 1


def test_pieces_of_any_size_and_a_restored_state_give_the_same_decisions() -> None:
    logits, labels = stream(6, 1500, 0.5)
    decisions, states = [], []
    for piece in (1500, 50, 37):
        service = Service()
        found: list[LoopDecision] = []
        for first in range(0, 1500, piece):
            loop = service.new_loop()
            loop.load_state_dict(service.loop.state_dict())
            service.loop = loop
            found += loop.update(logits[first : first + piece], labels[first : first + piece])
        decisions.append(found)
        states.append(service.loop.state_dict())
    assert [d.kind.value for d in decisions[0]] == ["alarm", "material_alarm", "refit"]
    assert decisions[0] == decisions[1] == decisions[2]
    for state in states[1:]:
        assert all(np.array_equal(value, states[0][name]) for name, value in state.items())
    with pytest.raises(ValueError, match=r"`numbers` of the state has shape \(3,\), not \(9,\)"):
        service.loop.load_state_dict(states[0] | {"numbers": np.zeros(3, np.int64)})


def test_what_the_loop_is_told_moves_it_on() -> None:
    service = Service()
    loop = service.loop
    with pytest.raises(ValueError, match="no fit was asked for: the loop is in the phase watching"):
        loop.fitted(1, name="ts", nll=0.1, champion_nll=0.2)
    with pytest.raises(ValueError, match="nothing was proposed"):
        loop.dismissed()
    logits, labels = stream(7, 1500, 0.5)
    loop.update(logits, labels)
    request = loop.request
    assert request is not None
    assert (request.champion, request.last - request.first >= 1000) == (0, True)
    assert loop.not_fitted("the worker ended").sentence.endswith("the refit failed (the worker ended).")
    loop.update(*stream(8, 900, 0.5))
    assert loop.phase.name == "WATCHING"
    loop.update(*stream(9, 150, 0.5))
    assert loop.phase.name == "FITTING"
    assert loop.fitted(1, name="ts", nll=0.3, champion_nll=0.2).kind is DecisionKind.NO_CANDIDATE
    loop.update(*stream(10, 1050, 0.5))
    service.versions[1] = fit("ts", logits, labels).on_arrays, FREQUENCIES
    assert loop.fitted(1, name="ts", nll=0.1, champion_nll=0.2).kind is DecisionKind.CANDIDATE
    assert loop.challenger == 1
    loop.update(*stream(11, 800, 0.5))
    assert loop.proposal is not None
    assert (loop.proposal.version, loop.proposal.rollback) == (1, False)
    assert "declined" in loop.dismissed().sentence
    assert (loop.phase, loop.champion) == (Phase.WATCHING, 0)
    before = loop.test.count
    assert before == loop.seen
    assert loop.activated(7).evidence == {"version": 7}
    assert (loop.champion, loop.earlier.tolist(), loop.test.count) == (7, [0, -1, -1], 0)


def test_a_worse_or_equal_challenger_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service()
    loop = service.loop
    loop.update(*stream(12, 1500, 0.5))
    service.versions[1] = service.versions[0][0].adjusted(np.zeros(10), 0.5), FREQUENCIES
    loop.fitted(1, name="ts", nll=0.1, champion_nll=0.2)
    decided = loop.update(*stream(13, 500, 0.5))
    assert "duel_lost" in [decision.kind.value for decision in decided]
    loop.update(*stream(14, 1050, 0.5))
    service.versions[2] = service.versions[0]
    loop.fitted(2, name="ts", nll=0.1, champion_nll=0.2)
    monkeypatch.setattr(refit_loop, "LONGEST_DUEL", 400)
    decided = loop.update(*stream(15, 400, 0.5))
    assert [decision.kind.value for decision in decided] == ["duel_undecided"]


@pytest.mark.parametrize(("lost", "kinds"), [(0, ["duel_won"]), (5, [])])
def test_a_winner_that_lost_its_lead_since_is_not_proposed(lost: int, kinds: list[str]) -> None:
    """Decisions are made every 50 labels, and name the mean gain of all of them."""

    def calibrate(version: int, logits: Array) -> Array:
        return normalised(np.exp(logits * version))

    loop = RefitLoop(2, calibrate, version=0)
    loop.numbers[[refit_loop.PHASE, refit_loop.LAST]] = Phase.FITTING, 1000
    loop.fitted(1, name="ts", nll=0.1, champion_nll=0.2)
    logits = np.log([[0.6, 0.4]] * (50 - lost) + [[0.999, 0.001]] * lost)
    decided = loop.update(logits, np.array([0] * (50 - lost) + [1] * lost))
    assert [one.kind.value for one in decided if one.kind is DecisionKind.DUEL_WON] == kinds
    assert loop.duel.winner is Winner.CHALLENGER


def test_an_earlier_version_is_returned_to_at_evidence_of_200() -> None:
    """Each of these duels follows another, so they decide wrongly with a probability of .01 only."""
    service = Service()
    service.versions[1] = service.versions[0][0].adjusted(np.zeros(10), 1.4), FREQUENCIES
    service.loop.activated(1, FREQUENCIES)
    logits, labels = stream(21, 2000)
    sides = [service.calibrate(version, logits) for version in (1, 0)]
    evidence = Duel(10).update(sides[0], sides[1], labels)[:, 0]
    returned = next(d for d in service.loop.update(logits, labels) if d.kind is DecisionKind.ROLLBACK)
    assert returned.evidence["alpha"] == 0.01
    reached = int(np.argmax(evidence >= 5.2983))
    assert np.argmax(evidence >= 2.3026) < reached - 50
    assert returned.at == 50 * (reached // 50 + 1)


def test_a_version_that_is_forgotten_is_not_returned_to() -> None:
    service = Service()
    service.versions[1] = service.versions[0][0].adjusted(np.zeros(10), 2.0), FREQUENCIES
    loop = service.loop
    loop.activated(1, FREQUENCIES)
    logits, labels = stream(18, 4000, 0.25)
    for first in range(0, 4000, 50):
        loop.update(logits[first : first + 50], labels[first : first + 50])
        if loop.phase is Phase.FITTING:
            break
    loop.update(*stream(19, 800))
    assert (loop.phase, loop.earlier_duels[0].winner) == (Phase.FITTING, Winner.CHALLENGER)
    loop.forget(0)
    loop.not_fitted("the worker ended")
    decided = loop.update(*stream(20, 50))
    assert "rollback" not in [decision.kind.value for decision in decided]
    assert (loop.phase, loop.proposal) == (Phase.WATCHING, None)


def test_an_adjustment_is_bayes_rule_and_survives_as_bytes() -> None:
    random = np.random.default_rng(16)
    rows = answers(random, 600)
    logits, labels = np.log(rows) * 2.0, drawn(rows, random)
    for method in ("uncalibrated", "ts", "ts+pb", "ts+lb", "sms"):
        calibrator = fit(method, logits, labels).on_arrays
        target = np.array([5.0, 2, 1, 1, 1, 1, 1, 1, 0.5, 0.5])
        adjusted = adjust_class_prior(calibrator, np.ones(10), target)
        plain, changed = (c(logits) for c in (calibrator, adjusted))
        if "pb" not in method:
            assert changed == pytest.approx(normalised(plain * target), abs=1e-12)
        again = ArrayCalibrator.from_bytes(adjusted.to_bytes())
        assert again.method == f"{method}+em"
        assert np.array_equal(again(logits), changed)
        twice = adjust_class_prior(again, target, np.ones(10)).adjusted(np.zeros(10), 2.0)
        tempered = calibrator.adjusted(np.zeros(10), 2.0)
        assert twice.method == f"{method}+em"
        assert twice(logits) == pytest.approx(tempered(logits), abs=1e-12)
    with pytest.raises(UnknownMethodError, match=r"no method 'ts\+em'"):
        fit("ts+em", logits, labels)
    with pytest.raises(ValueError, match="as many class frequencies above 0"):
        adjust_class_prior(calibrator, np.ones(10), np.zeros(10))


def test_offsets_of_classes_are_a_candidate_where_there_are_labels_for_them() -> None:
    random = np.random.default_rng(17)
    rows = answers(random, 3000)
    biased = normalised(rows * np.exp(random.normal(size=10)) ** 1.5)
    labels = drawn(biased, random)
    champion = Calibrator.uncalibrated(10)
    found = {c.name: c for c in candidates(champion, np.log(rows), labels, FREQUENCIES)}
    assert set(found) == {"ts", *(f"uncalibrated+{one}" for one in ("em", "em+ts", "bias"))}
    law = -(biased * np.log(biased)).sum(1).mean()
    assert found["uncalibrated+bias"].nll == pytest.approx(law, abs=0.03)
    for one in found.values():
        again = ArrayCalibrator.from_bytes(one.calibrator.to_bytes())
        assert again.method == one.name
        assert np.array_equal(again(np.log(rows[:9])), one.calibrator(np.log(rows[:9])))
    few = candidates(champion, np.log(rows[:150]), labels[:150], FREQUENCIES)
    assert [candidate.name for candidate in few] == ["ts"]
