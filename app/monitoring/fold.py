"""The state of the monitor: a fold over the feedback log, without HTTP, database or clock.

Labels go to the metrics and to the refit loop, which tests the active calibrator and compares others with it.
Predictions go to the expected accuracy and the drift test.

What the monitor shows: its numbers as a JSON document, and one sentence that says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from boxcal.app.monitoring.records import NONE, Array
from boxcal.calibrators.monitoring.calibration_test import MATERIAL_ALPHA, STRICT_ALPHA
from boxcal.calibrators.monitoring.decisions import DecisionKind, LoopDecision, Phase, sentence_of
from boxcal.calibrators.monitoring.drift import DriftTest, TrafficSample
from boxcal.calibrators.monitoring.metrics import Accuracy, AccuracyEstimate, RunningMetrics
from boxcal.calibrators.monitoring.refit_loop import FEWEST_LABELS, RefitLoop
from boxcal.calibrators.monitoring.state import StatefulFold
from boxcal.calibrators.monitoring.stored_logits import unpack

WINDOW = 5000
"""The expected accuracy is of the last 5,000 to 10,000 predictions."""
NEVER = 2**62
NUMBERS_AT_ONCE = 2**15
"""Logits of predictions that are calibrated together: what is made of them stays in the processor's cache."""

Matrix = NDArray[np.float64]
Calibrate = Callable[[int, Matrix], Matrix]


@dataclass(frozen=True, slots=True, eq=False)
class ActiveVersion:
    """A calibrator as the monitor tests it."""

    version: int
    method: str
    activation: int  # Number of the activation that made it active
    # (K,) its mean answer to the data that it was fitted to; None where it is not known
    class_prior: Matrix | None
    validation_gap: float  # Accuracy less mean confidence on those data
    reads_logits: bool  # Whether its answers follow from logits; the monitor can test no other


