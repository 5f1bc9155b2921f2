"""How often the gate activates a fit by simulation, and which warning names a corrupted validation set."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from boxcal.calibrators.checks import check_data
from boxcal.calibrators.evaluation.report import cross_fitted_report

pytestmark = pytest.mark.long

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Set = tuple[Floats, Labels]
ZERO = np.log(np.finfo(np.float32).tiny)


def draw(count: int, classes: int, temperature: float, zeros: float, seed: int) -> Set:
    """Draw logits that are `temperature` times too large, a share of whose true classes has probability 0."""
    rng = np.random.default_rng(seed)
    honest = 2.5 * rng.normal(size=(count, classes))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(axis=1)
    logits = temperature * honest
    lost = rng.random(count) < zeros
    logits[lost, labels[lost]] = ZERO
    return logits, labels


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("temperature", "zeros", "least", "most"),
    [(1.0, 0.0, 0, 1), (1.5, 0.0, 14, 15), (1.0, 0.02, 0, 1)],
    ids=["calibrated", "overconfident", "zeros"],
)
def test_the_gate_activates_what_is_better_and_nothing_else(
    temperature: float, zeros: float, least: int, most: int
) -> None:
    """Of 15 sets; `ts` answers zeros with a temperature that harms Brier score and smooth ECE."""
    activated = sum(
        cross_fitted_report("ts", *draw(300, 10, temperature, zeros, seed)).is_better for seed in range(15)
    )
    assert least <= activated <= most


def permute_labels(logits: Floats, labels: Labels, rng: np.random.Generator, share: int) -> Set:
    some = rng.permutation(len(labels))[: len(labels) // share]
    changed = labels.copy()
    changed[some] = labels[rng.permutation(some)]
    return logits, changed


def shift_labels(logits: Floats, labels: Labels, _: np.random.Generator) -> Set:
    return logits, (labels + 1) % logits.shape[1]


def remove_class(logits: Floats, labels: Labels, _: np.random.Generator) -> Set:
    return logits[labels != 3], labels[labels != 3]


def replace_by_noise(logits: Floats, labels: Labels, rng: np.random.Generator) -> Set:
    changed = logits.copy()
    some = rng.permutation(len(labels))[: 3 * len(labels) // 10]
    changed[some] = logits.mean() + logits.std() * rng.normal(size=(len(some), logits.shape[1]))
    return changed, labels


def send_probabilities(logits: Floats, labels: Labels, _: np.random.Generator) -> Set:
    return torch.from_numpy(logits).softmax(dim=1).numpy(), labels


@pytest.mark.parametrize(
    ("corrupt", "code"),
    [
        (partial(permute_labels, share=10), "unrelated_labels"),
        (partial(permute_labels, share=20), "unrelated_labels"),
        (shift_labels, "error_rate"),
        (remove_class, "absent_classes"),
        (replace_by_noise, "unrelated_labels"),
        (send_probabilities, "rows_sum_to_constant"),
    ],
)
def test_a_serious_warning_names_each_corruption(
    corrupt: Callable[[Floats, Labels, np.random.Generator], Set], code: str
) -> None:
    clean = draw(4000, 10, 1.5, 0.0, seed=0)
    assert not check_data(*clean)
    found = {
        one.code
        for one in check_data(*corrupt(*clean, np.random.default_rng(1)))
        if one.severity == "serious"
    }
    assert code in found
