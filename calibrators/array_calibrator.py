"""A fitted calibrator on NumPy arrays: what the service evaluates, without torch.

It is read from the bytes of a `Calibrator` and gives its answers: where the calibrator is a temperature and a
box to the last bit, otherwise within rounding of sums and exponentials.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from safetensors.numpy import save

from boxcal.calibrators import array_ops, stored
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.formulas import class_prior
from boxcal.calibrators.operator.meeting import meet
from boxcal.calibrators.plain_rows import PlainRows, plain_rows, solve_rows

Array = np.ndarray[Any, np.dtype[np.float64]]
Rows = np.ndarray[Any, np.dtype[np.floating[Any]]]
Box = tuple[Array, Array]
"""Lower and upper bounds, float64, each of a shape that broadcasts to (N, K)."""


@dataclass(frozen=True, slots=True, eq=False)
class CalibratedRows:
    """What a calibrator answers for N samples; see `Calibrated`."""

    probabilities: Array
    logits: Array
    box: Box
    relaxed: np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True, eq=False)
class ArrayCalibrator:
    """`p = BCSoftmax(T(g); a(g), b(g))` on arrays.

    Attributes
    ----------
    method
        The name it was fitted under.
    num_classes
        K.
    reads
        What a call takes: `logits`, `features`, or the logits of `inputs` that `input_shift` was added to.
    width
        Columns of what a call takes: K, or D for features.
    logit_map, bound_map
        The functions T, and (a, b) of the mapped logits.
    plain
        The short way for a temperature and a box; None for anything more.
    input_shift
        What to add to a backbone's inputs; None for all methods but `nc`.
    source
        The content of the bytes that it was read from.
    """

    method: str
    num_classes: int
    reads: str
    width: int
    logit_map: Callable[[Array], Array]
    bound_map: Callable[[Array], Box]
    plain: PlainRows | None
    input_shift: Array | None
    source: stored.Stored

    @classmethod
    def uncalibrated(cls, num_classes: int) -> Self:
        """Build the calibrator that changes nothing: softmax of the logits."""
        spec = {
            "format": stored.FORMAT, "version": stored.VERSION, "method": "uncalibrated",
            "num_classes": num_classes, "reads": "logits", "parameters": {"lower": 0.0, "upper": 1.0},
        }  # fmt: skip
        box = {"bound_map.lower": np.array(0.0), "bound_map.upper": np.array(1.0)}
        return cls._built(stored.Stored("uncalibrated", num_classes, spec, box))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `Calibrator.to_bytes` wrote.

        Raises
        ------
        ArtifactError
            If the bytes are damaged, or not a calibrator's.
        """
        return cls._built(stored.read(data), data)

    @classmethod
    def _built(cls, source: stored.Stored, data: bytes = b"") -> Self:
        found = stored.stages(source)
        if found is None:
            return cls(source.method, source.num_classes, *_modules(data), source)
        first, *others = found.logit_maps
        box, centred = found.box, source.centred and first.formula.reads != "features"
        short = None
        if not others:
            short = plain_rows((first.name, first.parameters), (box.name, box.parameters), source.num_classes)
        return cls(
            source.method,
            source.num_classes,
            first.formula.reads,
            found.width,
            lambda rows: _through(found.logit_maps, array_ops.centred(rows) if centred else rows),
            lambda rows: box.formula.apply(array_ops, box.parameters, rows),
            short,
            getattr(first.parameters, "input_shift", None),
            source,
        )

    def __call__(self, rows: Rows) -> Array:
        """Give probabilities (N, K) for logits (N, K), or features (N, D)."""
        return self.calibrate(rows).probabilities

    def calibrate(self, rows: Rows, request: Box | None = None) -> CalibratedRows:
        """Calibrate a batch; the fitted box yields to the one asked for as little as it must.

        Parameters
        ----------
        rows
            (N, K) logits of any floating dtype, or (N, D) features where `reads` says so.
        request
            Feasible bounds: one pair for all rows, or a row per sample.

        Raises
        ------
        InvalidDataError
            The rows have another width.
        ValueError
            Naming the row that has no answer.
        """
        wide = np.ascontiguousarray(rows, np.float64)
        if wide.ndim != 2 or wide.shape[1] != self.width:
            raise InvalidDataError(
                f"this calibrator takes {self.reads} of shape (N, {self.width}), not {rows.shape}"
            )
        relaxed = np.zeros(len(wide), np.bool_)
        if self.plain is not None and request is None:
            probabilities, mapped = self.plain(wide)
            return CalibratedRows(probabilities, mapped, self.bound_map(mapped), relaxed)
        with np.errstate(all="ignore"):  # what overflows is refused by the operator
            mapped = np.ascontiguousarray(self.logit_map(wide))
            box = self.bound_map(mapped)
            if request is not None:
                lower, upper, yielded = meet(array_ops, box, request, self.num_classes, always=False)
                box = lower, upper
                relaxed |= yielded.any(axis=-1) if yielded.ndim else yielded
        return CalibratedRows(solve_rows(mapped, *box), mapped, box, relaxed)

    def adjusted(self, offsets: Array) -> Self:
        """Build the calibrator that adds offsets (K,) to the mapped logits; its bounds stay."""
        name = f"{stored.adjusted_method(self.method)}+em"
        p = SimpleNamespace(adjustment_offsets=offsets, adjustment_temperature=1.0)
        inner = self.logit_map
        return replace(
            self, method=name, logit_map=lambda rows: class_prior(array_ops, p, inner(rows)), plain=None
        )

    def to_bytes(self) -> bytes:
        """Write what it was read from."""
        return save(self.source.tensors, metadata={"spec": json.dumps(self.source.spec, sort_keys=True)})

    def __repr__(self) -> str:
        """Return the method."""
        return f"ArrayCalibrator({self.method!r}, {self.num_classes})"


def _through(stages: tuple[stored.Stage, ...], rows: Array) -> Array:
    """Apply one formula after another."""
    for stage in stages:
        rows = stage.formula.apply(array_ops, stage.parameters, rows)
    return rows


def _modules(
    data: bytes,
) -> tuple[str, int, Callable[[Array], Array], Callable[[Array], Box], None, Array | None]:
    """Evaluate a map that has no formula by its module, which needs torch."""
    import torch  # noqa: PLC0415 - only maps without a formula need it

    from boxcal.calibrators.calibrator import Calibrator  # noqa: PLC0415

    one = Calibrator.from_bytes(data)

    def logit_map(rows: Array) -> Array:
        with torch.no_grad():
            mapped: Array = one.mapped(torch.from_numpy(rows)).numpy()
        return mapped

    def bound_map(rows: Array) -> Box:
        with torch.no_grad():
            lower, upper = one.bound_map.box(torch.from_numpy(rows))
        return lower.numpy(), upper.numpy()

    shift = None if one.input_shift is None else one.input_shift.numpy()
    return one.reads, one.logit_map.width, logit_map, bound_map, None, shift
