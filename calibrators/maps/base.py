"""What both stages of a calibrator are: a formula, its vector-Jacobian product, and where a fit begins.

A map is one file. The calibrators on arrays and on tensors, the stored form and its checks, the catalogue of
methods and the objective of fits are derived from what a class here declares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import numpy as np

from boxcal.calibrators import array_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import MissingDataError
from boxcal.calibrators.maps.parameters import Array, Gradients, Map, Parameters, Solution, Values, Vjp
from boxcal.calibrators.threads import block_rows, over_blocks

Reads = Literal["logits", "features", "inputs"]


class LogitMap(Map):
    """The first stage of a calibrator, `T` in `p = BCSoftmax(T(g); a, b)`: from what it `reads` to logits."""

    reads: Reads = "logits"
    """What it takes: logits (N, K), features (N, D), or logits of inputs that the map has shifted."""

    is_listed: bool = True
    """Whether `fit` takes its name."""

    combines: bool = False
    """Whether the catalogue lists it with a box and with logit bounding, as the paper's tables do."""

    contains_ts: bool = False
    """Whether the map can be `ts`; its fit then begins there, and is never above it."""

    stacked: Literal["never", "of two classes", "of more classes", "always"] = "never"
    """Where `auto` takes it as a component of a stack."""

    has_onnx_form: bool = True
    """Whether ONNX has operators for its formula."""

    normalises: bool = False
    """Whether its answers are log probabilities: as `ts`, but for a number added to each row."""

    mixes_labels: bool = False
    """Whether the loss of a row follows from its label's probabilities alone, by `of_labels`, as of `ets`."""

    perturbations: int = 0
    """How many descents a fit makes around the best end, for maps whose loss has kinks."""

    starts_kept: int = 3
    """How many of the starts a fit follows: those that look best on some of the rows."""

    @property
    def width(self) -> int:
        """How many columns it takes: K, or D for features."""
        return self.num_classes

    @property
    def tempering(self) -> RowTemperature | None:
        """The map that divides every row by a temperature, if it does, or if one that does comes first."""
        return None

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Map (N, K) logits, or (N, D) features, to (N, K) logits, by the operations of a library."""
        raise NotImplementedError

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Give the mapped logits, and their vector-Jacobian product.

        `scores`: (n, K) or (n, D). Returns `mapped`: (n, K); `back`: `back(by_mapped, through)` gives the
        derivatives in the searched parameters, and in the scores if `through`, for those in the mapped
        logits.
        """
        raise NotImplementedError

    def precompute(self, scores: Array) -> Array | None:
        """Compute what a fit need compute only once of rows, (N, ...); None where there is nothing."""
        del scores
        return None

    def __call__(self, scores: Values) -> Values:
        """Map rows of an array, or of a tensor, by which the result can be differentiated."""
        if isinstance(scores, np.ndarray):
            with np.errstate(all="ignore"):  # what is not finite is refused by the operator
                return self.formula(array_ops, self.parameters, scores)
        from boxcal.calibrators import tensor_ops  # noqa: PLC0415 - only tensors need torch

        return tensor_ops.applied(self.formula, self.parameters, scores)

    def over(self, source: Array) -> Array:
        """Map many rows (N, D) of an array to logits (N, K), in blocks and a few threads."""
        mapped = np.empty((len(source), self.num_classes))

        def work(rows: slice) -> None:
            mapped[rows] = self(source[rows])

        for _ in over_blocks(work, len(source), block_rows(source.shape[1])):
            pass
        return mapped

    def starts(self) -> Sequence[Array]:
        """Coordinates from which a fit descends; the first one is the identity or nearest to it."""
        return []

    def tempered(self, log_temperature: float) -> Sequence[Array]:
        """Coordinates at which a map that `contains_ts` only divides by a temperature."""
        raise NotImplementedError

    def adopt(self, alone: LogitMap) -> None:
        """Take over what the fit of the map alone has chosen besides coordinates, for a joint fit."""
        del alone

    def edges(self) -> Mapping[str, str]:
        """Name what ended at the edge of its range, each with a sentence for users."""
        return {}

    def penalty(self, p: Parameters) -> tuple[float, Gradients] | None:
        """Regularisation added to the mean loss while fitting, and its derivatives in the parameters."""
        del p
        return None

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Take from the data what is not fitted: a head, the scale of a network's inputs."""

    def solve(self, data: ValidationSet, tick: Callable[[float], None]) -> Solution | None:
        """Fit the map in its own way; None leaves it to descents from the starts."""
        del data, tick
        return None

    @property
    def input_shift(self) -> Array | None:
        """What to add to a backbone's inputs, for a map that reads them."""
        return None

    def release(self) -> None:
        """Release what only the fit needs."""

    def source(self, data: ValidationSet) -> Array:
        """Pick what the map reads."""
        if self.reads == "logits":
            return data.scores
        given = data.features if self.reads == "features" else data.inputs
        partner = data.head if self.reads == "features" else data.backbone
        if given is None or partner is None:
            needed = "features and the head" if self.reads == "features" else "inputs and the backbone"
            raise MissingDataError(f"the method {self.name!r} needs {needed}, and they were not given")
        array: Array = given
        return array


