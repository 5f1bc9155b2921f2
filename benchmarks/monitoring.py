"""False alarms, delays and intervals of the monitor on streams drawn from real answers.

    python -m benchmarks.monitoring DATA [--streams 200] [--only null delays material duels intervals speed]

DATA is a folder with a folder per data set, `NAME/val.npz` and `NAME/test.npz`. The active calibrator is
`ts`, fitted to `val.npz`; rows are drawn from the test split and labels from the law that the stream has: the
calibrator's own probabilities where calibration is intact.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.results import read
from boxcal.calibrators import fit
from boxcal.calibrators.monitoring.accuracy import Accuracy
from boxcal.calibrators.monitoring.calibration_test import CalibrationTest
from boxcal.calibrators.monitoring.drift import DriftTest
from boxcal.calibrators.monitoring.duel import Duel, Winner
from boxcal.calibrators.monitoring.metrics import Metrics

Array = np.ndarray[Any, Any]

NULL_LABELS = 10_000
CALM = 10_000
LEVELS = (0.05, 0.01)
DUEL_LABELS = 5_000
REFERENCE = 5_000
"""Validation confidences that the drift test starts from."""

UNLABELLED = 9
"""Rows without a label for each labelled one, where the table says so."""


@dataclass(frozen=True)
class Answers:
    """Calibrated and raw answers of one data set's test split, and what the validation split gave.

    `law` (N, K) are the answers of `ts`, `raw` (N, K) the softmax, `labels` (N,) the true ones, and
    `frequencies` (K,) the validation labels'.
    """

    name: str
    law: Array
    raw: Array
    labels: Array
    frequencies: Array

    @classmethod
    def of(cls, folder: Path) -> Answers:
        """Fit `ts` to the validation split and answer the test split."""
        validation, test = read(folder / "val.npz"), read(folder / "test.npz")
        calibrator = fit("ts", validation.scores, validation.labels).calibrator
        size = validation.num_classes
        return cls(
            folder.name,
            calibrator(test.scores).numpy(),
            test.scores.softmax(1).numpy(),
            test.labels.numpy(),
            np.bincount(validation.labels.numpy(), minlength=size).astype(float),
        )

    @property
    def size(self) -> int:
        """K."""
        return int(self.law.shape[1])


def drawn(law: Array, random: np.random.Generator) -> Array:
    """Draw one label from each row (N, K)."""
    labels: Array = (law.cumsum(1) > random.random((len(law), 1))).argmax(1)
    return labels


def tempered(law: Array, temperature: float) -> Array:
    """Divide the log probabilities by a temperature: above 1, answers `law` are too confident."""
    powers = np.exp(np.log(np.maximum(law, 1e-300)) / temperature)
    rows: Array = powers / powers.sum(1, keepdims=True)
    return rows


def calm(answers: Answers, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Draw answers whose calibration is intact, and their labels."""
    rows = answers.law[random.integers(0, len(answers.law), count)]
    return rows, drawn(rows, random)


def harder(answers: Answers, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Draw inputs that grow harder half-way, of the less confident half, while calibration stays intact."""
    order = np.argsort(answers.law.max(1))
    chosen = np.where(
        np.arange(count) < count // 2,
        random.integers(0, len(order), count),
        order[random.integers(0, len(order) // 2, count)],
    )
    rows = answers.law[chosen]
    return rows, drawn(rows, random)


def sharpened(temperature: float) -> Callable[..., tuple[Array, Array]]:
    """Give the law whose answers are too confident by a temperature."""

    def stream(answers: Answers, count: int, random: np.random.Generator) -> tuple[Array, Array]:
        rows = answers.law[random.integers(0, len(answers.law), count)]
        return rows, drawn(tempered(rows, temperature), random)

    return stream


def shifted(answers: Answers, count: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Draw from other class frequencies, uniform among all (Dirichlet with parameters 1)."""
    factors = random.dirichlet(np.ones(answers.size)) * answers.size
    weights = (answers.law * factors).sum(1)
    rows = answers.law[random.choice(len(answers.law), count, p=weights / weights.sum())]
    law = rows * factors
    return rows, drawn(law / law.sum(1, keepdims=True), random)


def streams(count: int) -> Iterator[np.random.Generator]:
    """Give each stream its own generator."""
    return (np.random.default_rng((2026, index)) for index in range(count))


def z_test_alarm(rows: Array, labels: Array, alpha: float) -> bool:
    """Whether a z-test of confidence less accuracy, repeated every 100 labels, ever rejects."""
    confidence = rows.max(1)
    right = rows.argmax(1) == labels
    gap, variance = np.cumsum(confidence - right), np.cumsum(confidence * (1.0 - confidence))
    at = np.arange(99, len(labels), 100)
    z = np.abs(gap[at]) / np.sqrt(variance[at])
    return bool((z > -_normal_quantile(alpha / 2.0)).any())


def _normal_quantile(level: float) -> float:
    return float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))


