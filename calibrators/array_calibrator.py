"""A fitted calibrator on NumPy arrays: what the service evaluates, without torch.

It gives the answers of a `Calibrator` of the same bytes: where the calibrator is a temperature and a box to
the last bit, otherwise within rounding of sums and exponentials.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from boxcal.calibrators import array_ops, artifact
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.maps.base import BoxMap, LogitMap, Reads
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.class_prior import ClassPriorAdjustment
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.parameters import Values
from boxcal.calibrators.maps.temperature import TemperatureScaling
from boxcal.calibrators.method import adjusted_method
from boxcal.calibrators.operator.constants import meet
from boxcal.calibrators.row_statistics import Sketch
from boxcal.calibrators.temperature_fast_path import TemperatureRows, solve_rows, temperature_rows

INPUTS_AT_ONCE = 256
"""How many inputs a backbone is handed in one batch."""
NO_NUMBER = re.compile(r"\bnan\b| inf\b|^every logit")
Array = np.ndarray[Any, np.dtype[np.float64]]
Rows = np.ndarray[Any, np.dtype[np.floating[Any]]]
Box = tuple[Array, Array]
"""Lower and upper bounds, float64, each of a shape that broadcasts to (N, K)."""


@dataclass(frozen=True, slots=True, eq=False)
class CalibratedArrays:
    """What a calibrator answers for N samples; see `Calibrated`."""

    probabilities: Array
    logits: Array
    box: Box
    relaxed: np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(repr=False, eq=False)
class TwoStages:
    """A logit map T and a bound map (a, b): what calibrators on arrays and on tensors share.

    `classes`: the names of the classes in the order of the columns; None where they are their indices.
    `sketch`: of the rows that it was fitted to; None where they are not known.
    """

    method: str
    logit_map: LogitMap
    bound_map: BoxMap
    num_classes: int
    _: KW_ONLY
    classes: Sequence[str] | None = None
    sketch: Sketch | None = None

    def __post_init__(self) -> None:
        if self.classes is not None:
            is_named = list(self.classes) != [str(k) for k in range(self.num_classes)]
            self.classes = tuple(self.classes) if is_named else None

    @classmethod
    def uncalibrated(cls, num_classes: int) -> Self:
        """Build the calibrator that changes nothing: softmax of the logits."""
        return cls("uncalibrated", IdentityMap(num_classes), ConstantBounds(num_classes), num_classes)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` wrote."""
        return cls(**artifact.read(data)._asdict())

    @property
    def on_arrays(self) -> ArrayCalibrator:
        """The calibrator of the same maps that takes arrays."""
        return ArrayCalibrator(**self.parts)

    @property
    def parts(self) -> dict[str, Any]:
        """What the calibrator is built of."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def fitted_to(self, data: ValidationSet) -> Self:
        """Return the same calibrator with the names of the classes, and a sketch of the rows, of its data."""
        return replace(self, classes=data.classes, sketch=data.sketch)

    def to_bytes(self) -> bytes:
        """Serialise as safetensors with a JSON spec."""
        maps = self.logit_map, self.bound_map
        return artifact.write(*maps, self.spec, classes=self.classes, sketch=self.sketch)

    @property
    def reads(self) -> Reads:
        """What a call takes: `logits`, `features`, or the logits of `inputs` that the map has shifted."""
        return self.logit_map.reads

    @property
    def width(self) -> int:
        """Columns of what a call takes: K, or D for features."""
        return self.logit_map.width

    @property
    def fitted_bounds(self) -> tuple[float, float] | None:
        """The learned constant bounds (lower, upper); None where none were learned or they vary by sample."""
        bounds = self.bound_map
        return bounds.pair if isinstance(bounds, ConstantBounds) and not bounds.is_vacuous else None

    @property
    def spec(self) -> dict[str, Any]:
        """The calibrator for people: method, number of classes, and every parameter that fits on a screen."""
        return {
            "method": self.method,
            "num_classes": self.num_classes,
            "reads": self.reads,
            "parameters": {
                **self.logit_map.describe(),
                **self.bound_map.describe(),
            },
        }

    @cached_property
    def plain(self) -> TemperatureRows | None:
        """The short way for a temperature and a constant box; None for anything more."""
        return temperature_rows(self.logit_map, self.bound_map)

    def mapped(self, scores: Values) -> Values:
        """Give the mapped logits (N, K) of float64 scores, an array or a tensor."""
        # A temperature alone reads no offset; centring would round small differences away, which order ties.
        is_tempered = isinstance(self.logit_map, IdentityMap | TemperatureScaling)
        if self.reads == "features" or is_tempered:
            return self.logit_map(scores)
        if isinstance(scores, np.ndarray):
            return self.logit_map(array_ops.centred(scores))
        from boxcal.calibrators import tensor_ops  # noqa: PLC0415 - only tensors need torch

        return self.logit_map(tensor_ops.centred(scores))

    def adjusted(self, offsets: Array, temperature: float = 1.0, *, suffix: str = "+em") -> Self:
        """Build the calibrator whose logits are `(z + offsets) / temperature`; its bounds stay.

        An adjustment of an adjusted calibrator is one adjustment of the same map.

        `offsets`: (K,) in nats.
        """
        first, added, divisor = self.logit_map, np.asarray(offsets, np.float64), float(temperature)
        if isinstance(first, Chain) and isinstance(first.second, ClassPriorAdjustment):
            earlier = first.second.parameters
            added = earlier["adjustment_offsets"] + added * earlier["adjustment_temperature"]
            divisor *= earlier["adjustment_temperature"].item()
            first = first.first
        second = ClassPriorAdjustment(
            self.num_classes, {"adjustment_offsets": added, "adjustment_temperature": divisor}
        )
        name = adjusted_method(self.method) + suffix
        return replace(self, method=name, logit_map=Chain(first, second))

    def _check_width(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[1] != self.width:
            raise InvalidDataError(
                f"this calibrator takes {self.reads} of shape (N, {self.width}), not {tuple(shape)}"
            )

    def _refused(self, rows: Array, error: ValueError) -> ValueError:
        """Name the number among the rows given from which a map has made the one that an error names."""
        wrong = np.argwhere(~np.isfinite(rows))
        if not len(wrong) or not NO_NUMBER.search(str(error)):
            return error
        row, column = wrong[0].tolist()
        what = "logit of class" if self.reads == "logits" else "feature"
        return ValueError(f"the {what} {column} in row {row} is {rows[row, column].item()}")

    def __repr__(self) -> str:
        """Return the method and its parameters."""
        return f"{type(self).__name__}({self.method!r}, {self.spec['parameters']})"


class ArrayCalibrator(TwoStages):
    """`p = BCSoftmax(T(g); a(g), b(g))` on arrays."""

    @property
    def on_arrays(self) -> ArrayCalibrator:
        return self

    @property
    def input_shift(self) -> Array | None:
        """What to add to a backbone's inputs before it makes the logits; None for all methods but `nc`."""
        return self.logit_map.input_shift

    def source(self, data: ValidationSet) -> Array:
        """Give what a call takes for every sample of a set: logits, features, or logits of shifted inputs.

        Raises MissingDataError if the set misses it.
        """
        given, shift = self.logit_map.source(data), self.input_shift
        if shift is None or data.backbone is None:
            return given
        import torch  # noqa: PLC0415 - the backbone is one of torch

        with torch.no_grad():
            parts = torch.split(torch.from_numpy(given), INPUTS_AT_ONCE)
            logits = [data.backbone((part + torch.from_numpy(shift)).float()).double() for part in parts]
            return np.asarray(torch.cat(logits).numpy())

    def __call__(self, rows: Rows) -> Array:
        """Give probabilities (N, K) for logits (N, K), or features (N, D)."""
        return self.calibrate(rows).probabilities

    def calibrate(self, rows: Rows, request: Box | None = None) -> CalibratedArrays:
        """Calibrate a batch; the fitted box yields to the one asked for as little as it must.

        `rows`: (N, K) logits of any floating dtype, or (N, D) features where `reads` says so.
        """
        wide = np.ascontiguousarray(rows, np.float64)
        self._check_width(np.shape(rows))
        relaxed = np.zeros(len(wide), np.bool_)
        if self.plain is not None and request is None:
            probabilities, mapped = self.plain(wide)
            return CalibratedArrays(probabilities, mapped, self.bound_map(mapped), relaxed)
        with np.errstate(all="ignore"):  # what overflows is refused by the operator
            mapped = np.ascontiguousarray(self.mapped(wide))
            box = self.bound_map(mapped)
            if request is not None:
                lower, upper, yielded = meet(array_ops, box, request, self.num_classes, always=False)
                box = lower, upper
                relaxed |= yielded.any(axis=-1) if yielded.ndim else yielded
        try:
            return CalibratedArrays(solve_rows(mapped, *box), mapped, box, relaxed)
        except ValueError as error:
            raise self._refused(wide, error) from error
