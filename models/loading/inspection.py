"""What an ONNX file reads and returns, found by a trial run, and the declaration that would serve it.

What a model that is loaded by its name reads and returns: `boxcal inspect` shows it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from boxcal.models import BackboneError
from boxcal.models.backends.backbone import FeatureBackbone
from boxcal.models.backends.checks import check_labels, read_labels
from boxcal.models.backends.onnx_backbone import DTYPES
from boxcal.models.backends.onnx_file import (
    AGREEMENT,
    CPU,
    FLOATS,
    LABELS,
    MAPS,
    TOLERANCE,
    OnnxFile,
    batch_size_of,
    in_rows,
    label_lists,
    names_of_columns,
)
from boxcal.models.backends.onnx_named import PROBES, SCALES, inputs_of, is_named, random_rows
from boxcal.models.backends.spec import ModelSpec, read_spec
from boxcal.models.inputs.images import ImageClassification
from boxcal.models.inputs.rows import RowInputs
from boxcal.models.inputs.saved_configs import image_preprocessing, read_json
from boxcal.models.inputs.texts import IDS, TextInputs
from boxcal.models.loading.specifications import load_backbone

IMAGENET = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
GREY = {"mean": [0.5], "std": [0.5]}
FEW_LABELS = 50
MOST_TOKENS = 2**20
"""A limit beyond is that of a tokenizer that declares none."""
TRIAL_SIDE = 224
TRIAL_SECONDS = 60.0


@dataclass(frozen=True)
class Tensor:
    name: str
    type: str
    shape: tuple[Any, ...]  # As the file declares it; names and None are free
    found: tuple[int, ...] = ()  # Shape in the trial run, empty where there was none


@dataclass(frozen=True)
class Inspection:
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    declaration: dict[str, Any]  # The members of the `model.json` that would declare it
    notes: tuple[str, ...]  # What must be checked by a person


def inspect_model(path: Path) -> Inspection:
    """Open an ONNX file, run it once on random inputs, and say how it would be declared."""
    file = OnnxFile(path, optimize=False)
    session = file.session([CPU], threads=1)
    entries, returned = session.get_inputs(), session.get_outputs()
    is_declared = path.with_suffix(".json").is_file()
    carried = ModelSpec() if is_declared else read_spec(path, session.get_modelmeta().custom_metadata_map)
    notes: list[str] = []
    declaration: dict[str, Any] = {}
    try:
        spec = read_spec(path) if is_declared else carried
        batch = _trial(entries, file, path, declaration, notes, spec=spec)
        with _time_limit() as options:
            outputs = session.run(None, batch, options)
    except BackboneError as error:
        notes.append(str(error))
        outputs = None
    except Exception as error:  # onnxruntime's errors have no common base class
        notes.append(f"The trial run failed: {error}"[:500])
        outputs = None
    if outputs is not None:
        if found := _declare_output(returned, outputs, declaration, notes):
            rows, keys = found
            said = [value for entry, value in zip(returned, outputs, strict=True) if entry.type in LABELS]
            lists = [keys, *label_lists(file.model, has_labels=bool(said))]
            names, agreed = names_of_columns(rows, said, lists)
            _declare_labels(rows.shape[1], names, path, declaration, notes)
            _turn_labels(rows, agreed, declaration, notes)
        _declare_carried(carried, declaration, notes)
        ModelSpec.model_validate(declaration)
    shapes = [_shape(value) for value in outputs] if outputs is not None else [()] * len(returned)
    return Inspection(
        tuple(Tensor(entry.name, entry.type, tuple(entry.shape)) for entry in entries),
        tuple(
            Tensor(entry.name, entry.type, tuple(entry.shape or ()), shape)
            for entry, shape in zip(returned, shapes, strict=True)
        ),
        declaration,
        tuple(notes),
    )


@contextmanager
def _time_limit() -> Iterator[Any]:
    """Give options of a run that ends, with an error, after `TRIAL_SECONDS`: a model may loop for ever."""
    options = onnxruntime.RunOptions()
    timer = threading.Timer(TRIAL_SECONDS, setattr, (options, "terminate", True))
    timer.start()
    try:
        yield options
    finally:
        timer.cancel()


def _trial(
    entries: Sequence[Any],
    file: OnnxFile,
    path: Path,
    declaration: dict[str, Any],
    notes: list[str],
    *,
    spec: ModelSpec,
) -> dict[str, Any]:
    """Make a batch of inputs, and declare what they are."""
    generator = np.random.default_rng(0)
    if is_named(entries):
        inputs = inputs_of(entries, file.model, spec, path)
        if isinstance(inputs, TextInputs):
            if "text" in inputs.members:
                declaration["tokenizer"] = spec.tokenizer or "tokenizer.json"
            _declare_tokens(inputs, path, declaration, notes)
        else:
            declaration["features"] = list(getattr(inputs, "names", ()))
        count = batch_size_of(entries)
        if isinstance(inputs, RowInputs):
            return dict(inputs.batch(random_rows(inputs, count or len(SCALES) * PROBES)))
        return dict(inputs.batch(inputs.blank(count or 2)))
    if len(entries) != 1 or entries[0].type not in DTYPES or len(entries[0].shape) != 4:
        found = ", ".join(f"{entry.name} {entry.type} {entry.shape}" for entry in entries)
        raise BackboneError(f"No trial run is known for these inputs: {found}.")
    count, *sizes = (size if isinstance(size, int) and size > 0 else None for size in entries[0].shape)
    last = sizes[2] in (1, 3) and sizes[0] not in (1, 3)
    channels = (sizes[2] if last else sizes[0]) or 3
    fixed = sizes[:2] if last else sizes[1:]
    side = next((size for size in fixed if size), TRIAL_SIDE)
    height, width = (size or side for size in fixed)
    dtype = DTYPES[entries[0].type]
    normalised = IMAGENET if channels == 3 else GREY
    if dtype is np.uint8:
        normalised = {"mean": [0.0] * channels, "std": [1 / 255] * channels}
    if beside := _preprocessing_beside(path, tuple(sizes), notes):
        declaration["preprocessing"], (height, width) = beside
    else:
        square = {"resize": round(side * 256 / 224), "crop": side}
        made = square if height == width else {"resize": [height, width]}
        declaration["preprocessing"] = {**made, **normalised}
        notes.append("`preprocessing` is a suggestion, that of ImageNet: replace it by that of the training.")
    shape = (height, width, channels) if last else (channels, height, width)
    size = (count or 1, *shape)
    if dtype is np.uint8:
        return {entries[0].name: generator.integers(0, 256, size, dtype)}
    return {entries[0].name: np.abs(generator.normal(size=size)).astype(dtype)}


def _preprocessing_beside(
    path: Path, shape: tuple[int | None, ...], notes: list[str]
) -> tuple[dict[str, Any], tuple[int, int]] | None:
    """Take the preprocessing, and its height and width, of the image processor beside the model."""
    name = "preprocessor_config.json"
    if not path.with_name(name).is_file():
        return None
    try:
        found = image_preprocessing(path.with_name(name))
        declared = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in _written(found).items()
            if value is not None and name != "channels_last"
        }
        ModelSpec.model_validate({"preprocessing": declared}).preprocessing_for(shape, path)
    except (BackboneError, ValueError) as error:
        notes.append(f"{name} was left out: {error}"[:500])
        return None
    notes.append(f"`preprocessing` is that of {name}, beside the model.")
    return declared, found.size


def _declare_tokens(inputs: TextInputs, path: Path, declaration: dict[str, Any], notes: list[str]) -> None:
    """Declare how tokens are padded and cut, as the files beside the model say, if there are any."""
    config, tokenizer = (_beside(path, name, notes) for name in ("config.json", "tokenizer_config.json"))
    pad, positions = config.get("pad_token_id"), config.get("max_position_embeddings")
    length = tokenizer.get("model_max_length")
    declaration["pad"] = dict(inputs.pad)
    if type(pad) is int and IDS in inputs.pad:
        declaration["pad"][IDS] = pad
    limits = [one for one in (length, positions) if type(one) is int and 0 < one <= MOST_TOKENS]
    declaration["max_length"] = min(limits or [inputs.max_length])
    if type(pad) is int and limits:
        notes.append("`pad` and `max_length` are those of the files that lie beside the model.")
    else:
        notes.append("Check `pad` and `max_length` against the tokenizer's configuration.")


def _labels_beside(path: Path, classes: int, notes: list[str]) -> list[str] | str | None:
    """Take the names of the classes of `labels.txt`, or else of `config.json`, where these are as many."""
    named, lines = _beside(path, "config.json", notes).get("id2label"), path.with_name("labels.txt")
    try:
        if lines.is_file():
            read_labels(lines, classes)
            notes.append("`labels` are those of labels.txt, beside the model.")
            return lines.name
        if isinstance(named, dict):
            found = [str(named.get(str(number), number)) for number in range(len(named))]
            labels = list(check_labels(found, classes, "config.json"))
            notes.append("`labels` are those of config.json, beside the model.")
            return labels
    except BackboneError as error:
        notes.append(f"Labels beside the model were left out: {error}"[:500])
    return None


def _beside(path: Path, name: str, notes: list[str]) -> dict[str, Any]:
    """Read a JSON document beside a model; what is none, or is the declaration of the model, is left out."""
    file = path.with_name(name)
    if not file.is_file() or file == path.with_suffix(".json"):
        return {}
    try:
        return read_json(file)
    except BackboneError as error:
        notes.append(f"{name} was left out: {error}"[:500])
        return {}


def _declare_output(
    returned: Sequence[Any],
    outputs: Sequence[Any],
    declaration: dict[str, Any],
    notes: list[str],
) -> tuple[NDArray[Any], tuple[str, ...]] | None:
    """Choose an output that may hold scores, and declare what it holds; give it, and name its classes."""
    scores = [
        (entry.name, value if isinstance(value, list) else in_rows(value))
        for entry, value in zip(returned, outputs, strict=True)
        if (entry.type in FLOATS and in_rows(value).ndim == 2) or entry.type in MAPS
    ]
    if not scores:
        notes.append("No output has the shape (N, K).")
        return None
    name, value = next((pair for pair in scores if pair[0] == "logits"), scores[0])
    if len(scores) > 1 and name != "logits":
        others = ", ".join(other for other, _ in scores[1:])
        notes.append(f"Several outputs may hold scores; `{name}` is the first, the others are {others}.")
    if len(returned) > 1:
        declaration["output"] = name
    names: tuple[str, ...] = ()
    if isinstance(value, list):
        names = tuple(map(str, value[0]))
        value = np.array([list(row.values()) for row in value])
    rows = value.reshape(len(value), -1)
    within = bool((rows >= -TOLERANCE).all() and (rows <= 1 + TOLERANCE).all())
    if rows.shape[1] == 1:
        rows = np.hstack([0.5 - rows, rows - 0.5] if within else [-rows, rows])
        declaration["activation"] = "sigmoid"
        declaration["outputs"] = "probabilities" if within else "logits"
        notes.append("One number per sample: is it the probability of the second class, or its logit?")
    else:
        sums_to_one = within and bool(np.abs(rows.sum(axis=1) - 1).max() < TOLERANCE)
        declaration["outputs"] = "probabilities" if sums_to_one else "logits"
        if within and not sums_to_one:
            notes.append(
                "All scores lie between 0 and 1 and do not sum to 1: a multi-label model is refused."
            )
    return rows, names


def _declare_labels(
    classes: int, names: tuple[str, ...] | None, path: Path, declaration: dict[str, Any], notes: list[str]
) -> None:
    """Declare the names that the model itself gives its classes, those of files beside it, or numbers."""
    are_numbers = names == tuple(map(str, range(classes)))
    if names is not None and not are_numbers:
        declaration["labels"] = list(names)
    elif beside := _labels_beside(path, classes, notes):
        declaration["labels"] = beside
    elif classes <= FEW_LABELS:
        declaration["labels"] = list(map(str, range(classes)))
        notes.append("`labels` are numbers: replace them by the names of the classes.")


def _turn_labels(rows: NDArray[Any], agreed: float, declaration: dict[str, Any], notes: list[str]) -> None:
    """Turn the labels of two scores round whose largest is not that of the label, as when served."""
    labels: Any = declaration.get("labels")
    is_of_two = declaration["outputs"] == "logits" and rows.shape[1] == 2 and isinstance(labels, list)
    if is_of_two and agreed <= 1.0 - AGREEMENT:
        declaration["labels"] = labels[::-1]
        notes.append("`labels` are in the order of the scores, which is not that of the model's own labels.")
    elif declaration["outputs"] == "logits" and agreed < AGREEMENT:
        notes.append(
            f"The largest score is that of the label beside it in {agreed:.0%} of random rows: check that "
            "each score is of one class, and `labels` in the order of the scores."
        )


def _declare_carried(carried: ModelSpec, declaration: dict[str, Any], notes: list[str]) -> None:
    """Declare what the metadata of the file do, which the declaration would replace."""
    if members := carried.model_dump(exclude_unset=True):
        declaration |= members
        notes.append(f"{', '.join(f'`{name}`' for name in members)}: from the metadata of the file.")


def _shape(value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        return (len(value), len(value[0]) if value else 0)
    return tuple(value.shape)


BY_NAME = ("timm", "torchvision")
RANDOM = "random"


@dataclass(frozen=True)
class Description:
    model: str
    inputs: str  # Kind of its inputs, and what one input of a request may be
    members: tuple[str, ...]
    labels: tuple[str, ...]
    # Of one sample, and of the logits of two samples in a trial run; empty if there was none
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    preprocessing: dict[str, Any] | None  # Of images; None if the model reads none, or if it is its own
    has_features: bool  # Whether calibrators may read the input of its last layer
    notes: tuple[str, ...]  # What must be known besides


def describe_model(spec: str) -> Description:
    """Load a model on the CPU, with random weights if its name has none, and run it on two blank inputs."""
    is_random = spec.partition(":")[0] in BY_NAME and "?" not in spec
    backbone = load_backbone(spec, weights=RANDOM if is_random else None, device="cpu")
    inputs, shown, found, notes = backbone.inputs, backbone.preprocessing, (), []
    if inputs.kind == "none":
        notes.append(inputs.refusal(""))
    else:
        found = tuple(backbone(inputs.batch(inputs.blank(2))).shape)
    if is_random:
        notes.append("the weights were not loaded; to serve the model, set BOXCAL_WEIGHTS")
    if spec != "digits" and backbone.labels == tuple(map(str, range(backbone.num_classes))):
        notes.append("the classes have no names; name them in a file and set BOXCAL_LABELS")
    return Description(
        model=spec,
        inputs=inputs.kind,
        members=tuple(member for member in inputs.members if member != "cells"),
        labels=tuple(backbone.labels),
        input_shape=tuple(backbone.input_shape),
        output_shape=found,
        preprocessing=_written(shown) if isinstance(shown, ImageClassification) else None,
        has_features=isinstance(backbone, FeatureBackbone) and backbone.head is not None,
        notes=tuple(notes),
    )


def _written(preprocessing: ImageClassification) -> dict[str, Any]:
    return {
        name: value.name.lower() if isinstance(value, Enum) else value
        for name, value in asdict(preprocessing).items()
        if name != "rounds_down"  # a declaration has torchvision's crop
    }
