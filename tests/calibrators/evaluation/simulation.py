"""Worlds whose true class probabilities are known, to test what intervals and p-values promise."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from boxcal.calibrators.evaluation.bins import NUM_BINS, bin_edges, bin_indices
from boxcal.calibrators.evaluation.classwise import ClassCells, cell_indices
from boxcal.calibrators.evaluation.outcomes import Outcomes, outcomes
from boxcal.calibrators.evaluation.toplabel import (
    BinnedError,
    DebiasedError,
    KolmogorovSmirnovError,
    SmoothError,
)
from tests.calibrators.samples import Floats, softmax

POPULATION = 200_000


@dataclass(frozen=True)
class World:
    """Logits of `classes` classes whose softmax is the truth, and a model that distorts it."""

    name: str
    classes: int
    sharpness: float
    model: Callable[[Floats], Floats]

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """True probabilities and the model's, both (count, K)."""
        logits = rng.normal(size=(count, self.classes)) * self.sharpness
        return softmax(logits), self.model(logits)


def blend(logits: Floats) -> Floats:
    """Overconfident where the model is sure, right elsewhere."""
    sure = softmax(logits)
    top = sure.max(axis=1, keepdims=True)
    return np.where(top > 0.8, softmax(1.8 * logits), sure)


def capped(logits: Floats) -> Floats:
    """Overconfident, with a ceiling of 0.9 that many samples share exactly."""
    probabilities = softmax(1.3 * logits)
    top = probabilities.argmax(axis=1)
    rows = np.arange(len(top))
    peak = probabilities[rows, top]
    held = np.minimum(peak, 0.9)
    rest = probabilities * ((1 - held) / np.maximum(1 - peak, 1e-12))[:, None]
    rest[rows, top] = held
    return np.where((peak > 0.9)[:, None], rest, probabilities)


WORLDS = {
    world.name: world
    for world in (
        World("calibrated", 5, 2.0, softmax),
        World("calibrated and sure", 10, 5.0, softmax),
        World("overconfident", 5, 1.5, lambda z: softmax(2.0 * z)),
        World("barely overconfident", 10, 2.0, lambda z: softmax(1.07 * z)),
        World("underconfident", 4, 3.0, lambda z: softmax(0.7 * z)),
        World("overconfident when sure", 5, 2.5, blend),
        World("capped", 5, 2.5, capped),
    )
}


def sample(world: World, count: int, rng: np.random.Generator) -> tuple[Outcomes, Floats]:
    """Outcomes of the model on `count` samples, and the true probabilities."""
    truth, probabilities = world.draw(count, rng)
    labels = (truth.cumsum(axis=1) < rng.random((count, 1))).sum(axis=1)
    return outcomes(probabilities, np.minimum(labels, world.classes - 1)), truth


def true_metrics(world: World) -> dict[str, float]:
    """The metrics of a large population, labels replaced by their probabilities: no noise, no bias."""
    truth, probabilities = world.draw(POPULATION, np.random.default_rng(12345))
    rows = np.arange(POPULATION)
    scored = outcomes(probabilities, truth.argmax(axis=1))
    scored = replace(scored, correct=truth[rows, scored.predicted])
    brier = float(
        (truth * (1 - 2 * probabilities)).sum(axis=1).mean() + (probabilities**2).sum(axis=1).mean()
    )
    cells = ClassCells(scored)
    hits = np.bincount(cell_indices(probabilities).ravel(), truth.ravel(), minlength=len(cells.mass))
    calibration = float(cells.brier_calibration(hits))
    return {
        "error_rate": float(1 - scored.correct.mean()),
        "nll": float(-(truth * np.log(probabilities)).sum(axis=1).mean()),
        "brier": brier,
        "brier_calibration": calibration,
        "brier_refinement": brier - calibration,
        "classwise_ece": float(cells.classwise_ece(hits)),
        "ece_width": BinnedError(scored, "width").value,
        "ece_mass": BinnedError(scored, "mass").value,
        "smooth_ece": SmoothError(scored).value,
        "debiased_ece": DebiasedError(scored).centre,
        "ks": KolmogorovSmirnovError(scored).value,
    }


def true_maximum(scored: Outcomes, truth: Floats) -> float:
    """MCE's target: the largest gap of the sample's own bins, with true chances for outcomes."""
    chance = truth[np.arange(len(scored)), scored.predicted]
    index = bin_indices(scored.confidence, bin_edges(scored.confidence, "width"))
    counts = np.bincount(index, minlength=NUM_BINS)
    gaps = np.bincount(index, scored.confidence - chance, minlength=NUM_BINS) / np.maximum(counts, 1)
    return float(np.abs(gaps).max())
