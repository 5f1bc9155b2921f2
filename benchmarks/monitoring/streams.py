"""Streams of answers drawn from real test sets, with labels drawn from a law that is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.sets import read
from boxcal.calibrators import fit

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Answers:
    """The answers (N, K) of `ts` on the test split, and its mean answer (K,) to the validation split."""

    name: str
    law: Array
    prior: Array

    @classmethod
    def of(cls, folder: Path) -> Answers:
        validation, test = read(folder / "val.npz"), read(folder / "test.npz")
        calibrator = fit("ts", validation.scores, validation.labels).on_arrays
        return cls(
            folder.name,
            calibrator(test.scores),
            calibrator(validation.scores).mean(axis=0),
        )

    @property
    def size(self) -> int:
        return int(self.law.shape[1])


@dataclass(frozen=True)
class Stream:
    """Rows of the test set `index` (N,), and the law (N, K) of their labels (N,)."""

    index: Array
    law: Array
    labels: Array

    def then(self, other: Stream) -> Stream:
        return Stream(
            np.concatenate([self.index, other.index]),
            np.concatenate([self.law, other.law]),
            np.concatenate([self.labels, other.labels]),
        )


Draw = Callable[[Answers, int, np.random.Generator], Stream]


def generator(seed: int, index: int) -> np.random.Generator:
    """Give stream number `index` of an experiment its own generator."""
    return np.random.default_rng((2026, seed, index))


def drawn(law: Array, random: np.random.Generator) -> Array:
    cumulated = law.cumsum(1)
    labels: Array = (cumulated > random.random((len(law), 1)) * cumulated[:, -1:]).argmax(1)
    return labels


def tempered(law: Array, temperature: float) -> Array:
    """Divide the log probabilities by a temperature: above 1, answers `law` are too confident."""
    powers = np.maximum(law, 1e-300) ** (1.0 / temperature)
    rows: Array = powers / powers.sum(1, keepdims=True)
    return rows


def _anywhere(answers: Answers, count: int, random: np.random.Generator) -> Array:
    return random.integers(0, len(answers.law), count)


def calm(answers: Answers, count: int, random: np.random.Generator) -> Stream:
    index = _anywhere(answers, count, random)
    law = answers.law[index]
    return Stream(index, law, drawn(law, random))


def harder(answers: Answers, count: int, random: np.random.Generator) -> Stream:
    """Draw inputs that grow harder half-way, of the less confident half, while calibration stays intact."""
    order = np.argsort(answers.law.max(1))
    first = _anywhere(answers, count // 2, random)
    index = np.concatenate([first, order[random.integers(0, len(order) // 2, count - len(first))]])
    law = answers.law[index]
    return Stream(index, law, drawn(law, random))


def sharpened(temperature: float) -> Draw:
    """Give the stream whose answers are too confident by a temperature."""

    def stream(answers: Answers, count: int, random: np.random.Generator) -> Stream:
        index = _anywhere(answers, count, random)
        law = tempered(answers.law[index], temperature)
        return Stream(index, law, drawn(law, random))

    return stream


def shifted(answers: Answers, count: int, random: np.random.Generator) -> Stream:
    """Draw from other class frequencies, uniform among all (Dirichlet with parameters 1)."""
    factors = random.dirichlet(np.ones(answers.size)) * answers.size
    weights = answers.law @ factors
    index = random.choice(len(answers.law), count, p=weights / weights.sum())
    law = answers.law[index] * factors
    law /= law.sum(1, keepdims=True)
    return Stream(index, law, drawn(law, random))
