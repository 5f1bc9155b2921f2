"""An ONNX file and its onnxruntime sessions, on CUDA if available, else on the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from boxcal.models import BackboneError
from boxcal.models.backends.class_token import take_class_token_early
from boxcal.models.backends.core_pool import usable_cores

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
RUNTIMES = "onnxruntime", "onnxruntime-gpu"
"""The packages that hold the module `onnxruntime`."""


def installed_runtimes() -> list[str]:
    """List the packages of `RUNTIMES` that are installed; asking which hold the module reads all of them."""
    return [name for name in RUNTIMES if any(Distribution.discover(name=name))]


def check_one_runtime(installed: Iterable[str]) -> None:
    """Refuse two packages that have overwritten each other's files, and say how to mend that."""
    both = " ".join(name for name in RUNTIMES if name in installed)
    if " " in both:
        raise BackboneError(
            f"{both.replace(' ', ' and ')} are both installed, and hold the same module: pip uninstall --yes "
            f"{both}, then pip install one of them (onnxruntime-gpu for CUDA)."
        )


class OnnxFile:
    """An ONNX file to be opened in sessions.

    Weights that it stores in 8 bits are expanded once. With `optimize`, the last block of a vision
    transformer is computed for the class token alone; models of rows (N, M) are not rewritten.

    `model`: its graph, without external weights; None in onnxruntime's own format.
    """

    def __init__(self, path: Path, *, optimize: bool = True) -> None:
        check_one_runtime(installed_runtimes())
        if not path.is_file():
            raise BackboneError(f"The model file {path} does not exist.")
        self._path = path
        self.rewritten = False
        self.external: list[Path] = []
        self._graph = b""
        self.model: onnx.ModelProto | None = None
        self._weights_alone_quantised = False
        try:
            model = onnx.load(path, format="protobuf", load_external_data=False)
        except DecodeError:  # damaged, or in onnxruntime's own format: opening it will tell
            return
        self.model = model
        names = sorted(external_data(model.graph))
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise BackboneError(f"{path} stores weights in {name!r:.200}, which is not beside it.")
        self.external = [path.parent / name for name in names]
        self._weights_alone_quantised = weights_alone_quantised(model)
        if optimize and not _reads_rows(model.graph) and take_class_token_early(model):
            self.rewritten, self._graph = True, model.SerializeToString()

    def session(self, providers: list[Any], *, threads: int) -> Any:
        """Open the model on these providers; on a CPU an operator uses this many threads."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        # External weights are searched for beside the file, also when the graph is not read from it.
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self._path.parent)
        )
        if self._weights_alone_quantised:
            # By default every pass would expand them again and use slower kernels.
            options.add_session_config_entry("session.disable_quant_qdq", "1")
        try:
            source = self._graph if self.rewritten else str(self._path)
            session = onnxruntime.InferenceSession(source, options, providers=providers)
        except Exception as error:  # onnxruntime's errors have no common base class
            raise BackboneError(f"{self._path} is not a usable ONNX model: {error}") from error
        session._model_bytes = None  # only needed to change providers; as large as the weights
        return session


def batch_size_of(entries: Sequence[Any]) -> int | None:
    """Return the batch dimension that the inputs of a file fix; None where it is free."""
    sizes = (entry.shape[0] for entry in entries)
    return next((size for size in sizes if isinstance(size, int) and size > 0), None)


def pieces(
    batch: Mapping[str, NDArray[Any]], size: int | None
) -> Iterator[tuple[int, Mapping[str, NDArray[Any]]]]:
    """Cut a batch, an array (N, ...) for each input, into pieces of the size that the file fixes.

    Each comes with the number of its samples; the last one is padded by repetition of its last sample.
    """
    count = len(next(iter(batch.values())))
    if size is None:
        yield count, batch
        return
    for start in range(0, count, size):
        rows = np.minimum(np.arange(start, start + size), count - 1)
        yield min(size, count - start), {name: values[rows] for name, values in batch.items()}


def external_data(graph: onnx.GraphProto) -> set[str]:
    """Name the files, beside the model file, that tensors of a graph and of its subgraphs are stored in."""
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    tensors = chain(
        graph.initializer,
        (values for sparse in graph.sparse_initializer for values in (sparse.values, sparse.indices)),
        (tensor for attribute in attributes for tensor in (attribute.t, *attribute.tensors)),
    )
    names = {entry.value for tensor in tensors for entry in tensor.external_data if entry.key == "location"}
    subgraphs = (subgraph for each in attributes for subgraph in (each.g, *each.graphs) if subgraph.node)
    return names.union(*map(external_data, subgraphs))


def _reads_rows(graph: onnx.GraphProto) -> bool:
    """Whether all inputs are rows, of features or of tokens; old files list the weights among the inputs."""
    weights = {weight.name for weight in graph.initializer}
    inputs = [entry for entry in graph.input if entry.name not in weights]
    return all(len(entry.type.tensor_type.shape.dim) == 2 for entry in inputs)


def weights_alone_quantised(model: onnx.ModelProto) -> bool:
    """Whether a model only stores its weights in 8 bits, and computes with floats."""
    operators = set(_operators(chain(model.graph.node, *(function.node for function in model.functions))))
    return "DequantizeLinear" in operators and not operators & {"QuantizeLinear", "DynamicQuantizeLinear"}


def _operators(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Name the operators of nodes, and of the branches and loops inside them."""
    for node in nodes:
        yield node.op_type
        for attribute in node.attribute:
            yield from _operators(attribute.g.node)


class Sessions:
    """A model's sessions in onnxruntime: one on CUDA; on CPUs one for one thread and one for all."""

    def __init__(self, file: OnnxFile, path: Path, device: str) -> None:
        self.device = "cpu"
        resolved = None if is_cpu(device) else _cuda(device)
        if resolved is not None:
            onnxruntime.preload_dlls()  # CUDA's libraries come with torch
            provider = (CUDA, {"device_id": str(resolved.index or 0)})
            session = file.session([provider, CPU], threads=1)
            if CUDA in session.get_providers():
                self.beside = self.alone = session
                self.device = str(resolved)
                return
            if device != "auto":
                raise BackboneError(f"onnxruntime cannot run {path} on {device!r}.")
        threads = sorted({usable_cores(), 1})
        opened: list[Any] = [file.session([CPU], threads=n) for n in threads]
        self.beside, self.alone = opened[0], opened[-1]

    @property
    def passes(self) -> int:
        """Number of concurrent calls that use the whole device."""
        return usable_cores() if self.device == "cpu" else 1


def is_cpu(device: str) -> bool:
    """Whether passes run on the CPU, as far as that is known without torch."""
    if device != "auto":
        return device == "cpu"
    return CUDA not in onnxruntime.get_available_providers() or not _has_driver()


def _has_driver() -> bool:
    """Whether this machine has the driver of an NVIDIA GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _cuda(device: str) -> Any:
    """Return the CUDA device, as torch names it; None where there is none."""
    from boxcal.models.backends.torch_backbone import resolve_device  # noqa: PLC0415 - only GPUs need torch

    resolved = resolve_device(device)
    return resolved if resolved.type == "cuda" else None
