"""The loop from an alarm to a better calibrator and, where an earlier one is better again, back to it.

    watching -> (strict alarm, enough labels) -> fitting -> duel -> proposed -> (activated) -> watching

The loop folds labelled rows and says what should happen; its caller fits, stores, activates, and tells the
result. So it needs neither processes nor a database, and a replay of the same labels and results gives the
same decisions. Earlier versions stay in duels with the active one, one duel after another, and win by
rollback.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from boxcal.calibrators.monitoring.champion_challenger import Duel, Winner
from boxcal.calibrators.monitoring.decisions import DecisionKind, LoopDecision, Phase, Proposal, RefitRequest
from boxcal.calibrators.monitoring.state import Array, StatefulFold

FEWEST_LABELS = 1000
"""Labels since the change from which a refit is asked for."""

LONGEST_DUEL = 5000
DUEL_PER_LABEL = 2
"""Longest duel a label that the challenger was fitted to: then there are more labels for a better fit."""

COOL_DOWN = 1000
"""Labels after a decision before the next refit."""

INTERVAL = 50
"""Decisions are made after every so many labels, so they do not depend on the sizes of updates."""

EARLIER = 3
"""Earlier versions that a rollback may return to."""

ROLLBACK_ALPHA = 0.01
"""Of each of their duels, which follow one another without end."""

NO_VERSION = -1

Calibrate = Callable[[int, Array], Array]
"""Gives the probabilities (N, K) of a version for logits (N, K), without request bounds."""


PHASE, SEEN, CHAMPION, CHALLENGER, FIRST, LAST, QUIET_UNTIL, SAID_STRICT, SAID_MATERIAL = range(9)
"""Entries of `numbers`."""


class RefitLoop(StatefulFold):
    """Folds labelled logits in prediction order into decisions about the active calibrator.

    Parameters
    ----------
    num_classes
        K.
    calibrate
        Gives the answers of a version; called for the active version, the challenger and the previous one.
    version
        The active version; not negative.
    class_prior
        (K,) its mean answer to the data that it was fitted to; uniform unless given.
    fewest_labels
        See the constant.

    Attributes
    ----------
    test
        The calibration test of the active version.
    duel
        The challenger against the active version.
    earlier_duels
        Earlier versions against the active one.
    """

    STATE: ClassVar[tuple[str, ...]] = ("numbers", "earlier")

    def __init__(
        self,
        num_classes: int,
        calibrate: Calibrate,
        *,
        version: int,
        class_prior: Array | None = None,
        fewest_labels: int = FEWEST_LABELS,
    ) -> None:
        self.num_classes = num_classes
        self.calibrate = calibrate
        self.fewest_labels = fewest_labels
        self.numbers = np.zeros(9, np.int64)
        self.numbers[[CHAMPION, CHALLENGER]] = version, NO_VERSION
        self.earlier = np.full(EARLIER, NO_VERSION, np.int64)
        self.test = CalibrationTest(num_classes, class_prior)
        self.duel = Duel(num_classes)
        self.earlier_duels = self._new_duels()

    def _parts(self) -> dict[str, StatefulFold]:
        earlier = {f"earlier{index}": duel for index, duel in enumerate(self.earlier_duels)}
        return {"test": self.test, "duel": self.duel, **earlier}

    def _new_duels(self) -> list[Duel]:
        return [self._new_duel() for _ in range(EARLIER)]

    def _new_duel(self) -> Duel:
        return Duel(self.num_classes, alpha=ROLLBACK_ALPHA)

    @property
    def phase(self) -> Phase:
        """What the loop waits for."""
        return Phase(int(self.numbers[PHASE]))

    @property
    def seen(self) -> int:
        """How many labels were folded, over all versions."""
        return int(self.numbers[SEEN])

    @property
    def champion(self) -> int:
        """The active version."""
        return int(self.numbers[CHAMPION])

    @property
    def challenger(self) -> int | None:
        """The version that the duel is about, or that was proposed."""
        version = int(self.numbers[CHALLENGER])
        return None if version == NO_VERSION else version

    @property
    def earlier_versions(self) -> list[int]:
        """The versions that a rollback may return to."""
        return [version for version in self.earlier.tolist() if version != NO_VERSION]

    @property
    def request(self) -> RefitRequest | None:
        """The fit that the loop waits for; answer by `fitted` or `not_fitted`."""
        if self.phase is not Phase.FITTING:
            return None
        return RefitRequest(self.champion, int(self.numbers[FIRST]), int(self.numbers[LAST]))

    @property
    def labels_to_refit(self) -> int | None:
        """How many labels the next refit waits for, if the change lasts; None without an alarm."""
        if self.phase is not Phase.WATCHING or not self.test.alarms[0]:
            return None
        since = self.test.diagnosis().since
        return max(0, self.fewest_labels - since, int(self.numbers[QUIET_UNTIL]) - self.seen)

    @property
    def proposal(self) -> Proposal | None:
        """The activation that the loop waits for; answer by `activated` or `dismissed`."""
        if self.phase is not Phase.PROPOSED:
            return None
        version = int(self.numbers[CHALLENGER])
        return Proposal(version, version in self.earlier)

    def update(self, logits: Array, labels: Array) -> list[LoopDecision]:
        """Fold (N,) labels of logits (N, K), in prediction order.

        All labels are folded, also those after a decision: the loop goes on with the active version until it
        is told of another.
        """
        decisions: list[LoopDecision] = []
        rows, truth = np.asarray(logits), np.asarray(labels)
        first = 0
        while first < len(truth):
            last = min(len(truth), first + INTERVAL - self.seen % INTERVAL)
            self._fold(rows[first:last], truth[first:last])
            first = last
            if self.seen % INTERVAL == 0:
                decisions += self._decide()
        return decisions

    def _fold(self, logits: Array, labels: Array) -> None:
        answers = self.calibrate(self.champion, logits)
        self.test.update(answers, labels)
        if self.phase is Phase.DUEL:
            self.duel.update(answers, self.calibrate(int(self.numbers[CHALLENGER]), logits), labels)
        for version, duel in zip(self.earlier.tolist(), self.earlier_duels, strict=True):
            if version != NO_VERSION:
                duel.update(answers, self.calibrate(version, logits), labels)
        self.numbers[SEEN] += len(labels)

    def _decide(self) -> list[LoopDecision]:
        decisions = self._new_alarms()
        rollback = self._rollback_if_due()
        if rollback:
            decisions.append(rollback)
        elif self.phase is Phase.WATCHING:
            decisions += self._refit_if_due()
        elif self.phase is Phase.DUEL:
            decisions += self._end_duel_if_due()
        return decisions

    def _new_alarms(self) -> list[LoopDecision]:
        found = []
        kinds = {SAID_STRICT: DecisionKind.ALARM, SAID_MATERIAL: DecisionKind.MATERIAL_ALARM}
        for raised, largest, (said, kind) in zip(
            self.test.alarms, self.test.largest.tolist(), kinds.items(), strict=True
        ):
            if raised and not self.numbers[said]:
                self.numbers[said] = 1
                diagnosis = self.test.diagnosis()
                evidence = {
                    "diagnosis": diagnosis.kind,
                    "classes": list(diagnosis.classes),
                    "labels_since_change": diagnosis.since,
                    "recoverable_nll": diagnosis.recoverable_nll,
                    "recoverable_nll_lower": diagnosis.recoverable_nll_lower,
                    "log_evidence": largest,
                }
                found.append(self._decision(kind, evidence))
        return found

    def _refit_if_due(self) -> list[LoopDecision]:
        since = self.test.diagnosis().since
        if not self.test.alarms[0] or self.seen < self.numbers[QUIET_UNTIL] or since < self.fewest_labels:
            return []
        self.numbers[[PHASE, FIRST, LAST]] = Phase.FITTING, self.seen - since, self.seen
        return [self._decision(DecisionKind.REFIT, {"labels": since})]

    def fitted(
        self, version: int, *, name: str, nll: float, champion_nll: float, compared: int = 1
    ) -> LoopDecision:
        """Tell the result of the fit that `request` asked for; the duel begins, or not.

        Parameters
        ----------
        version
            Of the best candidate; it may be an earlier version.
        name
            Its method.
        nll, champion_nll
            Of it (with parameters a label) and of the active version on the labels of the request.
        compared
            How many candidates there were.

        Raises
        ------
        ValueError
            No fit was asked for.
        """
        self._expect(Phase.FITTING, "no fit was asked for")
        evidence = {
            "candidate": name, "version": version, "nll": nll, "champion_nll": champion_nll,
            "candidates": compared,
        }  # fmt: skip
        if nll >= champion_nll:
            self._rest()
            return self._decision(DecisionKind.NO_CANDIDATE, evidence)
        self.duel = Duel(self.num_classes)
        self.numbers[[PHASE, CHALLENGER]] = Phase.DUEL, version
        return self._decision(DecisionKind.CANDIDATE, evidence)

    def not_fitted(self, reason: str) -> LoopDecision:
        """Tell that the fit failed; after the cool-down the loop asks again.

        Raises
        ------
        ValueError
            No fit was asked for.
        """
        self._expect(Phase.FITTING, "no fit was asked for")
        self._rest()
        return self._decision(DecisionKind.NO_CANDIDATE, {"reason": reason})

    def _end_duel_if_due(self) -> list[LoopDecision]:
        winner, count = _winner_of(self.duel), self.duel.count
        fitted_to = int(self.numbers[LAST] - self.numbers[FIRST])
        evidence = _evidence(self.duel, int(self.numbers[CHALLENGER]))
        if winner is Winner.CHALLENGER:
            self.numbers[PHASE] = Phase.PROPOSED
            return [self._decision(DecisionKind.DUEL_WON, evidence)]
        if winner is Winner.UNDECIDED and count < min(LONGEST_DUEL, DUEL_PER_LABEL * fitted_to):
            return []
        self._rest()
        kind = DecisionKind.DUEL_LOST if winner is Winner.CHAMPION else DecisionKind.DUEL_UNDECIDED
        return [self._decision(kind, evidence)]

    def _rollback_if_due(self) -> LoopDecision | None:
        if self.phase not in {Phase.WATCHING, Phase.DUEL}:
            return None
        for index, duel in enumerate(self.earlier_duels):
            if _winner_of(duel) is Winner.CHALLENGER:
                version = int(self.earlier[index])
                self.numbers[[PHASE, CHALLENGER]] = Phase.PROPOSED, version
                return self._decision(DecisionKind.ROLLBACK, _evidence(duel, version))
            if duel.winner is Winner.CHAMPION or duel.count >= LONGEST_DUEL:
                self.earlier_duels[index] = self._new_duel()
        return None

    def activated(self, version: int, class_prior: Array | None = None) -> LoopDecision:
        """Tell that a version is active now, whoever activated it; its test begins anew.

        Parameters
        ----------
        class_prior
            (K,) its mean answer to the data that it was fitted to; uniform unless given.
        """
        if version != self.champion:
            others = [one for one in self.earlier.tolist() if one not in {version, NO_VERSION}]
            kept = [self.champion, *others][:EARLIER]
            self.earlier[:] = [*kept, *[NO_VERSION] * (EARLIER - len(kept))]
            self.numbers[CHAMPION] = version
            self.earlier_duels = self._new_duels()
        self.begin_test(class_prior)
        self._rest()
        return self._decision(DecisionKind.ACTIVATED, {"version": version})

    def begin_test(self, class_prior: Array | None = None) -> None:
        """Begin the test of the active version anew; its alarms can be raised again.

        Parameters
        ----------
        class_prior
            As for `activated`.
        """
        self.test = CalibrationTest(self.num_classes, class_prior, tolerance=self.test.tolerance)
        self.numbers[[SAID_STRICT, SAID_MATERIAL]] = 0

    def forget(self, version: int) -> list[LoopDecision]:
        """Stop comparing with a version other than the active one: it was pruned, or must not be returned to.

        Returns the decision that a duel or a proposal of that version has ended, if there was one.
        """
        for index in np.flatnonzero(self.earlier == version):
            self.earlier[index] = NO_VERSION
            self.earlier_duels[index] = self._new_duel()
        if self.challenger != version:
            return []
        self._rest()
        return [self._decision(DecisionKind.FORGOTTEN, {"version": version})]

    def dismissed(self) -> LoopDecision:
        """Tell that the proposal was declined; after a cool-down the loop goes on.

        Raises
        ------
        ValueError
            Nothing was proposed.
        """
        self._expect(Phase.PROPOSED, "nothing was proposed")
        version = int(self.numbers[CHALLENGER])
        if version in self.earlier:
            self.earlier_duels = self._new_duels()
        self._rest()
        return self._decision(DecisionKind.DISMISSED, {"version": version})

    def _rest(self) -> None:
        self.numbers[[PHASE, CHALLENGER]] = Phase.WATCHING, NO_VERSION
        self.numbers[QUIET_UNTIL] = self.seen + COOL_DOWN

    def _expect(self, phase: Phase, message: str) -> None:
        if self.phase is not phase:
            raise ValueError(f"{message}: the loop is in the phase {self.phase.name.lower()}")

    def _decision(self, kind: DecisionKind, evidence: Mapping[str, Any]) -> LoopDecision:
        return LoopDecision(kind, self.seen, self.champion, evidence)


def _winner_of(duel: Duel) -> Winner:
    """Return who won, unless the labels since cost it the lead: the sentence names the mean gain of all."""
    leads = duel.gain > 0 if duel.winner is Winner.CHALLENGER else duel.gain < 0
    return duel.winner if leads else Winner.UNDECIDED


def _evidence(duel: Duel, version: int) -> dict[str, Any]:
    return {"version": version, "labels": duel.count, "gain": duel.gain, "alpha": duel.alpha}