def null(answers: Answers, count: int) -> None:
    """Print the share of streams without a change that raise an alarm."""
    for title, stream in (("calm", calm), ("harder inputs", harder)):
        found, repeated, drift = np.zeros(2), np.zeros(2), 0
        for random in streams(count):
            rows, labels = stream(answers, NULL_LABELS, random)
            evidence = CalibrationTest(answers.size, answers.frequencies).update(rows, labels)[:, 0].max()
            found += [evidence >= -math.log(level) for level in LEVELS]
            repeated += [z_test_alarm(rows, labels, level) for level in LEVELS]
            test = DriftTest(calm(answers, REFERENCE, random)[0].max(1))
            test.update(rows.max(1))
            drift += test.alarm
        print(
            f"  {title:14} false alarms at .05 / .01: {found[0] / count:.3f} / {found[1] / count:.3f};"
            f" z-test every 100: {repeated[0] / count:.3f} / {repeated[1] / count:.3f};"
            f" drift test: {drift / count:.3f}",
            flush=True,
        )


def delays(answers: Answers, count: int) -> None:
    """Print the median number of labels from a change to the strict alarm at .05."""
    cases = {
        "T 1.1": sharpened(1.1), "T 1.25": sharpened(1.25), "T 1.5": sharpened(1.5), "T 2": sharpened(2.0),
        "label shift": shifted,
    }  # fmt: skip
    for title, stream in cases.items():
        medians = []
        for before, unlabelled in ((0, 0), (CALM, 0), (0, UNLABELLED)):
            if unlabelled and stream is not shifted:
                continue
            found = []
            for random in streams(count):
                length = 6_000 if title == "T 1.1" else 3_000
                rows, labels = stream(answers, length * (1 + unlabelled), random)
                test = CalibrationTest(answers.size, answers.frequencies)
                if before:
                    test.update(*calm(answers, before, random))
                found.append(_delay(test, rows, labels, unlabelled))
            medians.append(f"{np.median(found):.0f}")
        print(
            f"  {title:12} median delay {medians[0]}; after {CALM:,} calm labels {medians[1]}"
            + (f"; with {UNLABELLED} unlabelled rows a label {medians[2]}" if len(medians) > 2 else ""),
            flush=True,
        )


def _delay(test: CalibrationTest, rows: Array, labels: Array, unlabelled: int) -> float:
    threshold, step = -math.log(0.05), 1 + unlabelled
    if not unlabelled:
        hits = np.flatnonzero(test.update(rows, labels)[:, 0] >= threshold)
        return float(hits[0] + 1) if len(hits) else math.inf
    for label, first in enumerate(range(0, len(labels), step)):
        test.observe(rows[first : first + unlabelled])
        own = slice(first + unlabelled, first + step)
        if test.update(rows[own], labels[own])[0, 0] >= threshold:
            return label + 1.0
    return math.inf


def material(answers: Answers, _: int) -> None:
    """Print after how many true test labels the material test fires."""
    for title, rows in (("ts", answers.law), ("uncalibrated", answers.raw)):
        test = CalibrationTest(answers.size, answers.frequencies)
        hits = np.flatnonzero(test.update(rows, answers.labels)[:, 1] >= -math.log(0.05))
        fired = f"fires after {hits[0] + 1}" if len(hits) else f"silent on {len(answers.labels)}"
        print(f"  {title:14} {fired}; {test.diagnosis().kind}", flush=True)


