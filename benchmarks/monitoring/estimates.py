"""Intervals, prior adjustment, alarms on true labels, and the time of an update."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from benchmarks.monitoring.detection import LABELS, Record, first_alarm
from benchmarks.monitoring.streams import (
    Answers,
    Array,
    calm,
    generator,
    redefined,
    redefined_law,
    sharpened,
    shifted,
    tempered,
)
from boxcal.calibrators.monitoring.accuracy import Accuracy
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from boxcal.calibrators.monitoring.class_prior import estimate_class_prior
from boxcal.calibrators.monitoring.metrics import Metrics

WINDOW, LABELLED = 2_000, 200
PRIOR_ROWS = 1_000
PARTS_OF_TIME = 5


def intervals(answers: Answers, index: int) -> Record:
    """Say whether the intervals of one window cover, for intact calibration and two kinds of change."""
    record: Record = {}
    cases = {
        "calm": (calm, answers.law),
        "T 2": (sharpened(2.0), tempered(answers.law, 2.0)),
        "concept drift": (redefined, redefined_law(answers.law)),
    }
    for title, (draw, law) in cases.items():
        random = generator(6, index)
        stream = draw(answers, WINDOW, random)
        rows = answers.law[stream.index]
        confidence, right = rows.max(1), rows.argmax(1) == stream.labels
        accuracy = Accuracy()
        accuracy.predicted(confidence)
        chosen = random.permutation(WINDOW)[:LABELLED]
        accuracy.labelled(confidence[chosen], right[chosen])
        found = accuracy.result()
        truth = float(law[np.arange(len(law)), answers.law.argmax(1)].mean())
        if found is None or found.low is None or found.high is None:
            raise RuntimeError("no interval")
        record[f"{title}, accuracy"] = float(found.low <= truth <= found.high)
        record[f"{title}, width"] = found.high - found.low
        record[f"{title}, error of mean confidence"] = abs(float(confidence.mean()) - truth)
        metrics = Metrics(answers.size)
        metrics.update(rows, stream.labels)
        result = metrics.result()
        floored = (1.0 - 1e-4) * answers.law + 1e-4 / answers.size
        nll = float(-(law * np.log(floored)).sum(1).mean())
        record[f"{title}, NLL at all times"] = float(result.nll_low <= nll <= result.nll_high)
    return record


def means(records: list[Record]) -> dict[str, Any]:
    """Give the mean of every figure."""
    return {key: float(np.mean([record[key] for record in records])) for key in records[0]}


def prior(answers: Answers, index: int) -> Record:
    """Give the change of the expected NLL by a prior adjustment to 1,000 rows, and that of plain EM."""
    record: Record = {}
    source = answers.prior / answers.prior.sum()
    for title, draw in (("no shift", calm), ("label shift", shifted)):
        stream = draw(answers, 2 * PRIOR_ROWS, generator(7, index))
        rows = answers.law[stream.index]
        seen, later, law = rows[:PRIOR_ROWS], rows[PRIOR_ROWS:], stream.law[PRIOR_ROWS:]
        before = _nll(law, later)
        for name, count in (("prior adjustment", 5.0), ("plain EM", 1e-9)):
            target = estimate_class_prior(seen, source, pseudo_count=count)
            adjusted = later * (target / np.maximum(source, 1e-12))
            adjusted /= adjusted.sum(1, keepdims=True)
            record[f"{title}, {name}"] = _nll(law, adjusted) - before
        record[f"{title}, oracle"] = _nll(law, law) - before
    return record


def _nll(law: Array, rows: Array) -> float:
    return float(-(law * np.log(np.maximum(rows, 1e-300))).sum(1).mean())


def material(answers: Answers, _: int) -> Record:
    """Give the labels to both alarms on the true test labels, of `ts` and of the softmax."""
    record: Record = {}
    for title, rows in (("ts", answers.law), ("softmax", answers.raw)):
        test = CalibrationTest(answers.size, answers.prior)
        evidence = test.update(rows, answers.labels)
        record[f"{title}, strict"] = first_alarm(evidence[:, 0], 0.01)
        record[f"{title}, material"] = first_alarm(evidence[:, 1])
        record[f"{title}, labels"] = float(len(answers.labels))
    return record


def speed(answers: Answers, _: int) -> Record:
    """Give the microseconds of one label, least of five rounds."""
    stream = calm(answers, LABELS, generator(8, 0))
    rows, best = answers.law[stream.index], math.inf
    for _ in range(PARTS_OF_TIME):
        test = CalibrationTest(answers.size, answers.prior)
        start = time.perf_counter()
        test.update(rows, stream.labels)
        best = min(best, time.perf_counter() - start)
    return {"microseconds": best / LABELS * 1e6}
