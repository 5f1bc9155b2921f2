"""A torch network as a backbone, on a CPU or on CUDA, and its weights from files.

Launching the kernels of a Vision Transformer one by one takes a CPU several milliseconds, more than the GPU
needs for a small batch. A CUDA graph, recorded for a few batch sizes, is launched at once; a batch uses the
smallest graph it fits in.

Weights are read as data and never as code, and copied into a network that they fit exactly.
"""

from __future__ import annotations

import copy
import logging
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import nn

from boxcal.models import BackboneError, UnusableInput
from boxcal.models.backends.checks import fingerprint_with, tensors_fingerprint
from boxcal.models.backends.core_pool import CorePool, usable_cores
from boxcal.models.inputs.base import Inputs
from boxcal.models.inputs.images import ImageInputs, Preprocessing

SHOWN = 3


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read a `.safetensors` file, or a `.pth` or `.pt` one that holds tensors only."""
    if not path.is_file():
        raise BackboneError(f"The weights file {path} does not exist.")
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError  # noqa: PLC0415
        from safetensors.torch import load_file  # noqa: PLC0415

        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise BackboneError(f"{path} is not a readable safetensors file: {error}") from error
    if path.suffix not in {".pth", ".pt"}:
        raise BackboneError(f"{path}: weights are read from .safetensors, .pth or .pt, not {path.suffix!r}.")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise BackboneError(
            f"{path} holds more than tensors or is damaged; it was not unpickled. Save the state_dict()."
        ) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        raise BackboneError(f"{path} is not a readable PyTorch file: {error}") from error
    if isinstance(content, dict) and isinstance(content.get("state_dict"), dict):
        content = content["state_dict"]
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in content.items()
    ):
        raise BackboneError(f"{path} holds no state_dict: expected a dictionary of named tensors.")
    return content


def load_into(network: nn.Module, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Copy weights into a network."""
    expected = network.state_dict()
    wrong = {
        "misses": [key for key in expected if key not in weights],
        "has unknown": [key for key in weights if key not in expected],
    }
    parts = [f"{what} {_some(keys)}" for what, keys in wrong.items() if keys]
    if parts:
        raise BackboneError(f"{path} does not fit the network: it {' and '.join(parts)}.")
    for key, value in expected.items():
        if weights[key].shape != value.shape:
            raise BackboneError(
                f"{path} does not fit the network: {key} has shape {tuple(weights[key].shape)}, "
                f"expected {tuple(value.shape)}."
            )
        if value.is_floating_point() and not weights[key].is_floating_point():
            raise BackboneError(f"{path}: {key} has dtype {weights[key].dtype}, expected {value.dtype}.")
    network.load_state_dict(weights)


def _some(keys: list[str]) -> str:
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return ", ".join(keys[:SHOWN]) + more


WARM_UP_PASSES = 3  # libraries choose algorithms and allocate workspaces in these


@dataclass(frozen=True, slots=True)
class Recorded:
    """One graph, its input and output memory on the GPU, and pinned memory for the copy of the inputs."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    logits: torch.Tensor
    pinned: torch.Tensor


class CudaGraphs:
    """Graphs of one network, by batch size; used by one thread at a time.

    `network`: maps (N, *input_shape) of `dtype` on `device` to (N, K), in evaluation mode.
    """

    def __init__(
        self, network: nn.Module, input_shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._network, self._input_shape, self._device, self._dtype = network, input_shape, device, dtype
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[int, Recorded] = {}

    def record(self, size: int) -> None:
        """Record the forward pass of a batch of `size`."""
        inputs = torch.zeros(size, *self._input_shape, device=self._device, dtype=self._dtype)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_PASSES):
                    self._network(inputs)
            torch.cuda.current_stream(self._device).wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # The graphs share one memory pool: each result is read before another graph runs.
            with torch.cuda.graph(graph, pool=self._pool):
                logits = self._network(inputs).float()
        pinned = torch.empty(size, *self._input_shape, pin_memory=True)
        self._recorded[size] = Recorded(graph, inputs, logits, pinned)

    def fits(self, count: int) -> bool:
        """Whether a graph for at least this many samples was recorded."""
        return any(size >= count for size in self._recorded)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Float32 logits on the CPU for a float32 batch on the CPU that fits."""
        count = len(batch)
        recorded = self._recorded[min(size for size in self._recorded if size >= count)]
        with torch.inference_mode():
            # Pinned memory makes the copy as fast as the bus; precision is lowered on the GPU.
            recorded.pinned[:count].copy_(batch)
            recorded.inputs[:count].copy_(recorded.pinned[:count].to(self._device, non_blocking=True))
            recorded.graph.replay()
            return recorded.logits[:count].cpu()


