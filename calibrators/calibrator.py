"""The calibrator: a map on the logits, then a box, then one operator; the last step before an answer.

It can be exported as an ONNX model, to be deployed beside the classifier without boxcal.
"""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from boxcal.calibrators.array_calibrator import ArrayCalibrator, TwoStages
from boxcal.calibrators.errors import ExportError, InvalidDataError
from boxcal.calibrators.operator import Bounds, box_constrained_softmax


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


class Calibrator(TwoStages):
    """`p = BCSoftmax(T(g); a(g), b(g))` on tensors: a logit map T, a bound map (a, b), and the operator."""

    @property
    def input_shift(self) -> Tensor | None:
        """What to add to a backbone's inputs before it makes the logits; None for all methods but `nc`."""
        shift = self.logit_map.input_shift
        return None if shift is None else torch.from_numpy(shift)

    @classmethod
    def on_tensors(cls, one: ArrayCalibrator) -> Calibrator:
        """Take the maps of a calibrator on arrays."""
        return cls(**one.parts)

    def __call__(self, logits: Tensor, bounds: Bounds | None = None) -> Tensor:
        """Give probabilities (N, K) in float64 for logits (N, K), inside the bounds if any are given.

        Differentiable in the logits; `isotonic` and `venn-abers`, which look values up in a table, give no
        gradient.

        Raises
        ------
        InvalidDataError
            If the logits do not have K columns.
        """
        return self.calibrate(logits, bounds).probabilities

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
            If the logits do not have K columns, or the features D, or the bounds another number of rows.
        ValueError
            If a logit is NaN or infinity, or -inf where the method has no answer to it.
        TypeError
            If the bounds are no `Bounds`.
        """
        scores = torch.as_tensor(logits)
        self._check_width(tuple(scores.shape))
        if not isinstance(bounds, Bounds | None):
            raise TypeError(f"bounds must be boxcal.Bounds(lower, upper), not {type(bounds).__name__}")
        if bounds is not None and len(bounds.shape) == 2 and bounds.shape[0] not in {1, len(scores)}:
            raise InvalidDataError(
                f"bounds for {bounds.shape[0]} rows cannot bound {len(scores)} rows of logits"
            )
        wide = (scores if self.logit_map.has_onnx_form else scores.detach()).to(torch.float64)
        relaxed = torch.zeros(scores.shape[0], dtype=torch.bool, device=scores.device)
        is_recorded = wide.requires_grad and torch.is_grad_enabled()
        if bounds is None and self.plain is not None and wide.device.type == "cpu" and not is_recorded:
            rows = self.plain(wide.detach().contiguous().numpy())
            probabilities, mapped = (torch.from_numpy(array) for array in rows)
            lower, upper = self.bound_map(mapped)
            return Calibrated(probabilities, mapped, lower, upper, relaxed)
        mapped = self.mapped(wide)
        try:
            effective = Bounds(*self.bound_map(mapped))
            if bounds is not None:
                effective, yielded = effective.yielding_to(bounds, self.num_classes)
                relaxed = yielded.expand(scores.shape[0])
            probabilities = box_constrained_softmax(mapped, effective.lower, effective.upper)
        except ValueError as error:
            raise self._refused(wide.detach().cpu().numpy(), error) from error
        return Calibrated(probabilities, mapped, effective.lower, effective.upper, relaxed)

    def to_onnx(self, path: str | os.PathLike[str], *, request_bounds: bool = False) -> None:
        """Write the calibrator as an ONNX model, which onnxruntime runs without boxcal.

        Its input is `logits` (or `features`) of shape (N, K), float32, its output `probabilities` of shape
        (N, K), float64; invalid rows give NaN. N is at least 1. Answers agree with this calibrator's to 1e-6.

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
            table: `isotonic` and `venn-abers`.
        """
        Path(path).write_bytes(export(self, request_bounds=request_bounds))


OPSET = 17


class _Graph(nn.Module):
    """What is recorded: the logit map, the bound map and the operator."""

    def __init__(self, calibrator: TwoStages) -> None:
        super().__init__()
        self.calibrator = calibrator

    def forward(self, scores: Tensor, lower: Tensor | None = None, upper: Tensor | None = None) -> Tensor:
        mapped = self.calibrator.mapped(scores.double())
        low, high = self.calibrator.bound_map(mapped)
        if lower is not None and upper is not None:
            low, high, _ = Bounds.meet(
                (low, high), (lower.double(), upper.double()), self.calibrator.num_classes
            )
        return box_constrained_softmax(mapped, low, high)


def export(calibrator: TwoStages, *, request_bounds: bool) -> bytes:
    """Give the ONNX model's bytes; see `Calibrator.to_onnx`."""
    if calibrator.logit_map.input_shift is not None:
        raise ExportError(
            f"the method {calibrator.method!r} shifts the classifier's inputs, which an ONNX model of the"
            " calibrator alone does not see"
        )
    if not calibrator.logit_map.has_onnx_form:
        raise ExportError(
            f"the method {calibrator.method!r} looks its answers up in tables, for which ONNX has no operator"
        )
    width, classes = calibrator.width, calibrator.num_classes
    names: list[str] = [calibrator.reads]
    examples = [torch.linspace(-1.0, 1.0, 2 * width).reshape(2, width)]
    if request_bounds:
        names += ["lower", "upper"]
        examples += [torch.zeros(2, classes), torch.ones(2, classes)]
    file: Any = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of classes is fixed, and torch warns about that
        torch.onnx.export(
            _Graph(calibrator),
            tuple(examples),
            file,
            dynamo=False,
            opset_version=OPSET,
            input_names=names,
            output_names=["probabilities"],
            dynamic_axes={name: {0: "N"} for name in [*names, "probabilities"]},
        )
    content: bytes = file.getvalue()
    return content
