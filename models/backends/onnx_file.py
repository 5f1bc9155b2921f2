"""An ONNX file: its sessions in onnxruntime, its batches, and what its outputs hold.

Sessions run on CUDA if available, else on the CPU. Exports of scikit-learn, XGBoost and LightGBM return a
label and probabilities, as a tensor or as one map for each sample (ZipMap); support vector machines return
scores in place of probabilities. A binary network may return one number, the sigmoid of a logit.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import Distribution
from itertools import chain
from operator import itemgetter
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
from boxcal.models.backends.spec import ModelSpec

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
RUNTIMES = "onnxruntime", "onnxruntime-gpu"
"""The packages that hold the module `onnxruntime`."""
FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)")
MAPS = ("seq(map(int64,tensor(float)))", "seq(map(string,tensor(float)))")
LABELS = ("tensor(int64)", "tensor(string)")
LABEL_TYPES = (onnx.TensorProto.INT64, onnx.TensorProto.INT32, onnx.TensorProto.STRING)
Scores = NDArray[np.float32]
TOLERANCE = 1e-3  # of probabilities and their sums
AGREEMENT = 0.9  # of labels with scores; ties may be broken otherwise
TINY = float(np.finfo(np.float32).tiny)


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
        self._source: str | bytes = str(path)
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
        if sys.platform == "linux" and _name_locale(model.graph):
            self._source = model.SerializeToString()
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
            source = self._graph if self.rewritten else self._source
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


def _name_locale(graph: onnx.GraphProto) -> bool:
    """Name the locale in which texts change their case, and say whether one was missing.

    The default, en_US.UTF-8, is missing in most containers, and then the session does not open; C.UTF-8 has
    the same tables, and every Linux has it.
    """
    nodes = [node for node in graph.node if node.op_type == "StringNormalizer"]
    unnamed = [node for node in nodes if all(attribute.name != "locale" for attribute in node.attribute)]
    for node in unnamed:
        node.attribute.append(onnx.helper.make_attribute("locale", "C.UTF-8"))
    return bool(unnamed)


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


class Output:
    """The output of an ONNX model that is served as its logits, and how its numbers become logits."""

    def __init__(self, entries: Sequence[Any], spec: ModelSpec, path: Path) -> None:
        self._path = path
        types = {entry.name: entry.type for entry in entries}
        self.name = spec.output if spec.output is not None else _only(entries, path)
        if self.name not in types:
            raise BackboneError(f"{path} has no output {self.name!r}; it has the outputs {', '.join(types)}.")
        if types[self.name] not in (*FLOATS, *MAPS):
            raise BackboneError(
                f"{path}: the output {self.name} has the type {types[self.name]}; scores are floats."
            )
        self._is_map = types[self.name] in MAPS
        label = next((name for name, kind in types.items() if kind in LABELS), None)
        self._is_of_classifier = self._is_map or (len(types) == 2 and label is not None)
        self.read = (self.name,) if label is None or spec.output is not None else (self.name, label)
        self._spec = spec
        self._is_declared = "outputs" in spec.model_fields_set
        self._has_one_column = spec.activation == "sigmoid"
        if self._is_declared:
            self._holds_probabilities = spec.outputs == "probabilities"
        else:
            self._holds_probabilities = self._has_one_column or self._is_of_classifier
        self._keys: tuple[Any, ...] = ()
        self._is_reversed = False
        self.names: tuple[str, ...] | None = None
        """What the file calls its classes, known after `check`; None if it does not."""

    @property
    def declared(self) -> dict[str, str | None]:
        """What changes the logits of the same file, known after `check`: None for each default."""
        return {
            "outputs": "probabilities" if self._holds_probabilities else None,
            "output": self._spec.output,
            "activation": "sigmoid" if self._has_one_column else None,
            "order": "reversed" if self._is_reversed else None,
        }

    def scores(self, raw: Any) -> Scores:
        """Bring what the model returned to float32 (N, K), or (N, 1)."""
        if self._is_map:
            found = np.array([[row[key] for key in self._keys] for row in raw], np.float32)
        else:
            with np.errstate(over="ignore"):  # what overflows is refused as infinite
                found = in_rows(raw.astype(np.float32, copy=False))
        return found[:, ::-1] if self._is_reversed else found

    def logits(self, raw: Any) -> Scores:
        """Turn what the model returned into float32 logits (N, K)."""
        scores = self.scores(raw)
        if self._has_one_column:
            column = scores[:, 0].astype(np.float64)
            if self._holds_probabilities:
                column = np.log(np.maximum(column, TINY)) - np.log(np.maximum(1 - column, TINY))
            return np.stack([np.zeros_like(column), column], axis=1).astype(np.float32)
        return np.log(np.maximum(scores, np.float32(TINY))) if self._holds_probabilities else scores

    def check(
        self,
        probes: Sequence[Any],
        said: Sequence[Any] = (),
        *,
        model: onnx.ModelProto | None = None,
        declared: Sequence[str] | None = None,
    ) -> int:
        """Check what the model returned for some random inputs, and the labels beside it; return K.

        `declared`: the labels that are declared.
        """
        if self._is_map:
            self._keys = tuple(probes[0][0])
        scores = np.concatenate([self.scores(raw) for raw in probes])
        where = f"{self._path}: the output {self.name}"
        if scores.ndim != 2:
            raise BackboneError(f"{where} has shape {tuple(scores.shape)}, expected (N, K).")
        # Trees may put NaN into the sums; then nothing is said about them.
        within = bool(((scores >= -TOLERANCE) & (scores <= 1 + TOLERANCE)).all())
        if self._is_of_classifier:
            self._has_one_column |= scores.shape[1] == 1 and not self._is_map
            if not self._is_declared:
                self._holds_probabilities = within or not bool(np.isfinite(scores).all())
        logits = np.concatenate([self.logits(raw) for raw in probes])
        lists = [tuple(map(str, self._keys)), *label_lists(model, has_labels=bool(said))]
        self.names, agreed = names_of_columns(logits, said, lists, declared)
        if self._is_of_classifier and not self._is_declared:
            self._check_labels(logits, agreed, said, declared, where)
        if self._has_one_column:
            self._check_sigmoid(scores, where)
            return 2
        if scores.shape[1] < 2:
            held = "probability" if within else "logit"
            more = "" if within else ', "outputs": "logits"'
            raise BackboneError(
                f"{where} has shape {tuple(scores.shape)}, expected (N, K). Declare "
                f'"activation": "sigmoid"{more} if it is the {held} of the second of two classes.'
            )
        sums_to_one = within and bool(np.abs(scores.sum(1) - 1).max() < TOLERANCE)
        if sums_to_one and not self._holds_probabilities:
            raise BackboneError(
                f"{where} sums to 1: it seems to hold probabilities. Export the logits, or declare "
                '"outputs": "probabilities".'
            )
        if within and not sums_to_one and len(scores) > 1:
            raise BackboneError(
                f"{where} lies between 0 and 1 for random inputs of any size and does not sum to 1 (but to "
                f"{float(scores[0].sum()):.4g}): {scores.shape[1]} independent sigmoids, each with its own "
                "question (multi-label). Classes that exclude each other are needed."
            )
        if self._holds_probabilities and not sums_to_one:
            raise BackboneError(
                f"{where} does not sum to 1, but is declared to hold probabilities. Declare "
                '"outputs": "logits" if it holds scores.'
            )
        return int(scores.shape[1])

    def _check_labels(
        self, logits: Scores, agreed: float, said: Sequence[Any], declared: Sequence[str] | None, where: str
    ) -> None:
        """Check that the labels are those of the largest scores, which may be of pairs of classes instead.

        Two scores may be in the reverse order, as skl2onnx writes those of `SVC`. The label of probabilities
        may be that of other scores, but not always.
        """
        if not self._holds_probabilities:
            if logits.shape[1] == 2 and agreed <= 1.0 - AGREEMENT:
                self._is_reversed = True
            elif not agreed >= AGREEMENT:
                raise BackboneError(
                    f"{where} has {logits.shape[1]} scores, whose largest is often not that of the label "
                    'beside it. If each is of one class, declare "outputs": "logits", and "labels" in the '
                    "order of the scores."
                )
            return
        never_agree = agreed <= 1.0 - AGREEMENT and len(set(logits.argmax(1).tolist())) > 1
        is_open = declared is None or self.names == tuple(declared)
        if said and is_open and (self.names is None or never_agree):
            raise BackboneError(
                f"{where} has {logits.shape[1]} probabilities, whose largest is not that of the label beside "
                f'it, such as {np.ravel(said[0])[0]!s:.50}: declare "labels" in the order of the '
                "probabilities."
            )

    def _check_sigmoid(self, scores: Scores, where: str) -> None:
        if scores.shape[1] != 1:
            raise BackboneError(
                f"{where} has {scores.shape[1]} columns; with the activation sigmoid it has one, the "
                "probability of the second class."
            )
        if self._holds_probabilities and not bool(((scores >= -TOLERANCE) & (scores <= 1 + TOLERANCE)).all()):
            raise BackboneError(
                f"{where} is {float(scores.max()):.4g} for a random input, no sigmoid. Declare also "
                '"outputs": "logits" if the sigmoid is not part of the model.'
            )


def names_of_columns(
    scores: NDArray[Any],
    said: Sequence[Any],
    lists: Iterable[tuple[str, ...]],
    declared: Sequence[str] | None = None,
) -> tuple[tuple[str, ...] | None, float]:
    """Find what the columns of scores (N, K) are called, by the labels beside them if there are any.

    `said`: parts of these labels. `lists`: what a file may call its classes. A list names the columns if all
    labels are in it; of several, the one by which most labels are that of the largest score. Numbers, and
    the labels themselves in their order, are tried too, as scikit-learn sorts classes.

    Returns the names, or None, and the share of rows whose label is that of the largest score.
    """
    size = scores.shape[1]
    labels = [label for part in said for label in np.ravel(part).tolist()]
    fitting = [names for names in lists if len(names) == size == len(set(names))]
    if not labels:
        return next(iter(fitting), None), math.nan
    texts = list(map(str, labels))
    if declared is not None and set(texts) <= set(declared):
        fitting = [tuple(declared)]
    else:
        fitting += [tuple(map(str, range(size))), tuple(map(str, sorted(set(labels))))]
    largest = scores.argmax(1).tolist()
    found = [
        (float(np.mean([names[index] == text for index, text in zip(largest, texts, strict=False)])), names)
        for names in fitting
        if len(names) == size and set(texts) <= set(names)
    ]
    share, names = max(found, key=itemgetter(0), default=(math.nan, None))
    return names, share


def in_rows(values: NDArray[Any]) -> NDArray[Any]:
    """Drop dimensions of size 1: (N, K, 1, 1) and (N, 1, 1, K) become (N, K), and (N,) becomes (N, 1)."""
    width = max(values.shape[1:], default=1)
    return values.reshape(len(values), width) if values.size == len(values) * width else values


CLASS_LABELS = ("classlabels_strings", "classlabels_int64s", "classlabels_ints")
ENCODED_LABELS = ("values_strings", "values_int64s")
GATHERS = ("ArrayFeatureExtractor", "Gather")


def label_lists(model: onnx.ModelProto | None, *, has_labels: bool) -> list[tuple[str, ...]]:
    """List what an exported pipeline may call its classes, the likeliest first.

    The classifiers in it have lists, also inner ones that number their classes. Where an output `has_labels`,
    these may be encoded behind them, or taken from a tensor.
    """
    nodes = list(reversed(model.graph.node if model is not None else ()))
    lists = [
        tuple(value.decode() for value in attribute.strings) or tuple(map(str, attribute.ints))
        for wanted in ((CLASS_LABELS, ENCODED_LABELS) if has_labels else (CLASS_LABELS,))
        for node in nodes
        for attribute in node.attribute
        if attribute.name in wanted
    ]
    taken = {node.input[0] for node in nodes if node.op_type in GATHERS and has_labels}
    for tensor in model.graph.initializer if model is not None and taken else ():
        is_list = len(tensor.dims) == 1 and tensor.data_type in LABEL_TYPES and not tensor.external_data
        if tensor.name in taken and is_list:
            values = onnx.numpy_helper.to_array(tensor).tolist()
            lists.append(tuple(one.decode() if isinstance(one, bytes) else str(one) for one in values))
    return [names for names in lists if names]


def _only(entries: Sequence[Any], path: Path) -> str:
    """Choose the output that holds scores; one beside it may hold labels."""
    types: dict[str, str] = {entry.name: entry.type for entry in entries}
    if "logits" in types:
        return "logits"
    scores = [name for name, kind in types.items() if kind in (*FLOATS, *MAPS)]
    others = [name for name, kind in types.items() if kind not in (*FLOATS, *MAPS, *LABELS)]
    if len(scores) == 1 and not others:
        return scores[0]
    if not scores:
        raise BackboneError(
            f"{path} has no output of floats ({', '.join(types)}): labels alone cannot be calibrated. Export "
            "the scores of the classes."
        )
    if len(scores) > 1 and all(entry.shape[1:] in ([], [1]) for entry in entries if entry.name in scores):
        raise BackboneError(
            f"{path} has an output for each class ({', '.join(scores)}), and one with all of them is served; "
            'skl2onnx writes it with options={"zipmap": False}.'
        )
    raise BackboneError(
        f"{path} has the outputs {', '.join(types)}; call the one to serve 'logits', or declare it as "
        f'"output" in {path.with_suffix(".json").name}.'
    )
