"""`nc`: neural clamping, a shift of the backbone's inputs and a temperature (Tang et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from boxcal.calibrators import tensor_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import MissingDataError
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.temperature import HIGHEST, LOWEST
from boxcal.calibrators.parametrised import Limits, parameter

WEIGHT = 0.1
"""Of the squared size of the shift, as in the paper."""
BATCH = 256


class NeuralClamping(LogitMap):
    """`T(x) = backbone(x + shift) / temperature`.

    A calibrator holds the shift and the temperature, not the backbone: whoever predicts adds `input_shift` to
    the inputs and hands over the logits that come of it. While it is fitted the map runs the backbone itself.
    """

    name = "nc"
    reads = "inputs"
    positive = ("temperature",)
    backbone: Callable[[Tensor], Tensor] | None = None

    def __init__(self, num_classes: int, shape: Sequence[int] = (1,)) -> None:
        super().__init__(num_classes)
        self.temperature = parameter(1.0)
        self.input_shift = parameter(torch.zeros(*shape))

    def forward(self, scores: Tensor) -> Tensor:
        """Divide logits by the temperature; while fitting, take inputs and run the backbone first."""
        if self.backbone is None:
            return scores / self.temperature
        shifted = [(batch + self.input_shift).to(batch.dtype) for batch in torch.split(scores, BATCH)]
        logits = torch.cat([self.backbone(batch).double() for batch in shifted])
        return tensor_ops.centred(logits) / self.temperature

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the log of the temperature, then the shift."""
        shift = coordinates[1:].reshape(self.input_shift.shape)
        return {"temperature": coordinates[0].exp(), "input_shift": shift}

    def prepare(self, data: ValidationSet) -> None:
        """Take the inputs' shape, and check that the backbone can be differentiated in them."""
        if data.inputs is None or data.backbone is None:
            return
        self.input_shift = parameter(torch.zeros(data.inputs.shape[1:]))
        probe = data.inputs[:1].clone().requires_grad_()
        with torch.enable_grad():
            if not data.backbone(probe).requires_grad:
                raise MissingDataError(
                    "the method 'nc' needs a backbone that can be differentiated in its inputs"
                )
        self.backbone = data.backbone

    def shift_of_inputs(self) -> Tensor:
        """Give the fitted shift."""
        return self.input_shift.detach()

    def release(self) -> None:
        """Let go of the backbone: from here on the map takes logits."""
        self.backbone = None

    def starts(self) -> Sequence[Tensor]:
        """No shift, at the temperatures 1 and 2."""
        still = torch.zeros(self.input_shift.numel(), dtype=torch.float64)
        return [torch.cat([torch.tensor([math.log(t)], dtype=torch.float64), still]) for t in (1.0, 2.0)]

    def limits(self) -> Limits:
        """Temperatures as for `ts`; any shift."""
        return [(math.log(LOWEST), math.log(HIGHEST)), *[(None, None)] * self.input_shift.numel()]

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Weigh the squared size of the shift."""
        return WEIGHT * parameters["input_shift"].square().sum()

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], num_classes: int) -> Self:
        """Make room for a shift of the stored shape."""
        shift = tensors.get("input_shift")
        return cls(num_classes, shift.shape if shift is not None else (1,))

    def describe(self) -> dict[str, Any]:
        """Return the temperature, and how large the shift is."""
        size = self.input_shift.norm().item()
        return {"temperature": self.temperature.item(), "input_shift_norm": size}
