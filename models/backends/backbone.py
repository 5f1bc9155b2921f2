"""The interface of a backbone, which maps preprocessed inputs to the logits that a calibrator reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from boxcal.models.inputs.base import Inputs
from boxcal.models.inputs.images import Preprocessing

if TYPE_CHECKING:
    import torch


class Backbone(Protocol):
    """A classifier without its softmax; at most `passes` threads call it at the same time.

    Attributes
    ----------
    name
        The specification it was loaded by, such as `digits` or `torchvision:vit_b_16`.
    labels
        The K class names, in the order of the logits.
    fingerprint
        sha256, hexadecimal, of the weights and of every deviation from the defaults that changes the logits
        (declared preprocessing and outputs, precision): identifies the backbone of a calibrator.
    device
        Where the forward pass runs, such as `cpu` or `cuda:0`.
    inputs
        What a request carries to it: decodes inputs to samples, and makes a batch of samples.
    input_shape
        Shape of one sample.
    preprocessing
        Turns an image into one sample; None where the backbone reads no images.
    passes
        Number of concurrent calls that use the whole device: on a CPU one per core, otherwise one.
    """

    @property
    def name(self) -> str: ...
    @property
    def labels(self) -> tuple[str, ...]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def inputs(self) -> Inputs: ...
    @property
    def input_shape(self) -> tuple[int, ...]: ...
    @property
    def preprocessing(self) -> Preprocessing | None: ...

    @property
    def num_classes(self) -> int:
        """K."""
        ...

    @property
    def passes(self) -> int: ...

    def __call__(self, batch: Any, *, alone: bool = True) -> Any:
        """Float32 logits (N, K) for what `inputs.batch` makes of N samples: an array, or a tensor on the CPU.

        A call that is `alone` may use the whole device; one beside others uses its share.
        """
        ...

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Run once with each batch size, so that no request waits for a first pass."""
        ...


@runtime_checkable
class FeatureBackbone(Backbone, Protocol):
    """A backbone for calibrators that read features."""

    @property
    def head(self) -> tuple[Any, Any] | None:
        """Weight (K, D) and bias (K,) of the linear layer that returns the logits; None without one.

        Arrays, or tensors on the CPU, float32.
        """
        ...

    def features(self, batch: Any) -> Any:
        """Float32 features (N, D), the input of the head: an array, or a tensor on the CPU."""
        ...


@runtime_checkable
class OpenBackbone(FeatureBackbone, Protocol):
    """A backbone for calibrators that read features or inputs, which torch runs."""

    def differentiable(self, batch: Any) -> torch.Tensor:
        """Float32 logits (N, K) on the CPU, differentiable with respect to the inputs."""
        ...
