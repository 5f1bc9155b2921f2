"""The calibrator: a map on the logits, then a box, then one operator; the last step before an answer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from boxcal.calibrators import artifact, tensor_ops
from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.bound_maps.constant import ConstantBounds
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.logit_maps.base import LogitMap, Reads
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.operator import Bounds, box_constrained_softmax
from boxcal.calibrators.plain_rows import plain_rows

INPUTS_AT_ONCE = 256
"""How many inputs a backbone is handed in one batch."""


@dataclass(frozen=True)
class Calibrated:
    """What a calibrator answers for a batch of N samples.

    Attributes
    ----------
    probabilities : Tensor
        (N, K) float64; every row sums to 1 and obeys the box to the last bit.
    logits : Tensor
        (N, K) float64, the mapped logits; they order the classes that a bound ties.
    lower, upper : Tensor
        The effective box, float64, broadcastable to (N, K).
    relaxed : Tensor
        (N,) bool: rows whose fitted bounds had to yield to those asked for.
    """

    probabilities: Tensor
    logits: Tensor
    lower: Tensor
    upper: Tensor
    relaxed: Tensor


class Calibrator:
    """`p = BCSoftmax(T(g); a(g), b(g))`: a logit map T, a bound map (a, b), and the operator.

    Parameters
    ----------
    method : str
        The name it was built by, such as `ts+pb`.
    logit_map : LogitMap
    bound_map : BoundMap
        Gives the box for a batch; vacuous for methods that learn none.
    num_classes : int
        K, at least 2.
    centred : bool
        Whether the logit map reads logits less the mean of their row, so that a number added to a row
        changes nothing. False for artifacts of version 1, whose maps read the logits as they come.
    """

    def __init__(
        self,
        method: str,
        logit_map: LogitMap,
        bound_map: BoundMap,
        num_classes: int,
        *,
        centred: bool = True,
    ) -> None:
        self.method = method
        self.logit_map = logit_map.requires_grad_(False).eval()
        self.bound_map = bound_map.requires_grad_(False).eval()
        self.num_classes, self.centred = num_classes, centred

    @classmethod
    def uncalibrated(cls, num_classes: int) -> Self:
        """Build the calibrator that changes nothing: softmax of the logits."""
        return cls("uncalibrated", Identity(num_classes), ConstantBounds(num_classes), num_classes)

    @property
    def reads(self) -> Reads:
        """What a call takes: `logits`, `features`, or the logits of `inputs` that the map has shifted."""
        return self.logit_map.reads

    @property
    def input_shift(self) -> Tensor | None:
        """What to add to a backbone's inputs before it makes the logits; None for all methods but `nc`."""
        return self.logit_map.shift_of_inputs()

    @property
    def fitted_bounds(self) -> tuple[float, float] | None:
        """The learned constant bounds (lower, upper); None where none were learned or they vary by sample."""
        bounds = self.bound_map
        if not isinstance(bounds, ConstantBounds) or bounds.is_vacuous:
            return None
        return bounds.lower.item(), bounds.upper.item()

    @property
    def spec(self) -> dict[str, Any]:
        """The calibrator for people: method, number of classes, and every parameter that fits on a screen."""
        return {
            "method": self.method,
            "num_classes": self.num_classes,
            "reads": self.reads,
            "parameters": {**self.logit_map.describe(), **self.bound_map.describe()},
        }

    @torch.no_grad()
    def source(self, data: ValidationSet) -> Tensor:
        """Give what a call takes for every sample of a set: logits, features, or logits of shifted inputs.

        Raises
        ------
        MissingDataError
            If the set misses it.
        """
        given, shift = self.logit_map.source(data), self.input_shift
        if shift is None or data.backbone is None:
            return given
        parts = torch.split(given, INPUTS_AT_ONCE)
        return torch.cat([data.backbone((part + shift).float()).double() for part in parts])

    def __call__(self, logits: Tensor, bounds: Bounds | None = None) -> Tensor:
        """Give probabilities (N, K) in float64 for logits (N, K), inside the bounds if any are given.

        Raises
        ------
        InvalidDataError
            If the logits do not have K columns.
        """
        return self.calibrate(logits, bounds).probabilities

    @torch.no_grad()
    def calibrate(self, logits: Tensor, bounds: Bounds | None = None) -> Calibrated:
        """Calibrate a batch; the fitted box yields to the one asked for as little as it must.

        Parameters
        ----------
        logits : Tensor
            (N, K) of any floating dtype, computed in float64; (N, D) features where `reads` says so.
        bounds : Bounds, optional
            Hard bounds on the probabilities: one box for all rows, or a row per sample.

        Raises
        ------
        InvalidDataError
            If the logits do not have K columns, or the features D.
        """
        scores = torch.as_tensor(logits)
        width = self.logit_map.width
        if scores.ndim != 2 or scores.shape[1] != width:
            raise InvalidDataError(
                f"this calibrator takes {self.reads} of shape (N, {width}), not {tuple(scores.shape)}"
            )
        wide = scores.to(torch.float64)
        relaxed = torch.zeros(scores.shape[0], dtype=torch.bool, device=scores.device)
        box = self.bound_map
        if bounds is None and isinstance(box, ConstantBounds) and wide.device.type == "cpu":
            short = plain_rows((self.logit_map.name, self.logit_map), (box.name, box), self.num_classes)
            if short is not None:
                rows = short(wide.detach().contiguous().numpy())
                probabilities, mapped = (torch.from_numpy(array) for array in rows)
                return Calibrated(probabilities, mapped, box.lower, box.upper, relaxed)
        mapped = self.mapped(wide)
        effective: Bounds = box(mapped)
        if bounds is not None:
            effective, yielded = effective.yielding_to(bounds, self.num_classes)
            relaxed = yielded.expand(scores.shape[0])
        probabilities = box_constrained_softmax(mapped, effective.lower, effective.upper)
        return Calibrated(probabilities, mapped, effective.lower, effective.upper, relaxed)

    def mapped(self, scores: Tensor) -> Tensor:
        """Give the mapped logits (N, K) of float64 scores, differentiably."""
        centred = tensor_ops.centred(scores) if self.centred and self.reads != "features" else scores
        mapped: Tensor = self.logit_map(centred)
        return mapped

    def to_bytes(self) -> bytes:
        """Serialise as safetensors with a JSON spec."""
        return artifact.write(self.logit_map, self.bound_map, self.spec, centred=self.centred)

    def to_onnx(self, path: str | os.PathLike[str], *, request_bounds: bool = False) -> None:
        """Write the calibrator as an ONNX model, which onnxruntime runs without boxcal.

        Its input is `logits` (or `features`) of shape (N, K), float32, its output `probabilities` of shape
        (N, K), float64; invalid rows give NaN. Answers agree with this calibrator's to 1e-6.

        Parameters
        ----------
        path
            The file to write.
        request_bounds
            Whether the model has further inputs `lower` and `upper`, float32 of shape (N, K): feasible bounds
            to which the fitted ones yield, as in `calibrate`.

        Raises
        ------
        ExportError
            For `nc`, which changes the classifier's inputs, and for the methods that look values up in a
            table: `histogram`, `isotonic` and `venn-abers`.
        """
        from boxcal.calibrators.onnx_export import export  # noqa: PLC0415 - only an export needs it

        Path(path).write_bytes(export(self, request_bounds=request_bounds))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Read what `to_bytes` wrote.

        Raises
        ------
        ArtifactError
            If the bytes are damaged, or not a calibrator's.
        """
        content = artifact.read(data)
        return cls(*content[:-1], centred=content.centred)

    def __repr__(self) -> str:
        """Return the method and its parameters."""
        return f"Calibrator({self.method!r}, {self.spec['parameters']})"
