"""What the monitor keeps in mind: a fold over the feedback log, without HTTP, database or clock.

Labels go to the metrics and to the refit loop, which tests the active calibrator and compares others with it.
Predictions go to the expected accuracy and the drift test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from boxcal.app.monitoring.history import EvidenceHistory
from boxcal.app.monitoring.records import NONE, Entries
from boxcal.calibrators.monitoring.accuracy import Accuracy, ExpectedAccuracy
from boxcal.calibrators.monitoring.calibration_test import MATERIAL_ALPHA, STRICT_ALPHA
from boxcal.calibrators.monitoring.decisions import Decision, Phase
from boxcal.calibrators.monitoring.drift import DriftTest
from boxcal.calibrators.monitoring.metrics import Metrics
from boxcal.calibrators.monitoring.refit_loop import FEWEST_LABELS, RefitLoop
from boxcal.calibrators.monitoring.state import Fold, load_states, states
from boxcal.calibrators.monitoring.stored_logits import unpack
from boxcal.calibrators.monitoring.traffic_sample import TrafficSample

WINDOW = 5000
"""The expected accuracy is of the last 5,000 to 10,000 predictions."""
NEVER = 2**62
NUMBERS_AT_ONCE = 2**15
"""Logits of predictions that are calibrated together: what is made of them stays in the processor's cache."""

Rows = NDArray[np.float64]
Calibrate = Callable[[int, Rows], Rows]


@dataclass(frozen=True, slots=True, eq=False)
class ActiveVersion:
    """A calibrator as the monitor tests it.

    Attributes
    ----------
    activation
        Number of the activation that made it active.
    class_prior
        (K,) its mean answer to the data that it was fitted to; None where it is not known.
    validation_gap
        Accuracy less mean confidence on those data.
    reads_logits
        Whether its answers follow from logits; the monitor can test no other.
    """

    version: int
    method: str
    activation: int
    class_prior: Rows | None
    validation_gap: float
    reads_logits: bool


