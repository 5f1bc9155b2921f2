"""The test that calibration still holds: anytime-valid, with a diagnosis and the start of the change.

One mixture over bettors gives each label a gain, `D = log sum_j v_j min(q_j(y) / p(y), 10)`. A mixture over
start times adds them up to log E. While the probabilities are the law of the labels, E exceeds 1/alpha with a
probability of at most alpha, ever (Ville's inequality; Ramdas et al., "Game-theoretic statistics and safe
anytime-valid inference", 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from boxcal.calibrators.monitoring import bettors
from boxcal.calibrators.monitoring.bettors import (
    BETTORS,
    BIASES,
    BIASES_AND_TEMPERATURE,
    BINS,
    CLASS_PRIOR,
    CONFIDENCE_BIN,
    FIRST_FLOOR,
    FLOORS,
    MATERIAL,
    NO_CHANGE,
    POWERS,
    PREDICTED_CLASS,
    RUN,
    RUN_COUNT,
    RUN_DRIFT,
    SEEN,
    STRICT,
    TAIL,
    TOP_LABEL,
)
from boxcal.calibrators.monitoring.class_prior import SMALLEST_FREQUENCY
from boxcal.calibrators.monitoring.state import Array, StatefulFold, check_rows

STRICT_ALPHA = 0.01
MATERIAL_ALPHA = 0.05
TOLERANCE = 0.005
"""Recoverable NLL in nats a label below which the material test stays silent."""

HISTORY_STEP = 50
HISTORY_POINTS = 128
NAMED_CLASSES = 5
OVERCONFIDENT = {1 + j for j, eighths in enumerate(POWERS) if eighths < 8} | set(range(FIRST_FLOOR, BIASES))
"""The tempered and floor bettors that gain where the answers are too confident."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What changed, by the bettor that gained most in the present run.

    Attributes
    ----------
    kind
        `overconfident`, `underconfident`, `label_shift` (class frequencies), `class_bias` (some classes are
        too probable or too improbable), `classes` (where one of them is predicted), `confidence_range` or
        `none`.
    classes
        Indices of the classes that changed most, most changed first; empty unless `kind` names classes.
    confidence
        The range of confidence that changed most; None unless `kind` is `confidence_range`.
    since
        How many labels ago the change began; 0 where nothing changed.
    recoverable_nll
        Nats a label that a recalibration recovers, on average since the change began.
    recoverable_nll_lower
        A lower bound on it at the level `STRICT_ALPHA`; 0 where there is none.
    """

    kind: str
    classes: tuple[int, ...]
    confidence: tuple[float, float] | None
    since: int
    recoverable_nll: float
    recoverable_nll_lower: float


class EvidenceHistory(StatefulFold):
    """Log E of both tests after every 50 labels; with 128 points every other one is dropped, and so on."""

    STATE: ClassVar[tuple[str, ...]] = ("kept", "progress")

    def __init__(self) -> None:
        self.kept = np.zeros((HISTORY_POINTS, 3))
        self.progress = np.array([HISTORY_STEP, 0])  # labels from point to point, and the number of points

    def add(self, before: int, evidence: Array) -> None:
        """Add log E (N, 2) after each of N labels, which follow `before` others."""
        first = HISTORY_STEP - 1 - before % HISTORY_STEP
        for n in range(first, len(evidence), HISTORY_STEP):
            step, size = self.progress
            if (before + n + 1) % step:
                continue
            self.kept[size] = before + n + 1, *evidence[n]
            self.progress[1] += 1
            if size + 1 == HISTORY_POINTS:
                self.kept[: HISTORY_POINTS // 2] = self.kept[1::2].copy()
                self.progress[:] = 2 * step, HISTORY_POINTS // 2

    def points(self) -> Array:
        """Return (n, 3): the number of labels, and log E of the strict and of the material test."""
        return self.kept[: self.progress[1]]


class CalibrationTest(StatefulFold):
    """Tests p = law of the label, on labels in prediction order.

    Parameters
    ----------
    num_classes
        K.
    class_prior
        (K,) mean answer of the calibrator to the data that it was fitted to; uniform unless given. Only the
        bettor on label shift reads it.
    tolerance
        Of the material test, in nats.
    """

    STATE: ClassVar[tuple[str, ...]] = (
        "weights", "by_class", "few", "bins", "progress", "gains", "largest", "class_prior",
    )  # fmt: skip

    def __init__(
        self, num_classes: int, class_prior: Array | None = None, *, tolerance: float = TOLERANCE
    ) -> None:
        self.num_classes = num_classes
        self.tolerance = tolerance
        frequencies = np.ones(num_classes) if class_prior is None else np.asarray(class_prior)
        if frequencies.shape != (num_classes,) or not (frequencies >= 0).all() or frequencies.sum() <= 0:
            raise ValueError(f"{num_classes} classes need as many prior probabilities of at least 0")
        self.class_prior = np.maximum(frequencies / frequencies.sum(), SMALLEST_FREQUENCY)
        self.weights = prior_shares()
        self.by_class = np.zeros((7, num_classes))
        self.few = np.zeros(7)
        self.bins = np.zeros((2, BINS))
        self.progress = np.zeros(7)
        self.progress[[STRICT, MATERIAL]] = -math.inf
        self.progress[TAIL] = 1.0
        self.gains = np.zeros(BETTORS)
        self.largest = np.zeros(2)
        self.history = EvidenceHistory()

    def _parts(self) -> dict[str, StatefulFold]:
        return {"history": self.history}

    def update(self, probabilities: Array, labels: Array) -> Array:
        """Bet on (N,) labels of rows (N, K) without request bounds, in prediction order.

        Returns
        -------
        ndarray
            (N, 2) log E of the strict and of the material test after each label.
        """
        rows, truth = check_rows(probabilities, labels, self.num_classes)
        before, evidence = self.count, np.empty((len(truth), 2))
        bettors.fold(
            rows, truth, prior_shares(), self.class_prior, self.weights, self.by_class, self.few,
            self.bins, self.tolerance, self.progress, self.gains, evidence,
        )  # fmt: skip
        np.maximum(self.largest, evidence.max(0, initial=0.0), out=self.largest)
        self.history.add(before, evidence)
        return evidence

    def observe(self, probabilities: Array) -> Array:
        """Show rows (N, K) whose labels are unknown or to come, at their place in the order of predictions.

        Only the bettor on label shift learns from them; the test stays valid.

        Returns
        -------
        ndarray
            (N,) the largest probability of each row.
        """
        rows, _ = check_rows(probabilities, np.zeros(len(probabilities), np.int64), self.num_classes)
        confidences = np.empty(len(rows))
        traffic = self.by_class[bettors.TRAFFIC_COUNT]
        bettors.observe(rows, self.class_prior, traffic, self.progress, confidences)
        return confidences

    @property
    def count(self) -> int:
        return int(self.progress[SEEN])

    @property
    def log_evidence(self) -> tuple[float, float]:
        """Log E now, of the strict and of the material test."""
        tail = math.log(self.progress[TAIL])
        strict, material = self.progress[[STRICT, MATERIAL]]
        return float(np.logaddexp(strict, tail)), float(np.logaddexp(material, tail))

    @property
    def alarms(self) -> tuple[bool, bool]:
        """Whether log E of the strict and of the material test has ever reached log(1/alpha)."""
        strict, material = self.largest
        return bool(strict >= -math.log(STRICT_ALPHA)), bool(material >= -math.log(MATERIAL_ALPHA))

    def diagnosis(self) -> Diagnosis:
        """Say what changed, since when, and what a recalibration would recover."""
        since = int(self.progress[RUN_COUNT])
        winner = int(np.argmax(self.gains)) if since else NO_CHANGE
        if winner == NO_CHANGE:
            return Diagnosis("none", (), None, 0, 0.0, 0.0)
        kind, classes, confidence = self._describe(winner)
        # A start at one label has the prior mass that the tail loses there; Ville's inequality holds for each
        # tolerance, so the largest one that is rejected is a lower bound.
        began = self.count - since
        mass = math.log(2) / math.log(2 + began) - math.log(2) / math.log(3 + began)
        run = float(self.progress[RUN]) + RUN_DRIFT * since
        lower = (run + math.log(mass) + math.log(STRICT_ALPHA)) / since
        return Diagnosis(kind, classes, confidence, since, run / since, max(0.0, lower))

    def _describe(self, winner: int) -> tuple[str, tuple[int, ...], tuple[float, float] | None]:
        """Say what it means that a bettor gained most: the kind, the classes and the range of confidence."""
        if winner < BIASES or winner == TOP_LABEL:
            over = winner in OVERCONFIDENT
            if winner == TOP_LABEL:
                over = self.few[bettors.TOP_SLOPE] < 0 or self.few[bettors.TOP_OFFSET] < 0
            return ("overconfident" if over else "underconfident"), (), None
        if winner == CONFIDENCE_BIN:
            edges = (0.0, *bettors.BIN_EDGES, 1.0)
            offsets, curvatures = self.bins
            changed = int(np.argmax(np.abs(offsets) * np.sqrt(curvatures)))
            return "confidence_range", (), (edges[changed], edges[changed + 1])
        if winner == CLASS_PRIOR:
            counts = self.by_class[bettors.TRAFFIC_COUNT]
            changes = counts - counts.sum() * self.class_prior
        else:
            learned, curvature = {
                BIASES: (bettors.BIAS, bettors.BIAS_CURVATURE),
                BIASES_AND_TEMPERATURE: (bettors.JOINT_BIAS, bettors.JOINT_CURVATURE),
                PREDICTED_CLASS: (bettors.CLASS_OFFSET, bettors.CLASS_CURVATURE),
            }[winner]
            changes = self.by_class[learned] * np.sqrt(self.by_class[curvature])
        kind = {CLASS_PRIOR: "label_shift", PREDICTED_CLASS: "classes"}.get(winner, "class_bias")
        return kind, _largest_of(changes), None


def _largest_of(changes: Array) -> tuple[int, ...]:
    return tuple(int(k) for k in np.argsort(-np.abs(changes))[:NAMED_CLASSES])


def prior_shares() -> Array:
    """Return the bettors' prior weights (BETTORS,): one half on no change."""
    shares = np.empty(BETTORS)
    shares[NO_CHANGE] = 0.5
    shares[1:FIRST_FLOOR] = 0.225 / len(POWERS)
    shares[FIRST_FLOOR:BIASES] = 0.04 / len(FLOORS)
    shares[[BIASES, BIASES_AND_TEMPERATURE, TOP_LABEL, PREDICTED_CLASS, CONFIDENCE_BIN, CLASS_PRIOR]] = (
        0.065, 0.03, 0.03, 0.03, 0.03, 0.05,
    )  # fmt: skip
    shares /= shares.sum()
    return shares
