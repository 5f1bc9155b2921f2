"""Class frequencies of unlabelled traffic, by expectation maximisation with a prior (MAP-EM).

Saerens, Latinne and Decaestecker (2002), with a Dirichlet prior: without one, few rows give frequencies of
zero, and a prior adjustment with those ruins the answers.
"""

from __future__ import annotations

import numpy as np

from boxcal.calibrators.monitoring.state import Array

PSEUDO_COUNT = 5.0
"""Rows a class by which the estimate is drawn to the source frequencies."""

FEWEST_ROWS = 1000

SMALLEST_FREQUENCY = 1e-6
"""Of a class that a calibrator's data did not have, where Bayes' rule divides by it."""

RESAMPLES, LEVEL = 200, 0.01

TOLERANCE = 1e-8
MOST_STEPS = 1000


def prior_offsets(source: Array, target: Array) -> Array:
    """Give what Bayes' rule adds to the logits where class frequencies `source` (K,) become `target` (K,).

    Raises
    ------
    ValueError
        A frequency is not above 0, or they differ in number.
    """
    source, target = np.asarray(source, dtype=np.float64), np.asarray(target, dtype=np.float64)
    if source.shape != target.shape or not ((source > 0).all() and (target > 0).all()):
        raise ValueError(f"{len(source)} classes need as many class frequencies above 0")
    offsets: Array = np.log(target / target.sum()) - np.log(source / source.sum())
    return offsets


def is_shifted(probabilities: Array, source: Array, source_rows: float, *, seed: int = 0) -> bool:
    """Whether the mean of rows (N, K) differs from `source` (K,), the mean of `source_rows` others.

    The statistic is `T = sum_k (mean_k - source_k)^2 / source_k`. Without a shift the mean lies around the
    source as the means of resamples lie around the mean; the error of the source itself makes T larger by the
    factor 1 + N / source_rows. A shift is told at the level `LEVEL`.

    Parameters
    ----------
    probabilities
        (N, K) answers to traffic.
    source
        (K,) as `estimate_class_prior` takes it.
    source_rows
        How many rows it is the mean of; infinite where it is exact.
    seed
        Of the resamples.
    """
    count, mean = len(probabilities), probabilities.mean(0)
    times = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES) / count
    null = ((times @ probabilities - mean) ** 2 / source).sum(1) * (1 + count / source_rows)
    return bool((null >= ((mean - source) ** 2 / source).sum()).mean() < LEVEL)


def estimate_class_prior(probabilities: Array, source: Array, *, pseudo_count: float = PSEUDO_COUNT) -> Array:
    """Estimate the class frequencies (K,) behind rows (N, K) of probabilities.

    Parameters
    ----------
    probabilities
        (N, K) answers to traffic.
    source
        (K,) mean of the same calibrator's answers to the data that it was fitted to. It is not the frequency
        of the labels: rows whose mean is the source keep it, and what the answers get wrong on average is no
        shift.

    Raises
    ------
    ValueError
        Fewer than `FEWEST_ROWS` rows, for which the estimate does more harm than good, or shapes that differ.
    """
    rows, source = np.asarray(probabilities, dtype=np.float64), np.asarray(source, dtype=np.float64)
    if rows.ndim != 2 or source.shape != rows.shape[1:]:
        raise ValueError(f"rows of shape {rows.shape} do not fit {source.shape} source frequencies")
    if len(rows) < FEWEST_ROWS:
        raise ValueError(f"a class prior needs at least {FEWEST_ROWS:,} rows, not {len(rows):,}")
    source = np.maximum(source / source.sum(), SMALLEST_FREQUENCY)
    extra = pseudo_count * len(source) * source
    ratios = rows / source
    prior: Array = source
    for _ in range(MOST_STEPS):
        weighted = ratios * prior
        counts = (weighted / weighted.sum(1, keepdims=True)).sum(0) + extra
        new: Array = counts / counts.sum()
        if np.abs(new - prior).max() < TOLERANCE:
            return new
        prior = new
    return prior
