"""What the monitor shows: its numbers as a JSON document, and one sentence that says what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from boxcal.app.monitoring.fold import MonitorFold
from boxcal.calibrators.monitoring.calibration_test import MATERIAL_ALPHA, STRICT_ALPHA
from boxcal.calibrators.monitoring.decisions import DecisionKind, sentence_of

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
