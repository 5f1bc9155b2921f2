"""False alarms without a change, and delays after one, beside other tests and detectors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import ndtri

from benchmarks.monitoring.streams import (
    Answers,
    Array,
    Draw,
    calm,
    generator,
    harder,
    sharpened,
    shifted,
)
from boxcal.calibrators.monitoring.bettors import FLOORS, POWERS
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from boxcal.calibrators.monitoring.drift import DriftTest

Record = dict[str, float]

LABELS = 10_000
"""Of a stream without a change; calm labels before a change where the table says so."""

LEVELS = (0.05, 0.01)
REFERENCE = 5_000
"""Validation confidences that the drift test starts from."""

UNLABELLED = 9
"""Rows without a label for each labelled one, where the table says so."""

LONGEST = 6_000
COMPARED = 100
"""Streams on which river's detectors run, which take longest."""

MOST_CLASSES_HARDER = 100
"""Harder inputs are drawn up to so many classes."""

CHANGES: Mapping[str, Draw] = {
    "T 1.25": sharpened(1.25),
    "T 1.5": sharpened(1.5),
    "T 2": sharpened(2.0),
    "label shift": shifted,
}


def null(answers: Answers, index: int) -> Record:
    """Give the largest log E of one stream without a change, and which other tests raise an alarm."""
    record: Record = {}
    for title, stream in (("calm", calm), ("harder", harder)):
        if title == "harder" and answers.size > MOST_CLASSES_HARDER:
            continue
        random = generator(1, index)
        drawn = stream(answers, LABELS, random)
        rows = answers.law[drawn.index]
        test = CalibrationTest(answers.size, answers.prior)
        record[f"{title} log E"] = float(test.update(rows, drawn.labels)[:, 0].max())
        z = z_scores(rows, drawn.labels)
        for level in LEVELS:
            record[f"{title} z-test {level}"] = float((z > -ndtri(level / 2.0)).any())
        drift = DriftTest(answers.law[calm(answers, REFERENCE, random).index].max(1))
        drift.update(rows.max(1))
        record[f"{title} drift test"] = float(drift.alarm)
        if index < COMPARED:
            for name, delay in detectors(rows, drawn.labels, 0).items():
                record[f"{title} {name}"] = float(np.isfinite(delay))
    return record


def null_summary(records: list[Record]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for key in records[0]:
        title, _, name = key.partition(" ")
        values = np.array([record[key] for record in records if key in record])
        if name == "log E":
            for level in LEVELS:
                summary[f"{title}, this test {level}"] = float((values >= -math.log(level)).mean())
        else:
            summary[f"{title}, {name}"] = float(values.mean())
    return summary


def delays(answers: Answers, index: int) -> Record:
    """Give the labels from a change to the alarm at .05 of one stream for each change."""
    record: Record = {}
    for title, stream in CHANGES.items():
        random = generator(2, index)
        drawn = stream(answers, LONGEST, random)
        before = calm(answers, LABELS, random)
        whole = before.then(drawn)
        rows, labels = answers.law[whole.index], whole.labels
        changed = rows[LABELS:], drawn.labels
        record[f"{title}, this test"] = first_alarm(_evidence(answers, *changed))
        record[f"{title}, this test, after calm"] = first_alarm(_evidence(answers, rows, labels)[LABELS:])
        record[f"{title}, product, after calm"] = first_alarm(product(rows, labels)[LABELS:])
        z = np.flatnonzero(z_scores(*changed) > -ndtri(0.025))
        record[f"{title}, z-test"] = float(100 * (z[0] + 1)) if len(z) else math.inf
        if index < COMPARED:
            for name, found in detectors(rows, labels, LABELS).items():
                record[f"{title}, {name}, after calm"] = found
        if stream is shifted:
            more = stream(answers, 3_000 * (1 + UNLABELLED), random)
            record[f"{title}, this test, unlabelled"] = _with_unlabelled(
                answers, answers.law[more.index], more.labels
            )
    return record


def delay_summary(records: list[Record]) -> dict[str, Any]:
    """Give the medians, and how often a detector raised an alarm before the change."""
    summary = {}
    for key in dict.fromkeys(key for record in records for key in record):
        values = np.array([record[key] for record in records if key in record])
        if (values < 0).any():
            summary[f"{key}: alarm before the change"] = float((values < 0).mean())
        summary[key] = float(np.median(values[values >= 0])) if (values >= 0).any() else math.nan
    return summary


def _evidence(answers: Answers, rows: Array, labels: Array) -> Array:
    evidence: Array = CalibrationTest(answers.size, answers.prior).update(rows, labels)[:, 0]
    return evidence


def first_alarm(evidence: Array, alpha: float = 0.05) -> float:
    """Give the number of labels to the alarm; infinite without one."""
    hits = np.flatnonzero(evidence >= -math.log(alpha))
    return float(hits[0] + 1) if len(hits) else math.inf


def _with_unlabelled(answers: Answers, rows: Array, labels: Array) -> float:
    test, step = CalibrationTest(answers.size, answers.prior), 1 + UNLABELLED
    for label, first in enumerate(range(0, len(labels), step)):
        test.observe(rows[first : first + UNLABELLED])
        own = slice(first + UNLABELLED, first + step)
        if test.update(rows[own], labels[own])[0, 0] >= -math.log(0.05):
            return label + 1.0
    return math.inf


def z_scores(rows: Array, labels: Array) -> Array:
    """Give the z-scores of mean confidence less accuracy after every 100 labels."""
    confidence = rows.max(1)
    gap = np.cumsum(confidence - (rows.argmax(1) == labels))
    variance = np.cumsum(confidence * (1.0 - confidence))
    at = np.arange(99, len(labels), 100)
    z: Array = np.abs(gap[at]) / np.sqrt(variance[at])
    return z


def product(rows: Array, labels: Array) -> Array:
    """Give log E of the plain mixture of products: fixed bettors, no mixture over start times."""
    p = np.maximum(rows, 1e-300)
    own = p[np.arange(len(labels)), labels]
    powers = [own ** (e / 8 - 1) / (p ** (e / 8)).sum(1) for e in POWERS]
    floors = [(1 - share) + share / (rows.shape[1] * own) for share in FLOORS]
    gains = np.log(np.minimum([np.ones(len(labels)), *powers, *floors], 10.0)).cumsum(1)
    shares = np.array([0.5, *[0.4 / len(POWERS)] * len(POWERS), *[0.1 / len(FLOORS)] * len(FLOORS)])
    evidence: Array = np.logaddexp.reduce(gains + np.log(shares)[:, None], axis=0)
    return evidence


def detectors(rows: Array, labels: Array, change: int) -> Record:
    """Give the delay of river's ADWIN and Page-Hinkley on the error and on the NLL; {} without river.

    They run over the whole stream; an alarm before the change ends them, without a detection.
    """
    try:
        from river import drift  # noqa: PLC0415 - optional: `pip install river`
    except ImportError:
        return {}
    nll = -np.log(np.maximum(rows[np.arange(len(labels)), labels], 1e-6))
    series = {"error": (rows.argmax(1) != labels).astype(float), "NLL": nll}
    found = {}
    for name, kind in (("ADWIN", drift.ADWIN), ("Page-Hinkley", drift.PageHinkley)):
        for title, values in series.items():
            detector = kind()
            found[f"{name} on {title}"] = _detection(detector, values.tolist(), change)
    return found


def _detection(detector: Any, values: list[float], change: int) -> float:
    for count, value in enumerate(values):
        detector.update(value)
        if detector.drift_detected:
            return float(count + 1 - change) if count >= change else -1.0
    return math.inf
