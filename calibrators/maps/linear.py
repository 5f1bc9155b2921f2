"""`vector`, `sms`, `matrix`, `dirichlet` and `polynomial`: a temperature, then a map near the identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from boxcal.calibrators import array_ops
from boxcal.calibrators.array_ops import log_softmax, row_sum
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import (
    Array,
    Gradients,
    Parameters,
    Shapes,
    Values,
    Vjp,
    with_products,
)
from boxcal.calibrators.maps.temperature import TemperedMap

FARTHEST = 4.0
"""Standard deviations within which products of `polynomial` are formed."""


class Ridge(NamedTuple):
    """Factors of the squares of `diagonal(W) - 1`, of the other entries of W, and of the offsets."""

    diagonal: float
    others: float
    offsets: float


class LinearMap(TemperedMap):
    """`T(g) = W h(g / temperature) + w'`, with a ridge penalty that draws W to the identity and w' to 0.

    `temperature` is that of `ts` on the same data: W = I and w' = 0 is `ts`, and the fit does not depend on
    the scale of the logits. Where there are several strengths of the penalty, five-fold cross-validation
    chooses the strongest whose loss is within a standard error of the lowest. The objective is convex.
    """

    strengths: ClassVar[tuple[float, ...]] = (1.0,)
    """From the strongest penalty to the weakest."""
    matrix: ClassVar[str]
    offset: ClassVar[str]
    """Names of W and w'."""

    def __init__(self, num_classes: int, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_classes, parameters)
        self.strength = self.strengths[0]

    def ridge(self, strength: float, samples: float) -> Ridge:
        """Give the factors of the penalty on the mean loss of so many samples."""
        raise NotImplementedError

    def precompute_vjp(self, read: Array, by_read: Array) -> Array:
        """Give the derivatives in the scores for those in what W takes."""
        del read
        return by_read / self.parameters["temperature"]

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Map linearly: dT = dW x + W dx + dw'."""
        read = self.precompute(scores) if precomputed is None else precomputed
        weight, diagonal = p[self.matrix], p[self.matrix].ndim == 1
        mapped = read * weight if diagonal else read @ weight.T
        mapped += p[self.offset]

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            by_weight = np.einsum("nk,nk->k", by_mapped, read) if diagonal else by_mapped.T @ read
            gradients = {self.matrix: by_weight, self.offset: by_mapped.sum(axis=0)}
            if not through:
                return gradients, None
            return gradients, self.precompute_vjp(
                read, by_mapped * weight if diagonal else by_mapped @ weight
            )

        return mapped, back

    def penalty(self, p: Parameters) -> tuple[float, Gradients]:
        """Give the penalty at the strength chosen."""
        weight, offsets, ridge = p[self.matrix], p[self.offset], self.ridge(self.strength, self.samples)
        if weight.ndim == 1:
            change, factors = weight - 1.0, np.full(weight.shape, ridge.diagonal)
        else:
            identity = np.eye(*weight.shape)
            change = weight - identity
            factors = np.where(identity > 0.0, ridge.diagonal, ridge.others)
        pull = factors * change
        value = np.vdot(pull, change) + ridge.offsets * np.vdot(offsets, offsets)
        return float(value), {self.matrix: 2.0 * pull, self.offset: 2.0 * ridge.offsets * offsets}

    def adopt(self, alone: LogitMap) -> None:
        if isinstance(alone, LinearMap):
            self.strength = alone.strength


class VectorScaling(LinearMap):
    """`T(g) = w * g / temperature + w'`, entry by entry (Guo et al. 2017); ridge c K/N on w - 1 and w'.

    Cross-validation chooses c. Where classes differ much, c = 1 costs most of what the method can gain.
    """

    name = "vector"
    stacked = "of more classes"  # of two, `sms` is the same map
    shapes: ClassVar[Shapes] = {"temperature": (), "factors": ("K",), "offsets": ("K",)}
    strengths = tuple(10.0**power for power in range(2, -5, -1))
    matrix, offset = "factors", "offsets"

    def fresh(self) -> dict[str, Any]:
        """Begin with factors 1 and offsets 0."""
        K = self.num_classes
        return {"temperature": 1.0, "factors": np.ones(K), "offsets": np.zeros(K)}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Scale and shift every class of (N, K) logits."""
        del ops
        return scores / p["temperature"] * p["factors"] + p["offsets"]

    def ridge(self, strength: float, samples: float) -> Ridge:
        """Hold factors and offsets back alike."""
        return Ridge(strength * self.num_classes / samples, 0.0, strength * self.num_classes / samples)


class MatrixScaling(LinearMap):
    """`T(g) = W g / temperature + w'` (Guo et al. 2017), regularised as by Kull et al. (2019).

    The penalty is lambda / (K (K - 1)) times the sum of squares off the diagonal, plus lambda / K times
    that of the intercept (their lambda = mu), and K/N times that of `diagonal(W) - 1`, which they leave free:
    with few samples it then grows until classes have the probability 0.
    """

    name = "matrix"
    shapes: ClassVar[Shapes] = {"temperature": (), "weight": ("K", "K"), "intercept": ("K",)}
    strengths = tuple(10.0**power for power in range(6, -5, -1))
    matrix, offset = "weight", "intercept"

    def fresh(self) -> dict[str, Any]:
        K = self.num_classes
        return {"temperature": 1.0, "weight": np.eye(K), "intercept": np.zeros(K)}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        del ops
        return scores / p["temperature"] @ p["weight"].T + p["intercept"]

    def ridge(self, strength: float, samples: float) -> Ridge:
        """Divide the strength among the entries off the diagonal, and among the offsets."""
        K = self.num_classes
        return Ridge(K / samples, strength / (K * (K - 1)), strength / K)


class DirichletCalibration(MatrixScaling):
    """`T(g) = W log softmax(g / temperature) + w'` (Kull et al. 2019), regularised as `matrix`."""

    name = "dirichlet"
    stacked = "of more classes"
    combines = True
    normalises = True

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Map the log probabilities of (N, K) logits linearly."""
        return ops.log_softmax(scores / p["temperature"]) @ p["weight"].T + p["intercept"]

    def precompute(self, scores: Array) -> Array:
        """Take the log probabilities of (N, K) logits."""
        return log_softmax(super().precompute(scores))

    def precompute_vjp(self, read: Array, by_read: Array) -> Array:
        """Go back through the log-softmax: u - q sum(u)."""
        by_scaled = by_read - np.exp(read) * row_sum(by_read)
        return super().precompute_vjp(read, by_scaled)


