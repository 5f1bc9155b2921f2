"""CUDA graphs of the forward pass for a few batch sizes.

Launching the kernels of a Vision Transformer one by one takes a CPU several milliseconds, more than the GPU
needs for a small batch. A recorded graph is launched at once. A batch uses the smallest graph it fits in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

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
