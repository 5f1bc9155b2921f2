"""The candidates of a refit: the champion adjusted to recent labels and class frequencies, or a new `ts`.

A calibrator whose classes occur at other frequencies is adjusted by Bayes' rule; the frequencies come from
MAP-EM on traffic, labelled or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from boxcal.calibrators.calibrator import Calibrator
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting.api import fit
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

    calibrator: Calibrator
    nll: float
    parameters: int
    score: float
    class_prior: Array
    version: int | None = None

    @property
    def name(self) -> str:
        """The method of the calibrator."""
        return self.calibrator.method


def adjust_class_prior(calibrator: Calibrator, source: Array, target: Array) -> Calibrator:
    """Adjust a calibrator fitted where classes have frequencies `source` (K,) to frequencies `target` (K,).

    Raises
    ------
    ValueError
        A frequency is not above 0, or there are not K.
    """
    if len(source) != calibrator.num_classes:
        raise ValueError(f"{calibrator.num_classes} classes need as many class frequencies above 0")
    return calibrator.adjusted(prior_offsets(source, target))


def candidates(
    champion: Calibrator,
    logits: Array,
    labels: Array,
    class_prior: Array | None,
    *,
    traffic: Array | None = None,
    earlier: Mapping[int, tuple[Calibrator, Array | None]] | None = None,
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
    scores, truth = torch.as_tensor(logits, dtype=torch.float64), torch.as_tensor(labels, dtype=torch.int64)
    everything = scores if traffic is None else torch.as_tensor(traffic, dtype=torch.float64)
    mapped = champion.calibrate(scores).logits
    found = []

    def add(calibrator: Calibrator, parameters: int) -> None:
        rows = calibrator(scores)
        nll = nll_of(rows, truth)
        prior = rows.mean(0).numpy()
        found.append(Candidate(calibrator, nll, parameters, nll + parameters / len(truth), prior))

    add(fit("ts", scores, truth).calibrator, 1)
    if len(everything) >= FEWEST_ROWS:
        target = estimate_class_prior(champion(everything).numpy(), source)
        add(adjust_class_prior(champion, source, target), 0)
        # The class frequencies of miscalibrated answers are wrong: first a temperature, and one after.
        tempered = champion.adjusted(np.zeros(len(source)), best_temperature(ValidationSet(mapped, truth))[0])
        target = estimate_class_prior(tempered(everything).numpy(), source)
        shifted = adjust_class_prior(tempered, source, target)
        last = best_temperature(ValidationSet(shifted.calibrate(scores).logits, truth))[0]
        add(shifted.adjusted(np.zeros(len(source)), last, suffix="+em+ts"), 1)
    if len(truth) >= BIAS_LABELS_PER_CLASS * len(source):
        offsets, temperature = _bias(mapped, truth)
        add(champion.adjusted(offsets, temperature, suffix="+bias"), len(source) + 1)
    for version, (calibrator, prior) in (earlier or {}).items():
        nll = mean_nll(calibrator, scores, truth)
        found.append(Candidate(calibrator, nll, 0, nll, uniform if prior is None else prior, version))
    return sorted(found, key=lambda candidate: candidate.score)


def mean_nll(calibrator: Calibrator, logits: Array | Tensor, labels: Array | Tensor) -> float:
    """Mean NLL in nats of labels (N,) for logits (N, K)."""
    return nll_of(calibrator(torch.as_tensor(logits)), torch.as_tensor(labels))


def nll_of(probabilities: Tensor, labels: Tensor) -> float:
    """Mean NLL in nats of labels (N,) by float64 probabilities (N, K)."""
    truth = probabilities.gather(1, labels[:, None])
    return float(-truth.clamp_min(torch.finfo(torch.float64).tiny).log().mean())


def _bias(mapped: Tensor, labels: Tensor) -> tuple[Array, float]:
    """Fit offsets (K,) and a temperature by NLL, with a ridge of K/N that draws the offsets to 0."""
    z, y, size = mapped.numpy(), labels.numpy(), mapped.shape[1]
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