class MonitorFold(StatefulFold):
    """Folds the entries of the log.

    `calibrate`: gives the probabilities (N, K) of a version for logits (N, K), without request bounds; the
    answer to a row must not depend on the other rows. `began_at`: when the change that the test sees began,
    in seconds since 1970.
    """

    def __init__(
        self, num_classes: int, calibrate: Calibrate, active: ActiveVersion, *, refits: bool
    ) -> None:
        self.num_classes = num_classes
        self._calibrate = calibrate
        self._refits = refits
        self.active = active
        self.seq = self.refit_seq = 0
        self.loop = RefitLoop(
            num_classes,
            calibrate,
            version=active.version,
            class_prior=active.class_prior,
            fewest_labels=FEWEST_LABELS if refits else NEVER,
        )
        self.sample = TrafficSample()
        self.acknowledged_at: str | None = None
        self._begin()

    def _begin(self) -> None:
        """Forget what was learned about the calibrator before."""
        self.metrics = RunningMetrics(self.num_classes)
        self.accuracies = [Accuracy(self.active.validation_gap) for _ in range(2)]
        self.drift = DriftTest(np.empty(0))
        self.skipped = 0
        self.began_at: float | None = None

    def fold(self, entries: Array) -> list[LoopDecision]:
        """Fold entries in the order of the log; returns what the loop decided."""
        decisions: list[LoopDecision] = []
        are_labels = entries["label"] != NONE
        for some in np.split(entries, np.flatnonzero(np.diff(are_labels)) + 1):
            tested = some[(some["version"] == NONE) | (some["version"] == self.active.version)]
            self.skipped += len(some) - len(tested)
            if not len(tested) or not self.active.reads_logits:
                continue
            if tested["label"][0] == NONE:
                self._predictions(tested)
            else:
                decisions += self._labels(tested)
        if len(entries):
            self.seq = int(entries["seq"][-1])
        return decisions

    def _predictions(self, entries: Array) -> None:
        chosen = entries[self.sample.choose(entries["seq"], entries["moment"])]
        step = max(1, NUMBERS_AT_ONCE // self.num_classes)
        for start in range(0, len(chosen), step):
            logits = unpack(chosen["logits"][start : start + step])
            self._add_confidences(self.loop.test.observe(self._calibrate(self.active.version, logits)))

    def _labels(self, entries: Array) -> list[LoopDecision]:
        logits, labels = unpack(entries["logits"]), entries["label"]
        before = self.loop.seen
        decisions = self.loop.update(logits, labels)
        if (request := self.loop.request) is not None and before < request.last:
            self.refit_seq = int(entries["seq"][request.last - before - 1])
        since = self.loop.test.diagnosis().since
        if not since:
            self.began_at = None
        elif since <= len(entries):
            self.began_at = float(entries["moment"][-since])
        rows = self._calibrate(self.active.version, logits)
        self.metrics.update(rows, labels)
        confidences, right = rows.max(1), rows.argmax(1) == labels
        self._add_confidences(confidences[entries["is_prediction"]])
        self.accuracies[0].labelled(confidences, right, entries["propensity"])
        return decisions

    def _add_confidences(self, confidences: Matrix) -> None:
        if not len(confidences):
            return
        self.drift.update(confidences)
        if self.accuracies[0].sums[0] >= WINDOW:
            self.accuracies = [Accuracy(self.active.validation_gap), self.accuracies[0]]
        self.accuracies[0].predicted(confidences)

    def activated(self, active: ActiveVersion) -> LoopDecision:
        """Go on with another active calibrator."""
        before, self.active = self.active, active
        decision = self.loop.activated(active.version, active.class_prior)
        if not self._refits:
            for version in self.loop.earlier_versions:
                self.loop.forget(version)
        if not before.reads_logits:
            self.loop.forget(before.version)
        self.acknowledged_at = None
        self._begin()
        return decision

    def acknowledge(self, now: str) -> list[LoopDecision]:
        """Begin the test anew and decline what was proposed; metrics stay."""
        decisions = [self.loop.dismissed()] if self.loop.phase is Phase.PROPOSED else []
        self.loop.begin_test(self.active.class_prior)
        self.acknowledged_at, self.began_at = now, None
        return decisions

    def expected_accuracy(self) -> AccuracyEstimate | None:
        """Estimate the share of right answers among the recent ones."""
        both = Accuracy(self.active.validation_gap)
        both.sums = self.accuracies[0].sums + self.accuracies[1].sums
        return both.result()

    @property
    def refit_in(self) -> int | None:
        """How many labels the next refit waits for; None if none is to come."""
        return self.loop.labels_to_refit if self._refits else None

    def to_bytes(self) -> bytes:
        """Write the whole state; `from_bytes` continues to the last bit."""
        arrays, active = self.state_dict(), asdict(self.active)
        arrays["prior"] = np.array([]) if self.active.class_prior is None else self.active.class_prior
        facts = {name: getattr(self, name) for name in _FACTS} | {"active": active | {"class_prior": None}}
        arrays["facts"] = np.frombuffer(orjson.dumps(facts), np.uint8)
        return save({name: np.asarray(array, order="C") for name, array in arrays.items()})

    @classmethod
    def from_bytes(cls, data: bytes, num_classes: int, calibrate: Calibrate, *, refits: bool) -> MonitorFold:
        """Read what `to_bytes` wrote; ValueError where it is damaged, or another release's."""
        try:
            # Those that `load` returns are read-only.
            arrays = {name: array.copy() for name, array in load(data).items()}
            facts, prior = orjson.loads(arrays.pop("facts").tobytes()), arrays.pop("prior")
            active = ActiveVersion(**facts.pop("active") | {"class_prior": prior if len(prior) else None})
            fold = cls(num_classes, calibrate, active, refits=refits)
            for name, value in facts.items():
                setattr(fold, name, value)
            fold.load_state_dict(arrays)
        except (SafetensorError, ValueError, LookupError, TypeError) as error:
            raise ValueError(f"The state of the monitor cannot be read: {error}") from error
        return fold

    def _parts(self) -> dict[str, StatefulFold]:
        return {
            "loop": self.loop,
            "metrics": self.metrics,
            "drift": self.drift,
            "sample": self.sample,
            **{f"accuracy{n}": one for n, one in enumerate(self.accuracies)},
        }


_FACTS = ("seq", "refit_seq", "skipped", "began_at", "acknowledged_at")


FEW_LABELS = 50
"""Below, a test without an alarm means little."""


def document_of(fold: MonitorFold, classes: Sequence[str]) -> dict[str, Any]:
    """Describe the calibrator, its alarms and its metrics; `classes` are the K class names."""
    test, accuracy, metrics = fold.loop.test, fold.expected_accuracy(), fold.metrics.result()
    diagnosis, history = test.diagnosis(), test.history.points()
    alarms = {
        name: {
            "alarm": raised,
            "log_evidence": _finite(now),
            "largest_log_evidence": _finite(largest),
            "threshold": -math.log(alpha),
            "alpha": alpha,
        }
        for name, raised, now, largest, alpha in zip(
            ("strict", "material"), test.alarms, test.log_evidence, test.largest.tolist(),
            (STRICT_ALPHA, MATERIAL_ALPHA), strict=True,
        )
    }  # fmt: skip
    return {
        "seq": fold.seq,
        "calibrator": {"version": fold.active.version, "method": fold.active.method},
        "validation_gap": fold.active.validation_gap,
        "labels": test.count,
        "skipped": fold.skipped,
        "alarms": alarms,
        "evidence": {
            "labels": [int(count) for count in history[:, 0]],
            "strict": [_finite(round(value, 3)) for value in history[:, 1].tolist()],
            "material": [_finite(round(value, 3)) for value in history[:, 2].tolist()],
        },
        "diagnosis": {
            **asdict(diagnosis),
            "classes": [classes[k] for k in diagnosis.classes],
            "began_at": fold.began_at,
        },
        "metrics": {name: _finite(value) for name, value in asdict(metrics).items()},
        "expected_accuracy": None if accuracy is None else asdict(accuracy),
        "drift": {"alarm": fold.drift.alarm, "log_evidence": _finite(fold.drift.log_evidence)},
        "phase": fold.loop.phase.name.lower(),
        "challenger": fold.loop.challenger,
        "refit_in": fold.refit_in,
        "acknowledged_at": fold.acknowledged_at,
    }


def meaning_of(document: Mapping[str, Any]) -> str:
    """Say in one sentence what a document means: an alarm, none, or not enough labels."""
    labels = document.get("labels", 0)
    if not labels:
        return "No label has arrived since the test began: nothing is known about the calibration."
    version, diagnosis = document["calibrator"]["version"], document["diagnosis"]
    for test, kind in (("material", DecisionKind.MATERIAL_ALARM), ("strict", DecisionKind.ALARM)):
        alarm = document["alarms"][test]
        if alarm["alarm"]:
            evidence = {
                "diagnosis": diagnosis["kind"],
                "labels_since_change": diagnosis["since"],
                "recoverable_nll": diagnosis["recoverable_nll"],
                "log_evidence": alarm["largest_log_evidence"],
            }
            return sentence_of(kind, version, evidence)
    if labels < FEW_LABELS:
        return f"There are not enough labels: {labels} show no change of version {version}."
    return f"Version {version} is calibrated as far as {labels:,} labels show."


def _finite(value: float) -> float | None:
    """Return a number that JSON can hold."""
    return value if math.isfinite(value) else None
