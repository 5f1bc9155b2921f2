"""A torch network as a backbone: a batch to its device, the forward pass, the logits back."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from models.errors import UnusableDevice, UnusableInput
from models.pieces import Pieces, padded, usable_cores
from models.preprocessing import Preprocessing

SMALL = 500_000  # parameters
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchBackbone:
    """A network, in evaluation mode, on one device.

    Parameters
    ----------
    name
        The specification it was loaded by.
    network
        Maps (N, *input_shape) to logits (N, K).
    labels
        The K class names.
    input_shape
        Shape of one input, without the batch dimension.
    preprocessing
        The way from a picture to an input; None where the backbone reads tensors only.
    device
        `auto`, `cpu`, `cuda` or `cuda:N`.
    precision
        `float32`, `bfloat16` or `float16`: of the weights and of the forward pass; logits are float32.
    fingerprint
        sha256 that names the weights; by default of the network's parameters and buffers.
    batch_sizes
        Smallest and largest batch the network takes; others are padded by repetition or cut.
    """

    def __init__(
        self,
        name: str,
        network: nn.Module,
        *,
        labels: Sequence[str],
        input_shape: tuple[int, ...],
        preprocessing: Preprocessing | None,
        device: str,
        precision: str,
        fingerprint: str | None = None,
        batch_sizes: tuple[int, int | None] = (1, None),
    ) -> None:
        self.name = name
        self.labels = tuple(labels)
        self.input_shape = input_shape
        self.preprocessing = preprocessing
        self.fingerprint = fingerprint or tensors_fingerprint(network.state_dict())
        self._smallest, self._largest = batch_sizes
        self._device = resolve_device(device)
        self._dtype = PRECISIONS[precision]
        # A network as small as the digits' is done before a second thread has begun.
        parallel = self._device.type == "cpu" and usable_cores() > 1 and parameter_count(network) > SMALL
        self._pieces = Pieces() if parallel else None
        self._network = network.to(self._device, self._dtype).requires_grad_(False)

    @property
    def num_classes(self) -> int:
        """K."""
        return len(self.labels)

    @property
    def device(self) -> str:
        """Where the forward pass runs."""
        return str(self._device)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Float32 logits (N, K) on the CPU of a float32 batch (N, *input_shape) on the CPU.

        Raises
        ------
        UnusableInput
            If the inputs do not have `input_shape`.
        """
        if batch.shape[1:] != self.input_shape:
            raise UnusableInput(
                f"{self.name} reads inputs of shape {self.input_shape}, got {tuple(batch.shape[1:])}."
            )
        if self._pieces is not None and len(batch) > 1:
            return self._pieces.run(self._forward, batch, self._smallest, self._largest)
        return torch.cat([self._forward(piece) for piece in torch.split(batch, self._largest or len(batch))])

    def _forward(self, piece: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            inputs = padded(piece, self._smallest).to(self._device).to(self._dtype)
            logits: torch.Tensor = self._network(inputs)
            return logits[: len(piece)].to("cpu", torch.float32)

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Run once at each batch size, so that no request pays for the first pass."""
        for size in batch_sizes:
            self(torch.zeros(size, *self.input_shape))


def resolve_device(device: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into a device that is there.

    Raises
    ------
    UnusableDevice
        If the device is unknown or absent.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise UnusableDevice(
            f"Unknown device {device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'."
        ) from error
    if resolved.type not in {"cpu", "cuda"}:
        raise UnusableDevice(f"Unknown device {device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'.")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise UnusableDevice(f"Device {device!r} was asked for, but torch finds no usable CUDA device here.")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise UnusableDevice(
            f"Device {device!r} was asked for, but there are only {torch.cuda.device_count()} CUDA devices."
        )
    return resolved


def parameter_count(network: nn.Module) -> int:
    """How many numbers the network has learned."""
    return sum(parameter.numel() for parameter in network.parameters())


def tensors_fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Compute sha256 over names, dtypes, shapes and values: independent of the file format."""
    digest = hashlib.sha256()
    for key in sorted(tensors):
        value = tensors[key].detach().cpu().contiguous()
        digest.update(f"{key} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
