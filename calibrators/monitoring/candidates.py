"""The candidates of a refit: the champion adjusted to recent labels and class frequencies, or a new `ts`.

A calibrator whose classes occur at other frequencies is adjusted by Bayes' rule; the frequencies come from
MAP-EM on traffic, labelled or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize

from boxcal.calibrators.array_calibrator import ArrayCalibrator, TwoStages
from boxcal.calibrators.data import ValidationSet, check_validation_set
from boxcal.calibrators.fitting.api import fit_data
from boxcal.calibrators.maps.temperature import best_temperature
from boxcal.calibrators.monitoring.class_prior import (
    FEWEST_ROWS,
    SMALLEST_FREQUENCY,
    estimate_class_prior,
    prior_offsets,
)
from boxcal.calibrators.monitoring.state import Array

BIAS_LABELS_PER_CLASS = 20
"""Labels a class from which an offset of each class is fitted to labels."""


@dataclass(frozen=True)
class Candidate:
    """A calibrator that a refit proposes.

    Attributes
    ----------
    calibrator
        Its method is `ts`, a new temperature, or that of the champion with `+em` (the class frequencies of
        the traffic), `+em+ts` (these and a temperature) or `+bias` (a temperature and an offset a class).
    nll
        Mean NLL of the labels that it was fitted to, in nats.
    parameters
        How many parameters were fitted to labels.
    score
        `nll` plus parameters a label: the lowest is chosen.
    class_prior
        (K,) its mean answer to the data that it was fitted to.
    version
        Of an earlier one; None of a new one.
    """

    calibrator: ArrayCalibrator
    nll: float
    parameters: int
    score: float
    class_prior: Array
    version: int | None = None

    @property
    def name(self) -> str:
        """The method of the calibrator."""
        return self.calibrator.method


def adjust_class_prior(calibrator: TwoStages, source: Array, target: Array) -> ArrayCalibrator:
    """Adjust a calibrator fitted where classes have frequencies `source` (K,) to frequencies `target` (K,).

    Raises
    ------
    ValueError
        A frequency is not above 0, or there are not K.
    """
    if len(source) != calibrator.num_classes:
        raise ValueError(f"{calibrator.num_classes} classes need as many class frequencies above 0")
    return calibrator.on_arrays.adjusted(prior_offsets(source, target))


def candidates(
    champion: TwoStages,
    logits: Array,
    labels: Array,
    class_prior: Array | None,
    *,
    traffic: Array | None = None,
    earlier: Mapping[int, tuple[TwoStages, Array | None]] | None = None,
) -> list[Candidate]:
    """Fit the candidates, best first.

    Parameters
    ----------
    champion
        The active calibrator; reads logits.
    logits, labels
        (N, K) and (N,) int: the labelled predictions since the change.
    class_prior
        (K,) mean answer of the champion to the data that it was fitted to; None counts as uniform.
    traffic
        (M, K) logits of the traffic since the change, with or without labels; the labelled ones unless given.
    earlier
        Calibrators that were active before, by version, with their class priors or None.
    """
    uniform = np.full(champion.num_classes, 1.0 / champion.num_classes)
    known = uniform if class_prior is None else class_prior
    source = np.maximum(known / known.sum(), SMALLEST_FREQUENCY)
    scores, truth = np.asarray(logits, np.float64), np.asarray(labels, np.int64)
    everything = scores if traffic is None else np.asarray(traffic, np.float64)
    champion = champion.on_arrays
    mapped = champion.calibrate(scores).logits
    found = []

    def add(calibrator: ArrayCalibrator, parameters: int) -> None:
        rows = calibrator(scores)
        nll = nll_of(rows, truth)
        prior = rows.mean(axis=0)
        found.append(Candidate(calibrator, nll, parameters, nll + parameters / len(truth), prior))

    add(fit_data("ts", check_validation_set(scores, truth)).on_arrays, 1)
    if len(everything) >= FEWEST_ROWS:
        target = estimate_class_prior(champion(everything), source)
        add(adjust_class_prior(champion, source, target), 0)
        # The class frequencies of miscalibrated answers are wrong: first a temperature, and one after.
        tempered = champion.adjusted(np.zeros(len(source)), best_temperature(ValidationSet(mapped, truth))[0])
        target = estimate_class_prior(tempered(everything), source)
        shifted = adjust_class_prior(tempered, source, target)
        last = best_temperature(ValidationSet(shifted.calibrate(scores).logits, truth))[0]
        add(shifted.adjusted(np.zeros(len(source)), last, suffix="+em+ts"), 1)
    if len(truth) >= BIAS_LABELS_PER_CLASS * len(source):
        offsets, temperature = _bias(mapped, truth)
        add(champion.adjusted(offsets, temperature, suffix="+bias"), len(source) + 1)
    for version, (calibrator, prior) in (earlier or {}).items():
        nll = mean_nll(calibrator, scores, truth)
        found.append(
            Candidate(calibrator.on_arrays, nll, 0, nll, uniform if prior is None else prior, version)
        )
    return sorted(found, key=lambda candidate: candidate.score)


def mean_nll(calibrator: TwoStages, logits: Array, labels: Any) -> float:
    """Mean NLL in nats of labels (N,) for logits (N, K)."""
    return nll_of(calibrator.on_arrays(logits), labels)


def nll_of(probabilities: Array, labels: Any) -> float:
    """Mean NLL in nats of labels (N,) by float64 probabilities (N, K)."""
    truth = np.take_along_axis(probabilities, np.asarray(labels)[:, None], axis=1)
    return float(-np.log(np.maximum(truth, np.finfo(np.float64).tiny)).mean())


def _bias(mapped: Array, labels: Any) -> tuple[Array, float]:
    """Fit offsets (K,) and a temperature by NLL, with a ridge of K/N that draws the offsets to 0."""
    z, y, size = mapped, labels, mapped.shape[1]
    rows = np.arange(len(y))

    def objective(point: Array) -> tuple[float, Array]:
        inverse, offsets = np.exp(point[0]), point[1:]
        raw = z * inverse + offsets
        raw -= raw.max(1, keepdims=True)
        q = np.exp(raw)
        total = q.sum(1, keepdims=True)
        loss = float((np.log(total[:, 0]) - raw[rows, y]).mean())
        q /= total
        q[rows, y] -= 1.0
        slope = np.concatenate([[float((q * z).sum()) * inverse], q.sum(0)]) / len(y)
        slope[1:] += 2.0 * size / len(y) * offsets
        return loss + size / len(y) * float(offsets @ offsets), slope

    point = minimize(objective, np.zeros(1 + size), jac=True, method="L-BFGS-B").x
    # log q = z / T + offsets = (z + T offsets) / T
    temperature = float(np.exp(-point[0]))
    return point[1:] * temperature, temperature
