"""What selective, late, repeated and wrong labels do to the test; calibration is intact throughout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.monitoring.detection import Record
from benchmarks.monitoring.streams import Answers, Array, calm, generator
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest

LABELS = 10_000
MATURITY = 6_000
"""Predictions that follow one before its label is processed, in the case that waits."""

Feedback = Callable[[Array, Array, np.random.Generator], tuple[Array, Array]]
"""Gives which rows are reported, in the order of processing, and their labels."""


def everything(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Report every label at once."""
    del rows, random
    return np.arange(len(labels)), labels


def chosen_at_random(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Report half of the labels."""
    del rows
    index = np.flatnonzero(random.random(len(labels)) < 0.5)
    return index, labels[index]


def chosen_by_confidence(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Report all labels of answers below .9, and a tenth of the others."""
    index = np.flatnonzero((rows.max(1) < 0.9) | (random.random(len(labels)) < 0.1))
    return index, labels[index]


def chosen_by_class(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Report mostly the labels of two predicted classes."""
    index = np.flatnonzero((rows.argmax(1) < 2) | (random.random(len(labels)) < 0.2))
    return index, labels[index]


def errors_reported(if_wrong: float) -> Feedback:
    """Report right answers with probability .4 and wrong ones with another."""

    def reported(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
        wrong = rows.argmax(1) != labels
        index = np.flatnonzero(random.random(len(labels)) < np.where(wrong, if_wrong, 0.4))
        return index, labels[index]

    return reported


def _arrivals(rows: Array, labels: Array, random: np.random.Generator) -> Array:
    """Draw arrivals: a mean delay of 200 predictions where the answer was right, 2,000 where it was wrong."""
    wrong = rows.argmax(1) != labels
    arrivals: Array = np.arange(len(labels)) + random.exponential(np.where(wrong, 2_000.0, 200.0))
    return arrivals


def late_for_all(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Process in the order of arrival, after a mean delay of 500 predictions for all."""
    del rows
    index = np.argsort(np.arange(len(labels)) + random.exponential(500.0, len(labels)))
    return index, labels[index]


def late_if_wrong(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Process in the order of arrival what arrives until the last prediction, wrong answers later."""
    arrivals = _arrivals(rows, labels, random)
    index = np.argsort(arrivals)
    index = index[arrivals[index] < len(labels)]
    return index, labels[index]


def late_but_mature(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
    """Process in the order of predictions those whose label arrived within the maturity."""
    arrivals = _arrivals(rows, labels, random)
    index = np.flatnonzero(arrivals - np.arange(len(labels)) < MATURITY)
    return index, labels[index]


def repeated(share: float) -> Feedback:
    """Count a share of the labels twice."""

    def reported(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
        del rows
        index = np.repeat(np.arange(len(labels)), 1 + (random.random(len(labels)) < share))
        return index, labels[index]

    return reported


def wrong(share: float) -> Feedback:
    """Replace a share of the labels by another class."""

    def reported(rows: Array, labels: Array, random: np.random.Generator) -> tuple[Array, Array]:
        size = rows.shape[1]
        changed = np.flatnonzero(random.random(len(labels)) < share)
        own = labels.copy()
        own[changed] = (own[changed] + random.integers(1, size, len(changed))) % size
        return np.arange(len(labels)), own

    return reported


CASES: Mapping[str, Feedback] = {
    "every label": everything,
    "half of the labels, at random": chosen_at_random,
    "mostly answers of low confidence": chosen_by_confidence,
    "mostly two predicted classes": chosen_by_class,
    "right answers with probability .4, wrong ones .5": errors_reported(0.5),
    "right answers with probability .4, wrong ones .8": errors_reported(0.8),
    "late by 500 on average": late_for_all,
    "late by 200 if right, by 2,000 if wrong": late_if_wrong,
    f"the same, processed after {MATURITY:,} predictions": late_but_mature,
    "5 % of the labels twice": repeated(0.05),
    "20 % of the labels twice": repeated(0.2),
    ".1 % of the labels wrong": wrong(0.001),
    ".5 % of the labels wrong": wrong(0.005),
}


def feedback(answers: Answers, index: int) -> Record:
    """Give the largest log E of one stream for every kind of feedback."""
    record: Record = {}
    for title, report in CASES.items():
        random = generator(9, index)
        stream = calm(answers, 2 * LABELS, random)
        rows = answers.law[stream.index]
        chosen, labels = report(rows, stream.labels, random)
        chosen, labels = chosen[:LABELS], labels[:LABELS]
        test = CalibrationTest(answers.size, answers.prior)
        record[title] = float(test.update(rows[chosen], labels)[:, 0].max())
    return record


def feedback_summary(records: list[Record]) -> dict[str, Any]:
    """Give the share of streams with a false alarm at .05."""
    return {title: float(np.mean([record[title] >= -np.log(0.05) for record in records])) for title in CASES}
