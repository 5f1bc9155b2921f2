"""`transformers:FOLDER`: an image or text classifier of Hugging Face as `save_pretrained` writes it.

Labels, preprocessing and tokenizer are those of the folder. Nothing is downloaded, and no code of the folder
runs.

A torch network that reads tokens, as a backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from boxcal.models import BackboneError, UnusableInput
from boxcal.models.backends.backbone import Backbone
from boxcal.models.backends.checks import check_labels, fingerprint_with, read_labels, tensors_fingerprint
from boxcal.models.backends.core_pool import usable_cores
from boxcal.models.backends.torch_backbone import (
    PRECISIONS,
    SMALL,
    ThreadPerCorePool,
    TorchBackbone,
    parameter_count,
    resolve_device,
)
from boxcal.models.inputs.saved_configs import image_preprocessing, image_processor, read_if_there, read_json
from boxcal.models.inputs.texts import IDS, MASK, PAIR, TYPES, TextInputs


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


TRANSFORMERS_PACKAGE = (
    "folders of transformers need the package transformers: pip install 'boxcal[transformers]'"
)
MAX_TOKENS = 512
SHORT = 1024
"""Longest sample that is run at start where positions seem to be computed, which have no end."""
UNLIMITED = 1_000_000
"""`model_max_length` of a tokenizer that declares none is larger."""


class Logits(nn.Module):
    """A network of transformers that returns its logits alone; `reads`: its inputs, if they have names."""

    def __init__(self, network: nn.Module, reads: Sequence[str] = ()) -> None:
        super().__init__()
        self.network: Any = network
        self.reads = reads

    def forward(self, *images: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.network(*images, **{name: named[name] for name in self.reads}).logits
        return logits


class UnpaddedLogits(Logits):
    """A network whose answer depends on padding: it has no token for it, or does not leave it out."""

    def forward(self, *images: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """Return logits (N, K); the samples run one after the other, without their padding."""
        lengths = enumerate(named[MASK].sum(1).tolist())
        alone = [{name: named[name][n : n + 1, :length] for name in self.reads} for n, length in lengths]
        return torch.cat([self.network(**sample).logits for sample in alone])


def load_transformers(folder: Path, *, labels: Path | None, device: str, precision: str) -> Backbone:
    """Load a classifier, of images if the folder says how an image is processed, else of texts."""
    try:
        import transformers  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise BackboneError(f"transformers:{folder}: {TRANSFORMERS_PACKAGE}.") from error
    if not (folder / "config.json").is_file():
        raise BackboneError(f"The folder {folder} has no config.json.")
    config = read_json(folder / "config.json")
    if config.get("problem_type") not in {None, "single_label_classification"}:
        raise BackboneError(
            f"{folder}: the problem_type is {config['problem_type']!r}; boxcal calibrates classes of which "
            "exactly one is true."
        )
    processor = image_processor(folder)
    kind = "AutoModelForSequenceClassification" if processor is None else "AutoModelForImageClassification"
    said = "texts, as it has no preprocessor_config.json" if processor is None else "images"
    transformers.logging.disable_progress_bar()
    try:
        network, report = getattr(transformers, kind).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # its errors have no common class
        raise BackboneError(f"{folder} cannot be loaded as a classifier of {said}: {error}"[:1000]) from error
    if missing := sorted(report["missing_keys"]):
        raise BackboneError(
            f"{folder}: the weights miss {', '.join(missing[:3])}; it was saved without its head."
        )
    num_classes = int(network.config.num_labels)
    if num_classes < 2:
        raise BackboneError(f"{folder} returns one number, a regression; a classifier has 2 or more.")
    given: dict[str, Any] = {
        "labels": _labels(network.config.id2label, labels, num_classes, folder),
        "device": device,
        "precision": precision,
    }
    name, network = f"transformers:{folder.name}", network.eval()
    if processor is not None:
        preprocessing = image_preprocessing(processor)
        shape = preprocessing.input_shape
        return TorchBackbone(name, Logits(network), input_shape=shape, preprocessing=preprocessing, **given)
    inputs, logits = _text_inputs(folder, config, network)
    return TorchTextBackbone(name, logits, inputs=inputs, **given)


def _text_inputs(folder: Path, config: dict[str, Any], network: Any) -> tuple[TextInputs, Logits]:
    """Say which tokens a network reads, and how it returns logits of them, padded or one by one."""
    tokenizer = folder / "tokenizer.json"
    described = read_if_there(folder / "tokenizer_config.json")
    read: Sequence[str] = described.get("model_input_names") or (
        (IDS, TYPES, MASK) if int(config.get("type_vocab_size") or 0) > 1 else (IDS, MASK)
    )
    pad = getattr(network.config, "pad_token_id", None)
    end = getattr(network.config, "eos_token_id", None)
    limits = (described.get("model_max_length") or 0, _positions(network))
    names = [name for name in read if name in (IDS, MASK, TYPES)]
    vocabulary = network.get_input_embeddings()
    # Networks without a table of their own for the types look these up among the tokens, or compute them.
    tokens = getattr(vocabulary, "num_embeddings", 2**31)
    types = getattr(network.config, "type_vocab_size", None) or tokens
    inputs = TextInputs(
        dict.fromkeys([*names, MASK], "int64"),
        pad={IDS: int(pad or 0)},
        max_length=min((int(limit) for limit in limits if 0 < limit <= UNLIMITED), default=MAX_TOKENS),
        fixed_length=None,
        tokenizer=tokenizer if tokenizer.is_file() else None,
        sizes={IDS: tokens, TYPES: types},
    )
    inputs.end = end if type(end) is int and end != pad and 0 <= end < tokens else None
    logits = Logits(network, names)

    def run(batch: dict[str, NDArray[Any]]) -> torch.Tensor:
        return logits(**{name: torch.from_numpy(rows) for name, rows in batch.items()})  # type: ignore[no-any-return]

    with torch.inference_mode():
        if inputs.max_length <= SHORT or any(table is not vocabulary for _, table in _tables(network)):
            inputs.limit_length(f"transformers:{folder.name}", run)
        rounding = max(1e-3, 16 * torch.finfo(network.dtype).eps)
        if pad is None or (inputs.max_length >= max(PAIR) and inputs.depends_on_padding(run, rounding)):
            logits = UnpaddedLogits(network, names)
    return inputs, logits


def _positions(network: Any) -> int:
    """Return the most tokens that a network has positions for; 0 or less where it does not say.

    RoBERTa and its relatives count positions from the one after that of the padding.
    """
    positions = getattr(network.config, "max_position_embeddings", None) or 0
    tables = (table for name, table in _tables(network) if name.endswith("position_embeddings"))
    skipped = (table.padding_idx + 1 for table in tables if table.padding_idx is not None)
    return int(positions) - max(skipped, default=0)


def _tables(network: nn.Module) -> list[tuple[str, nn.Embedding]]:
    """List what is looked up: tokens, and in many networks positions and types."""
    return [(name, part) for name, part in network.named_modules() if isinstance(part, nn.Embedding)]


def _labels(found: dict[int, str], labels: Path | None, num_classes: int, folder: Path) -> tuple[str, ...]:
    if labels is not None:
        return read_labels(labels, num_classes)
    names = [str(found.get(index, index)) for index in range(num_classes)]
    return check_labels(names, num_classes, f"{folder / 'config.json'}")