class StructuredMatrixScaling(MatrixScaling):
    """`T(g) = W g / temperature + w'` with a penalty for each part of W (Berta et al. 2025).

    The penalty is K/N times the squares of `diagonal(W) - 1` and of w', and c K (K - 1) / N times those off
    the diagonal, c chosen by cross-validation.
    """

    name = "sms"
    stacked = "always"
    strengths = (1.0, 0.1, 0.01)

    def ridge(self, strength: float, samples: float) -> Ridge:
        """Penalise the more entries a part has, the more."""
        K = self.num_classes
        return Ridge(K / samples, strength * K * (K - 1) / samples, K / samples)


class PolynomialScaling(DirichletCalibration):
    """`T(g) = W [x, u_i u_j for i <= j] + w'`, of degree 2 in x = log softmax(g / temperature).

    `u` is x less its mean, over its standard deviation, and at most four of these: farther out, where there
    are few samples, only the linear part goes on. Where a model assumes that what it reads is independent
    within a class (naive Bayes), or that all classes have one covariance, the right answer has such products.
    The penalty is K/N times the squares of `diagonal(W) - 1` and of w', and c/N times those of the other
    entries, c chosen by cross-validation.
    """

    name = "polynomial"
    combines = False
    shapes: ClassVar[Shapes] = {
        "temperature": (),
        "centre": ("K",),
        "spread": ("K",),
        "weight": ("K", "R"),
        "intercept": ("K",),
    }
    prepared = ("temperature", "centre", "spread")
    positive = ("spread",)
    most_classes = 40
    """Of more, it would have more than 35,000 parameters."""
    strengths = (1000.0, 100.0, 10.0, 1.0)

    def __init__(self, num_classes: int, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_classes, parameters)
        self.pairs = np.triu_indices(num_classes)

    def fresh(self) -> dict[str, Any]:
        K = self.num_classes
        if self.most_classes < K:
            raise InvalidDataError(
                f"{self.name!r} multiplies pairs of classes and takes at most {self.most_classes}, not {K:,}"
            )
        weight = np.eye(K, with_products(K))
        return {
            "temperature": 1.0,
            "centre": np.zeros(K),
            "spread": np.ones(K),
            "weight": weight,
            "intercept": np.zeros(K),
        }

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Fit the temperature, and take mean and standard deviation of each column."""
        super().prepare(data, tick)
        x = super().precompute(data.scores)
        centre = np.average(x, axis=0, weights=data.weights)
        spread = np.sqrt(np.average((x - centre) ** 2, axis=0, weights=data.weights))
        self.parameters |= {"centre": centre, "spread": np.where(spread > 0.0, spread, 1.0)}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Map the log probabilities of (N, K) logits, and their products."""
        K, (first, second) = self.num_classes, self.pairs
        x = ops.log_softmax(scores / p["temperature"])
        u = _factors(ops, p, x)
        products = u[:, first] * u[:, second]
        return x @ p["weight"][:, :K].T + products @ p["weight"][:, K:].T + p["intercept"]

    def precompute(self, scores: Array) -> Array:
        """Take the log probabilities of (N, K) logits, and their products: (N, K (K + 3) / 2)."""
        x, (first, second) = super().precompute(scores), self.pairs
        u = _factors(array_ops, self.parameters, x)
        return np.concatenate([x, u[:, first] * u[:, second]], axis=1)

    def precompute_vjp(self, read: Array, by_read: Array) -> Array:
        """Go back through the products, then through the log-softmax."""
        K, (first, second) = self.num_classes, self.pairs
        x, by_u = read[:, :K], np.zeros_like(read[:, :K])
        u = _factors(array_ops, self.parameters, x)
        for pair, (i, j) in enumerate(zip(first, second, strict=True), K):
            by_u[:, i] += by_read[:, pair] * u[:, j]
            by_u[:, j] += by_read[:, pair] * u[:, i]
        by_u[np.abs(u) >= FARTHEST] = 0.0
        return super().precompute_vjp(x, by_read[:, :K] + by_u / self.parameters["spread"])

    def ridge(self, strength: float, samples: float) -> Ridge:
        """One factor for what is neither on the diagonal nor an offset."""
        K = self.num_classes
        return Ridge(K / samples, strength / samples, K / samples)


def _factors(ops: ModuleType, p: Parameters, x: Values) -> Values:
    """Standardise log probabilities (N, K), and clip them."""
    return ops.clip((x - p["centre"]) / p["spread"], -FARTHEST, FARTHEST)