logger = logging.getLogger("boxcal")
SMALL = 500_000  # parameters
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

T = TypeVar("T")


class ThreadPerCorePool(CorePool[torch.Tensor]):
    """Threads on which torch computes with one thread each."""

    def __init__(self, cores: int | None = None) -> None:
        super().__init__(lambda pieces: torch.cat(list(pieces)), cores)
        threads = torch.get_num_threads()
        barrier = Barrier(self.cores)

        def limit(_: int) -> None:
            barrier.wait()  # so that each thread of the pool runs this once
            torch.set_num_threads(1)
            torch.get_num_threads()  # torch fixes the number of this thread when it is asked for
            barrier.wait()

        list(self._pool.map(limit, range(self.cores)))
        torch.set_num_threads(threads)

    def on_one(self, forward: Callable[[T], torch.Tensor], batch: T) -> torch.Tensor:
        """Run a whole batch on one of the threads."""
        return self._pool.submit(forward, batch).result()


@dataclass(repr=False, eq=False)
class TorchBackbone:
    """A network, in evaluation mode, on one device.

    `network`: maps (N, *input_shape) to logits (N, K). `preprocessing`: turns an image into an input; None
    where the backbone reads tensors only. `fingerprint`: of the weights; empty to compute it from them.
    `batch_sizes`: the smallest and the largest that the network takes. `is_program`: whether its operations
    are fixed, and with them the types of its weights.
    """

    name: str
    network: InitVar[nn.Module]
    _: KW_ONLY
    labels: tuple[str, ...]
    input_shape: tuple[int, ...]
    preprocessing: Preprocessing | None
    device: str
    precision: str
    fingerprint: str = ""
    batch_sizes: tuple[int, int | None] = (1, None)
    is_program: bool = False

    def __post_init__(self, network: nn.Module) -> None:
        self.inputs: Inputs = ImageInputs(self.preprocessing, self.input_shape)
        self.fingerprint = fingerprint_with(
            self.fingerprint or tensors_fingerprint(network.state_dict()),
            precision=None if self.precision == "float32" else self.precision,
        )
        self._smallest, self._largest = self.batch_sizes
        self._device = resolve_device(self.device)
        self.device = str(self._device)
        self._dtype = PRECISIONS[self.precision]
        self._pool: ThreadPerCorePool | None = None
        if self._device.type == "cpu":
            # A network as small as that of `digits` is finished before a second thread has started.
            self._pool = ThreadPerCorePool(1 if parameter_count(network) < SMALL else usable_cores())
        dtype = None if self.is_program else self._dtype
        self._network = network.to(self._device, dtype).requires_grad_(False)
        self._graphs: CudaGraphs | None = None
        if self._device.type == "cuda":
            # Convolutions in half precision are faster with the channels last.
            if self._dtype != torch.float32:
                self._network = self._network.to(memory_format=torch.channels_last)
            if self.batch_sizes == (1, None):
                self._graphs = CudaGraphs(self._network, self.input_shape, self._device, self._dtype)

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    @property
    def passes(self) -> int:
        """Number of concurrent calls that use the whole device."""
        return 1 if self._pool is None else self._pool.cores

    def __call__(self, batch: Any, *, alone: bool = True) -> torch.Tensor:
        """Float32 logits (N, K) for a float32 batch (N, *input_shape) on the CPU; else UnusableInput."""
        batch = torch.as_tensor(batch)
        if batch.shape[1:] != self.input_shape:
            raise UnusableInput(
                f"{self.name} reads inputs of shape {self.input_shape}, got {tuple(batch.shape[1:])}."
            )
        if self._pool is None or (alone and len(batch) == 1 < self._pool.cores):
            return self._forward_all(batch)
        if alone and self._pool.cores > 1:
            return self._pool.run(self._forward, batch, self._smallest, self._largest)
        return self._pool.on_one(self._forward_all, batch)

    def _forward_all(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._forward(piece) for piece in torch.split(batch, self._largest or len(batch))])

    def _forward(self, piece: torch.Tensor) -> torch.Tensor:
        if self._graphs is not None and self._graphs.fits(len(piece)):
            return self._graphs(piece)
        with torch.inference_mode():
            logits: torch.Tensor = self._network(self._inputs(piece))
            return logits[: len(piece)].to("cpu", torch.float32)

    def _inputs(self, piece: torch.Tensor) -> torch.Tensor:
        return padded(piece, self._smallest).to(self._device).to(self._dtype)

    def differentiable(self, batch: Any) -> torch.Tensor:
        """Float32 logits (N, K) on the CPU, differentiable with respect to the inputs."""
        batch = torch.as_tensor(batch)
        with torch.enable_grad():
            logits: torch.Tensor = self._network(self._inputs(batch))
            return logits[: len(batch)].to("cpu", torch.float32)

    @property
    def head(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Weight (K, D) and bias (K,) of the linear layer that returns the logits; None without one."""
        if self._body is None or self._linear_head is None:
            return None
        layer = self._linear_head[1]
        bias = torch.zeros(self.num_classes) if layer.bias is None else layer.bias
        return layer.weight.float().cpu(), bias.float().cpu()

    def features(self, batch: Any) -> torch.Tensor:
        """Float32 features (N, D) on the CPU, the input of the head; UnusableInput without a linear head."""
        if self._body is None:
            raise UnusableInput(f"{self.name} has no linear head, so there are no features before it.")
        batch = torch.as_tensor(batch)
        with torch.inference_mode():
            features: torch.Tensor = self._body(self._inputs(batch))
            return features[: len(batch)].to("cpu", torch.float32)

    @cached_property
    def _linear_head(self) -> tuple[str, nn.Linear] | None:
        linear = [(key, part) for key, part in self._network.named_modules() if isinstance(part, nn.Linear)]
        return linear[-1] if linear and linear[-1][1].out_features == self.num_classes else None

    @cached_property
    def _body(self) -> nn.Module | None:
        """The network without its head, in the same memory; None if the head does not return the logits."""
        if self._linear_head is None:
            return None
        key, head = self._linear_head
        shared: dict[int, Any] = {
            id(value): value for value in chain(self._network.parameters(), self._network.buffers())
        }
        body = copy.deepcopy(self._network, shared)
        body.set_submodule(key, nn.Identity())
        probe = self._inputs(torch.zeros(1, *self.input_shape))
        with torch.inference_mode():
            features = body(probe)
            is_head = features.shape == (len(probe), head.in_features) and torch.allclose(
                head(features), self._network(probe), atol=1e-2, rtol=1e-2
            )
        return body if is_head else None

    def warm_up(self, batch_sizes: Sequence[int]) -> None:
        """Run once with each batch size, so that no request waits for a first pass; record CUDA graphs."""
        for size in sorted(batch_sizes, reverse=True):
            if self._graphs is not None:
                try:
                    self._graphs.record(size)
                except RuntimeError as error:
                    logger.info("%s runs without CUDA graphs: %s", self.name, error)
                    self._graphs = None
            self(torch.zeros(size, *self.input_shape))


def padded(batch: torch.Tensor, smallest: int) -> torch.Tensor:
    """Repeat the last sample until there are `smallest`."""
    missing = smallest - len(batch)
    return batch if missing <= 0 else torch.cat([batch, batch[-1:].expand(missing, *batch.shape[1:])])


def resolve_device(device: str) -> torch.device:
    """Turn `auto`, `cpu`, `cuda` or `cuda:N` into an available device, or raise BackboneError."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise BackboneError(f"Unknown device {device!r}: expected 'auto', 'cpu', 'cuda' or 'cuda:N'.")
    resolved = torch.device(device)
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise BackboneError(f"Device {device!r} was asked for, but torch finds no usable CUDA device here.")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise BackboneError(
            f"Device {device!r} was asked for, but there are only {torch.cuda.device_count()} CUDA devices."
        )
    return resolved


def parameter_count(network: nn.Module) -> int:
    """Count the network's parameters."""
    return sum(parameter.numel() for parameter in network.parameters())