class RowTemperature(LogitMap):
    """A map that divides every row by a temperature of its own, and so keeps the order of the classes."""

    @property
    def tempering(self) -> RowTemperature | None:
        """Give this map, the one that divides."""
        return self

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Multiply (N, K) logits by 1 / temperature."""
        return scores * self.inverse_formula(ops, p, scores)

    def inverse_formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Give 1 / temperature, () or (N, 1), for (N, K) logits."""
        raise NotImplementedError

    def reading(self, columns: Array) -> Array:
        """Give what the temperatures depend on, of the T largest logits of rows less their mean (T, N)."""
        return columns

    def inverse(self, p: Parameters, reading: Array) -> tuple[Array, Vjp]:
        """Give 1 / temperature of every row (N,), and from derivatives in it those in the parameters.

        The way back gives those in what is read too, None where there are none.
        """
        raise NotImplementedError

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Multiply the rows: with r = 1 / temperature, dT = r dg + g dr."""
        columns, order = array_ops.top_columns(scores)
        inverse, inverse_back = self.inverse(p, self.reading(columns))

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            gradients, by_reading = inverse_back(array_ops.row_sum(by_mapped * scores)[:, 0])
            if not through:
                return gradients, None
            by_scores = by_mapped * inverse[:, None]
            if by_reading is not None:
                by_scores += array_ops.top_columns_back(self.reading_back(columns, by_reading), order, scores)
            return gradients, by_scores

        return scores * inverse[:, None], back

    def reading_back(self, columns: Array, by_reading: Array) -> Array:
        """Give derivatives in the columns for those in what is read of them."""
        del columns
        return by_reading


class BoxMap(Map):
    """The second stage of a calibrator, `(a, b)`: from mapped logits to bounds of all classes of each row."""

    def formula(self, ops: ModuleType, p: Parameters, logits: Values) -> tuple[Values, Values]:
        """Give lower and upper bound, each () or (N, 1), by the operations of a library."""
        raise NotImplementedError

    def __call__(self, logits: Values) -> tuple[Values, Values]:
        """Give lower and upper bound of rows of an array or a tensor, each () or (N, 1)."""
        if isinstance(logits, np.ndarray):
            return self.formula(array_ops, self.parameters, logits)
        from boxcal.calibrators import tensor_ops  # noqa: PLC0415 - only tensors need torch

        bounds: tuple[Values, Values] = tensor_ops.applied(self.formula, self.parameters, logits)
        return bounds

    def reading(self, columns: Array) -> Array:
        """Give what the bounds depend on, of the T largest logits of rows less their mean (T, N)."""
        return columns

    def reading_back(self, columns: Array, by_reading: Array) -> Array:
        """Give derivatives in the columns for those in what is read of them."""
        del columns
        return by_reading

    def bounds(self, p: Parameters, reading: Array) -> tuple[Array, Array, Vjp]:
        """Give lower and upper bound of every row, each (N,), and the way back.

        `back(by_lower, by_upper)` gives the derivatives in the parameters, and in what is read, None where
        there are none.
        """
        raise NotImplementedError

    def prepare(self, logits: Array) -> None:
        """Take from the mapped logits what is not fitted."""
