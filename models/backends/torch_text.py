"""A torch network that reads tokens, as a backbone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from boxcal.models.backends.core_pool import usable_cores
from boxcal.models.backends.fingerprints import fingerprint_with
from boxcal.models.backends.torch_backbone import (
    PRECISIONS,
    SMALL,
    ThreadPerCorePool,
    parameter_count,
    resolve_device,
    tensors_fingerprint,
)
from boxcal.models.errors import UnusableInput
from boxcal.models.inputs.texts import TextInputs


class TorchTextBackbone:
    """A network, in evaluation mode, on one device.

    `network`: maps the inputs (N, length), by name, to logits (N, K).
    """

    preprocessing = None

    def __init__(
        self,
        name: str,
        network: nn.Module,
        *,
        inputs: TextInputs,
        labels: Sequence[str],
        device: str,
        precision: str,
    ) -> None:
        self.name = name
        self.labels = tuple(labels)
        self.inputs = inputs
        self.input_shape = inputs.shape
        self.fingerprint = fingerprint_with(
            tensors_fingerprint(network.state_dict()),
            precision=None if precision == "float32" else precision,
            pad=inputs.pad,
            max_length=inputs.max_length,
        )
        self._device = resolve_device(device)
        self._pool: ThreadPerCorePool | None = None
        if self._device.type == "cpu":
            self._pool = ThreadPerCorePool(1 if parameter_count(network) < SMALL else usable_cores())
        self._network = network.to(self._device, PRECISIONS[precision]).requires_grad_(False)

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def passes(self) -> int:
        """Number of concurrent calls that use the whole device."""
        return 1 if self._pool is None else self._pool.cores

    def __call__(self, batch: dict[str, NDArray[Any]], *, alone: bool = True) -> torch.Tensor:
        """Float32 logits (N, K) for what `inputs.batch` makes of N samples; else UnusableInput."""
        if not isinstance(batch, dict):
            raise UnusableInput(f"{self.name} reads its inputs by name.")
        given = {name: torch.from_numpy(np.ascontiguousarray(rows)) for name, rows in batch.items()}
        if alone or self._pool is None:
            return self._forward(given)
        return self._pool.on_one(self._forward, given)

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Run once with each batch size, so that no request waits for a first pass."""
        for size in batch_sizes:
            self(self.inputs.batch(self.inputs.blank(size)))

    def _forward(self, given: Any) -> torch.Tensor:
        with torch.inference_mode():
            logits: torch.Tensor = self._network(
                **{name: rows.to(self._device) for name, rows in given.items()}
            )
            return logits.to("cpu", torch.float32)
