"""Forward passes recorded once for a few batch sizes and replayed: what a small batch costs on a GPU.

Launching the kernels of a Vision Transformer one by one takes a CPU several milliseconds, more than the GPU
needs for a small batch. A recorded graph is launched whole. A batch takes the smallest graph it fits in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

PASSES_BEFORE_RECORDING = 3  # libraries choose their algorithms and allocate their workspaces in these


@dataclass(frozen=True, slots=True)
class Recorded:
    """One graph, with the memory that it reads and the memory that it writes."""

    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    logits: torch.Tensor
    pinned: torch.Tensor


class CudaGraphs:
    """Graphs of one network, by batch size; one thread at a time uses them.

    Parameters
    ----------
    network
        Maps (N, *input_shape) of `dtype` to (N, K) on `device`, in evaluation mode.
    input_shape
        Shape of one input.
    device, dtype
        Where and in what precision the network computes.
    """

    def __init__(
        self, network: nn.Module, input_shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._network = network
        self._input_shape = input_shape
        self._device = device
        self._dtype = dtype
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[int, Recorded] = {}

    def record(self, size: int) -> None:
        """Record the forward pass of a batch of `size`.

        Raises
        ------
        RuntimeError
            If the network does what a graph cannot hold, such as waiting for a value.
        """
        inputs = torch.zeros(size, *self._input_shape, device=self._device, dtype=self._dtype)
        aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.inference_mode():
            with torch.cuda.stream(aside):
                for _ in range(PASSES_BEFORE_RECORDING):
                    self._network(inputs)
            torch.cuda.current_stream(self._device).wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            # The graphs share one pool: each result is read before another graph runs.
            with torch.cuda.graph(graph, pool=self._pool):
                logits = self._network(inputs).float()
        pinned = torch.empty(size, *self._input_shape, pin_memory=True)
        self._recorded[size] = Recorded(graph, inputs, logits, pinned)

    def fits(self, count: int) -> bool:
        """Whether a graph was recorded for at least this many samples."""
        return any(size >= count for size in self._recorded)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """Float32 logits on the CPU of a float32 batch on the CPU, for which a graph was recorded."""
        count = len(batch)
        recorded = self._recorded[min(size for size in self._recorded if size >= count)]
        with torch.inference_mode():
            # Through pinned memory the copy is as fast as the bus; precision is lowered on the GPU.
            recorded.pinned[:count].copy_(batch)
            recorded.inputs[:count].copy_(recorded.pinned[:count].to(self._device, non_blocking=True))
            recorded.graph.replay()
            return recorded.logits[:count].cpu()
