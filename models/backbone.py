"""What the service asks of a backbone: it stands between the batcher's inputs and the calibrator's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from boxcal.models.preprocessing import Preprocessing


class Backbone(Protocol):
    """A classifier without its last step: a batch of inputs becomes a batch of logits.

    At most `passes` threads at a time call it.

    Attributes
    ----------
    name
        The specification it was loaded by, such as `digits` or `torchvision:vit_b_16`.
    labels
        The K class names, in the order of the logits.
    fingerprint
        sha256 over the weights, hexadecimal: it names the backbone that a calibrator belongs to.
    device
        Where the forward pass runs, such as `cpu` or `cuda:0`.
    input_shape
        Shape of one input, without the batch dimension.
    preprocessing
        The way from an image to one input; None where the backbone reads tensors only.
    passes
        How many calls side by side keep the device busy: on a CPU one for each core, otherwise one.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def labels(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def fingerprint(self) -> str: ...  # noqa: D102
    @property
    def device(self) -> str: ...  # noqa: D102
    @property
    def input_shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def preprocessing(self) -> Preprocessing | None: ...  # noqa: D102

    @property
    def num_classes(self) -> int:
        """K."""
        ...

    @property
    def passes(self) -> int: ...  # noqa: D102

    def __call__(self, batch: torch.Tensor, *, alone: bool = True) -> torch.Tensor:
        """Float32 logits (N, K) on the CPU of a float32 batch (N, *input_shape) on the CPU.

        A call that is `alone` may use the whole device; one that has others beside it keeps to its share.
        """
        ...

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Run once at each batch size, so that no request pays for the first pass."""
        ...


@runtime_checkable
class OpenBackbone(Backbone, Protocol):
    """A backbone that can be looked into: what calibrators need that read features or inputs."""

    @property
    def head(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weight (K, D) and bias (K,) of the linear layer that makes the logits; None where none does."""
        ...

    def features(self, batch: torch.Tensor) -> torch.Tensor:
        """Float32 features (N, D) on the CPU: what the head takes."""
        ...

    def differentiable(self, batch: torch.Tensor) -> torch.Tensor:
        """Float32 logits (N, K) on the CPU that can be differentiated in the inputs."""
        ...