def duels(answers: Answers, count: int) -> None:
    """Print how often duels of equal NLL are decided, and after how many labels `ts` beats the softmax."""
    decided, found = 0, []
    for random in streams(count):
        rows = answers.law[random.integers(0, len(answers.law), DUEL_LABELS)]
        duel = Duel(answers.size)
        # Two opposite errors of one size: on average over the law both sides lose the same.
        one, other = tempered(rows, 1.3), _equal_loss(rows, tempered(rows, 1.3))
        duel.update(one, other, drawn(rows, random))
        decided += duel.winner is not Winner.UNDECIDED
        order = random.permutation(len(answers.labels))
        duel = Duel(answers.size)
        evidence = duel.update(answers.raw[order], answers.law[order], answers.labels[order])[:, 0]
        hits = np.flatnonzero(evidence >= math.log(2.0 / duel.alpha))
        found.append(float(hits[0] + 1) if len(hits) else math.inf)
    print(f"  equal NLL, {DUEL_LABELS:,} labels: decided {decided / count:.3f} at .05")
    print(f"  raw against ts: median {np.median(found):.0f} labels", flush=True)


def _equal_loss(law: Array, one: Array) -> Array:
    """Sharpen `law` by the temperature at which its expected NLL equals that of `one`."""
    target = -(law * np.log(np.maximum(one, 1e-300))).sum()
    low, high = 0.3, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        loss = -(law * np.log(np.maximum(tempered(law, middle), 1e-300))).sum()
        low, high = (middle, high) if loss > target else (low, middle)
    return tempered(law, (low + high) / 2)


def intervals(answers: Answers, count: int) -> None:
    """Print how often intervals cover: accuracy from 200 random labels, and the NLL at all times."""
    for title, stream in (("calm", calm), ("concept drift (T 2)", sharpened(2.0))):
        covered = always = 0
        for random in streams(count):
            rows, labels = stream(answers, 2_000, random)
            confidence, right = rows.max(1), rows.argmax(1) == labels
            accuracy = Accuracy()
            accuracy.predicted(confidence)
            chosen = random.permutation(len(labels))[:200]
            accuracy.labelled(confidence[chosen], right[chosen])
            estimate = accuracy.result()
            truth = _true_accuracy(answers, stream)
            covered += estimate is not None and (estimate.low or 0.0) <= truth <= (estimate.high or 0.0)
            metrics = Metrics(answers.size)
            metrics.update(rows, labels)
            result = metrics.result()
            always += result.nll_low <= _true_nll(answers, stream) <= result.nll_high
        print(
            f"  {title:20} accuracy covered {covered / count:.3f}; NLL covered {always / count:.3f}",
            flush=True,
        )


def _law_of(answers: Answers, stream: Callable[..., Any]) -> Array:
    return answers.law if stream is calm else tempered(answers.law, 2.0)


def _true_accuracy(answers: Answers, stream: Callable[..., Any]) -> float:
    law = _law_of(answers, stream)
    return float(law[np.arange(len(law)), answers.law.argmax(1)].mean())


def _true_nll(answers: Answers, stream: Callable[..., Any]) -> float:
    floored = (1.0 - 1e-4) * answers.law + 1e-4 / answers.size
    return float(-(_law_of(answers, stream) * np.log(floored)).sum(1).mean())


def speed(answers: Answers, _: int) -> None:
    """Print the time of one label, least of five rounds."""
    rows, labels = calm(answers, NULL_LABELS, np.random.default_rng(0))
    best = math.inf
    for _ in range(5):
        test = CalibrationTest(answers.size, answers.frequencies)
        start = time.perf_counter()
        test.update(rows, labels)
        best = min(best, time.perf_counter() - start)
    print(f"  {best / len(labels) * 1e6:.2f} µs a label at K = {answers.size}", flush=True)


PARTS = {
    "null": null,
    "delays": delays,
    "material": material,
    "duels": duels,
    "intervals": intervals,
    "speed": speed,
}


def main() -> None:
    """Run what was asked for on each data set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument(
        "--sets", nargs="+", default=["cifar10_densenet40", "eurosat_rgb", "cifar100_densenetbc100"]
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    for name in options.sets:
        answers = Answers.of(options.data / name)
        print(f"{name}, K = {answers.size}, {options.streams} streams", flush=True)
        for part in options.only:
            PARTS[part](answers, options.streams)


if __name__ == "__main__":
    main()
