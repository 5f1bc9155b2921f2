"""The objective of a joint fit: coordinates of a map and a box to the mean loss and its exact gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.network import fixed_between
from boxcal.calibrators.operator.cpu_losses import nll_rows
from boxcal.calibrators.operator.uniform import SortedRows
from boxcal.calibrators.parametrised import Limits
from boxcal.calibrators.threads import SMALL, block_rows, over_blocks, over_rows

Array = np.ndarray[Any, Any]


def dense_loss(scores: Array, labels: Array, lower: Array, upper: Array) -> tuple[Array, Array, Array, Array]:
    """Loss of every row under its own box, and the derivatives in scores, lower and upper.

    Shapes: scores (N, K); labels, lower, upper (N,); returns (N,), (N, K), (N,), (N,). A few threads
    share the rows; unlike those of torch they never wait for each other in a loop that burns the processor.
    """
    losses, d_lower, d_upper = np.empty(len(scores)), np.empty(len(scores)), np.empty(len(scores))
    d_scores = np.empty(scores.shape)

    def work(rows: slice) -> None:
        arrays = (scores, labels, lower, upper, losses, d_scores, d_lower, d_upper)
        nll_rows(*(array[rows] for array in arrays))

    over_rows(work, len(scores), worth=scores.size > SMALL)
    return losses, d_scores, d_lower, d_upper


def mean_of(losses: Array, weights: Array | None) -> float:
    """Mean of some losses (N,), with weights (N,) of mean 1 if there are any."""
    return float((losses if weights is None else losses * weights).mean())


def losses_of(
    logits: Tensor, labels: Array, box: tuple[float, float], mapped: Callable[[Tensor], Tensor]
) -> Array:
    """Loss (N,) of every row of `mapped(logits)` under one box, as `dense_loss`, in blocks of rows.

    Parameters
    ----------
    logits : Tensor
        (N, K) float32 or float64.
    labels : ndarray
        (N,) int64.
    box : pair of float
        Lower and upper bound of every class.
    mapped : callable
        Maps rows of float64 logits, each by itself.
    """

    @torch.no_grad()
    def work(rows: slice) -> Array:
        scores = np.ascontiguousarray(mapped(logits[rows].double()).numpy())
        lower, upper = (np.full(len(scores), bound) for bound in box)
        losses, by_lower, by_upper = np.empty((3, len(scores)))
        nll_rows(scores, labels[rows], lower, upper, losses, np.empty_like(scores), by_lower, by_upper)
        return losses

    return np.concatenate(list(over_blocks(work, len(labels), block_rows(logits.shape[1]))))


class JointObjective:
    """Mean loss of `BCSoftmax(T(g); a, b)` over a validation set, with its penalty and its gradient.

    The logit map's coordinates come first, then the bound map's, if there is one.

    Parameters
    ----------
    logit_map : LogitMap
    bound_map : BoundMap or None
    source : Tensor
        What the logit map reads.
    labels : Tensor
        (N,) int64.
    weights : Tensor, optional
        (N,) float64, of mean 1.
    sort : callable, optional
        Gives the same logits sorted, if they are sorted once for several objectives.
    """

    pseudo_sample = False
    """Whether the closed forms of `pts` count one sample more."""

    def __init__(
        self,
        logit_map: LogitMap,
        bound_map: BoundMap | None,
        source: Tensor,
        labels: Tensor,
        weights: Tensor | None = None,
        *,
        sort: Callable[[], SortedRows] | None = None,
    ) -> None:
        self.logit_map = logit_map
        self.bound_map = bound_map
        self.source = source
        self.labels = labels.numpy()
        self.weights = None if weights is None else weights.numpy()
        self._sort = sort or (lambda: SortedRows(source, labels))
        self._prepare()
        self._read()

    def _prepare(self) -> None:
        """Compute once what every evaluation reads."""

    def _read(self) -> None:
        """Compute what the networks of the maps read, where this does not depend on the coordinates."""

    @property
    def limits(self) -> Limits:
        """Limits of every coordinate."""
        return [*self.logit_map.limits(), *(self.bound_map.limits() if self.bound_map else [])]

    @property
    def is_network(self) -> bool:
        """Whether a network is among the maps."""
        return self.logit_map.is_network or (self.bound_map is not None and self.bound_map.is_network)

    def rows(self, index: Tensor) -> Self:
        """Look only at some rows, given as indices or as a mask."""
        labels, weights = torch.from_numpy(self.labels)[index], None
        if self.weights is not None:
            weights = torch.from_numpy(self.weights_of(index))
        return type(self)(self.logit_map, self.bound_map, self.source[index], labels, weights)

    def shallow(self, index: Tensor) -> Self:
        """Copy the objective, with the labels and weights of some rows."""
        part = copy.copy(self)
        part.labels = self.labels[index.numpy()]
        if self.weights is not None:
            part.weights = self.weights_of(index)
        return part

    def with_maps(self, logit_map: LogitMap, bound_map: BoundMap | None) -> Self:
        """Give the objective of two maps of the same kinds, which differ in what their networks read."""
        other = copy.copy(self)
        other.logit_map, other.bound_map = logit_map, bound_map
        other._read()
        return other

    def rough(self) -> Self:
        """Give the objective to fewer digits, where this is quicker."""
        return self

    def with_pseudo_sample(self) -> Self:
        """Count one sample more than there are, where a network gives the temperatures.

        It is any row with the same probability, and its label is the class with the second largest logit.
        Where no sample that a network is certain of is wrong, their loss alone is lowest with an infinitely
        small temperature. Platt (1999) keeps the targets of his sigmoid from 0 and 1 for the same reason.
        """
        other = copy.copy(self)
        other.pseudo_sample = True
        return other

    def between(self, plain: Array, point: Array, share: float) -> Array:
        """Give coordinates at which networks answer what is between a constant answer and their own.

        Parameters
        ----------
        plain, point : ndarray
            Coordinates. Networks that do not answer a constant at `plain` stay as they are at `point`.
        share : float
            0 for the constants at `plain`, 1 for the answers at `point`.
        """
        size = self.logit_map.size
        fixed = fixed_between(self.logit_map, plain[:size])
        if self.bound_map is not None:
            fixed = np.concatenate([fixed, fixed_between(self.bound_map, plain[size:])])
        return np.where(fixed, point, share * point + (1.0 - share) * plain)

    def weights_of(self, index: Tensor) -> Array:
        """Give the weights of some rows, scaled to a mean of 1."""
        weights = np.ones(len(self.labels)) if self.weights is None else self.weights
        part = weights[index.numpy()]
        scaled: Array = part / part.mean()
        return scaled

    def split(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Part the logit map's coordinates from the bound map's."""
        size = self.logit_map.size
        return coordinates[:size], coordinates[size:]

    def value(self, coordinates: Array) -> float:
        """Return the objective."""
        return self(coordinates)[0]

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the objective and its gradient."""
        x = torch.tensor(coordinates, dtype=torch.float64, requires_grad=True)
        own, others = self.split(x)
        parameters = self.logit_map.parameters_from(own)
        mapped = functional_call(self.logit_map, parameters, (self.source,))
        outputs = [mapped, *self.box(mapped, others)]
        losses, *slopes = dense_loss(
            np.ascontiguousarray(mapped.detach().numpy()),
            self.labels,
            *(np.ascontiguousarray(bound.detach().numpy()) for bound in outputs[1:]),
        )
        value = mean_of(losses, self.weights)
        return self.finish(x, value, outputs, slopes, self.logit_map.penalty(parameters))

    def finish(
        self,
        x: Tensor,
        value: float,
        outputs: list[Tensor],
        slopes: Sequence[Array],
        penalty: Tensor | None = None,
    ) -> tuple[float, Array]:
        """Carry the derivatives of each row's loss in some outputs on to the coordinates x."""
        if self.weights is not None:
            slopes = [(slope.T * self.weights).T if slope.size else slope for slope in slopes]
        pairs = [
            (out, torch.from_numpy(slope) / len(self.labels))
            for out, slope in zip(outputs, slopes, strict=True)
            if out.requires_grad
        ]
        if penalty is not None:
            value += float(penalty.detach())
            if penalty.requires_grad:
                pairs.append((penalty, torch.ones_like(penalty)))
        if not math.isfinite(value):
            return math.inf, np.zeros(len(x))
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [slope for _, slope in pairs])
        gradient = x.grad if x.grad is not None else torch.zeros_like(x)
        return value, gradient.numpy()

    def box(self, mapped: Tensor, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Give lower and upper of every row, each (N,)."""
        if self.bound_map is None:
            ones = torch.ones(len(mapped), dtype=torch.float64)
            return torch.zeros_like(ones), ones
        bounds = call(self.bound_map, "box", self.bound_map.parameters_from(coordinates), mapped)
        lower, upper = (bound.expand(len(mapped), 1)[:, 0] for bound in bounds)
        return lower, upper


class _Method(torch.nn.Module):
    """Lets `functional_call` reach another method of a map than `forward`."""

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        super().__init__()
        self.module, self.name = module, name

    def forward(self, given: Tensor) -> Any:
        return getattr(self.module, self.name)(given)


def call(module: torch.nn.Module, name: str, parameters: dict[str, Tensor], given: Tensor) -> Any:
    """Call a method of a map with other parameters than its own."""
    named = {f"module.{key}": value for key, value in parameters.items()}
    return functional_call(_Method(module, name), named, (given,))