class MonitorFold:
    """Folds the entries of the log.

    Parameters
    ----------
    num_classes
        K.
    calibrate
        Gives the probabilities (N, K) of a version for logits (N, K), without request bounds; the answer to a
        row must not depend on the other rows.
    active
        The active calibrator.
    refits
        Whether the loop asks for refits and for the return to earlier versions.

    Attributes
    ----------
    loop
        Tests, refits and rollbacks.
    history
        The evidence since the test began.
    refit_seq
        Place of the last label of the fit that the loop waits for.
    seq
        Place up to which the log is folded.
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
        self.history = EvidenceHistory()
        self.metrics = Metrics(self.num_classes)
        self.accuracies = [Accuracy(self.active.validation_gap) for _ in range(2)]
        self.drift = DriftTest(np.empty(0))
        self.skipped = 0
        self.began_at: float | None = None

    def fold(self, entries: Entries) -> list[Decision]:
        """Fold entries in the order of the log; returns what the loop decided."""
        decisions: list[Decision] = []
        are_labels = entries.labels != NONE
        ends = [*(np.flatnonzero(np.diff(are_labels)) + 1).tolist(), len(entries)]
        start = 0
        for end in ends:
            some, is_label = entries.take(slice(start, end)), bool(are_labels[start:end].any())
            start = end
            is_own = (some.versions == NONE) | (some.versions == self.active.version)
            own = some if is_own.all() else some.take(is_own)
            self.skipped += len(some) - len(own)
            if len(own) and self.active.reads_logits:
                decisions += self._labels(own) if is_label else self._predictions(own)
        if len(entries):
            self.seq = int(entries.seq[-1])
        return decisions

    def _predictions(self, entries: Entries) -> list[Decision]:
        chosen = self.sample.choose(entries.seq, entries.moments)
        if not chosen.all():
            entries = entries.take(chosen)
        step = max(1, NUMBERS_AT_ONCE // self.num_classes)
        for start in range(0, len(entries), step):
            logits = unpack(entries.logits[start : start + step])
            self._seen(self.loop.test.observe(self._calibrate(self.active.version, logits)))
        return []

    def _labels(self, entries: Entries) -> list[Decision]:
        decisions: list[Decision] = []
        for part in self.history.parts(len(entries), self.loop.test.count):
            decisions += self._labels_of(entries.take(part))
            self.history.note(self.loop.test.count, self.loop.test.log_evidence)
        return decisions

    def _labels_of(self, entries: Entries) -> list[Decision]:
        logits, labels = unpack(entries.logits), entries.labels
        before = self.loop.seen
        decisions = self.loop.update(logits, labels)
        if (request := self.loop.request) is not None and before < request.last:
            self.refit_seq = int(entries.seq[request.last - before - 1])
        since = self.loop.test.diagnosis().since
        if not since:
            self.began_at = None
        elif since <= len(entries):
            self.began_at = float(entries.moments[-since])
        rows = self._calibrate(self.active.version, logits)
        self.metrics.update(rows, labels)
        confidences = rows.max(1)
        self._seen(confidences[entries.are_predictions])
        self.accuracies[0].labelled(confidences, rows.argmax(1) == labels, entries.propensities)
        return decisions

    def _seen(self, confidences: Rows) -> None:
        if not len(confidences):
            return
        self.drift.update(confidences)
        if self.accuracies[0].sums[0] >= WINDOW:
            self.accuracies = [Accuracy(self.active.validation_gap), self.accuracies[0]]
        self.accuracies[0].predicted(confidences)

    # -- what others do --------------------------------------------------------------------------------------

    def activated(self, active: ActiveVersion) -> Decision:
        """Go on with another active calibrator."""
        before, self.active = self.active, active
        decision = self.loop.activated(active.version, active.class_prior)
        if not self._refits:
            for version in self.loop.earlier_versions:
                self.loop.forget(version)
        if not before.reads_logits:
            self.forget(before.version)
        self.acknowledged_at = None
        self._begin()
        return decision

    def acknowledge(self, now: str) -> list[Decision]:
        """Begin the test anew and decline what was proposed; metrics stay."""
        decisions = [self.loop.dismissed()] if self.loop.phase is Phase.PROPOSED else []
        self.loop.begin_test(self.active.class_prior)
        self.acknowledged_at, self.began_at = now, None
        self.history = EvidenceHistory()
        return decisions

    def versions(self) -> set[int]:
        """Return the versions, besides the active one, whose answers are needed."""
        return set(self.loop.earlier_versions)

    def forget(self, version: int) -> None:
        """Stop comparing with a version whose artifact was deleted."""
        self.loop.forget(version)

    # -- what it shows ---------------------------------------------------------------------------------------

    def expected_accuracy(self) -> ExpectedAccuracy | None:
        """Estimate the share of right answers among the recent ones."""
        both = Accuracy(self.active.validation_gap)
        both.sums = self.accuracies[0].sums + self.accuracies[1].sums
        return both.result()

    def document(self, classes: Sequence[str]) -> dict[str, Any]:
        """Describe the calibrator, its alarms and its metrics as a JSON document."""
        test, accuracy, metrics = self.loop.test, self.expected_accuracy(), self.metrics.result()
        diagnosis = test.diagnosis()
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
            "seq": self.seq,
            "calibrator": {"version": self.active.version, "method": self.active.method},
            "validation_gap": self.active.validation_gap,
            "labels": test.count,
            "skipped": self.skipped,
            "alarms": alarms,
            "evidence": self.history.document(),
            "diagnosis": {
                **asdict(diagnosis),
                "classes": [classes[k] for k in diagnosis.classes],
                "began_at": self.began_at,
            },
            "metrics": {name: _finite(value) for name, value in asdict(metrics).items()},
            "expected_accuracy": None if accuracy is None else asdict(accuracy),
            "drift": {"alarm": self.drift.alarm, "log_evidence": _finite(self.drift.log_evidence)},
            "phase": self.loop.phase.name.lower(),
            "challenger": self.loop.challenger,
            "acknowledged_at": self.acknowledged_at,
        }

    # -- its state -------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Write the whole state; `from_bytes` continues to the last bit."""
        arrays = states(self._parts())
        active = asdict(self.active)
        prior = active.pop("class_prior")
        if prior is not None:
            arrays["class_prior"] = prior
        facts = {
            "active": active,
            "seq": self.seq,
            "refit_seq": self.refit_seq,
            "skipped": self.skipped,
            "history_step": self.history.step,
            "began_at": self.began_at,
            "acknowledged_at": self.acknowledged_at,
        }
        arrays["history"] = self.history.array()
        arrays["facts"] = np.frombuffer(orjson.dumps(facts), np.uint8)
        return save({name: np.asarray(array, order="C") for name, array in arrays.items()})

    @classmethod
    def from_bytes(cls, data: bytes, num_classes: int, calibrate: Calibrate, *, refits: bool) -> MonitorFold:
        """Read what `to_bytes` wrote.

        Raises
        ------
        ValueError
            It is of another number of classes, or damaged.
        """
        try:
            # Those that `load` returns are read-only.
            arrays = {name: array.copy() for name, array in load(data).items()}
        except SafetensorError as error:
            raise ValueError(f"The state of the monitor cannot be read: {error}") from error
        facts = orjson.loads(arrays["facts"].tobytes())
        active = ActiveVersion(class_prior=arrays.get("class_prior"), **facts["active"])
        fold = cls(num_classes, calibrate, active, refits=refits)
        fold.seq, fold.refit_seq, fold.skipped = facts["seq"], facts["refit_seq"], facts["skipped"]
        fold.began_at, fold.acknowledged_at = facts["began_at"], facts["acknowledged_at"]
        fold.history = EvidenceHistory(arrays["history"], facts["history_step"])
        load_states(fold._parts(), arrays)
        return fold

    def _parts(self) -> dict[str, Fold]:
        return {
            "loop": self.loop,
            "metrics": self.metrics,
            "drift": self.drift,
            "sample": self.sample,
            **{f"accuracy{n}": one for n, one in enumerate(self.accuracies)},
        }


def _finite(value: float) -> float | None:
    """Return a number that JSON can hold."""
    return value if math.isfinite(value) else None
