"""From a specification such as `digits` or `torchvision:vit_b_16` to a backbone: what start-up calls once.

`logits:K` and `logits` have no model: clients send logits or probabilities of one that runs elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from boxcal.models import BackboneError, UnusableInput
from boxcal.models.backends.backbone import Backbone
from boxcal.models.backends.checks import check_labels, read_lines
from boxcal.models.inputs.base import Inputs, NoInputs

MAX_CLASSES = 1_000_000


class LogitsOnly:
    """The labels of a model that runs elsewhere."""

    device = "cpu"
    preprocessing = None
    input_shape: tuple[int, ...] = ()
    passes = 1

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = tuple(labels)
        self.name = f"logits:{len(self.labels)}"
        self.fingerprint = hashlib.sha256(self.name.encode()).hexdigest()
        self.inputs: Inputs = NoInputs()

    @classmethod
    def of(cls, size: str, labels: Path | None) -> Self:
        """Take K from `size`, decimal digits, or where it is empty from the labels."""
        if not size and labels is None:
            raise BackboneError(
                "BOXCAL_MODEL=logits needs the labels of the classes (BOXCAL_LABELS) or their number, as in "
                "logits:1000."
            )
        found = None if labels is None else read_lines(labels)
        digits = size or str(len(found or ()))
        if not (digits.isascii() and digits.isdecimal() and 2 <= int(digits[:9]) <= MAX_CLASSES):
            raise BackboneError(
                f"A model of {digits!r:.50} classes: K in logits:K is a number from 2 to {MAX_CLASSES:,}."
            )
        num_classes = int(digits[:9])
        indices = map(str, range(num_classes))
        return cls(tuple(indices) if found is None else check_labels(found, num_classes, str(labels)))

    @property
    def num_classes(self) -> int:
        return len(self.labels)

    def __call__(self, batch: Any, *, alone: bool = True) -> Any:
        raise UnusableInput(NoInputs.refused)

    def warm_up(self, batch_sizes: Sequence[int]) -> None: ...


PRECISIONS = ("float32", "bfloat16", "float16")
MODEL_FILES = ("onnx", "pt2")
PACKAGES = ("torch", "torchvision", "onnxruntime")
WEIGHT_FILES = {".pt", ".pth", ".ckpt", ".bin", ".h5", ".keras", ".pkl", ".pickle", ".joblib", ".cbm", ".ubj"}
WITH_WEIGHTS = (*MODEL_FILES, "transformers")
SPECIFICATIONS = (
    "'digits', 'torchvision:NAME', 'timm:NAME', 'transformers:FOLDER', 'onnx:PATH', 'pt2:PATH', "
    "'logits:K' or 'logits'"
)


def load_backbone(
    spec: str,
    *,
    weights: str | None = None,
    labels: Path | None = None,
    device: str = "auto",
    precision: str = "float32",
    optimize: bool = True,
) -> Backbone:
    """Build the backbone that `spec` names and load its weights.

    `labels`: file with one class name a line, for weights that bring none or other ones. `optimize`: whether
    a vision transformer may be rewritten to compute its last block for one token only. Logits of the original
    and the rewritten network are compared on a random batch; where they differ by more than 1e-4 of the
    largest, a warning is logged and the original is used.
    """
    if precision not in PRECISIONS:
        raise BackboneError(f"Unknown precision {precision!r}: expected one of {', '.join(PRECISIONS)}.")
    family = spec.partition(":")[0]
    if weights is not None and family == "logits":
        raise BackboneError(f"{spec!r} is no model; {weights!r} cannot be used with it.")
    if weights is not None and (spec == "digits" or family in WITH_WEIGHTS):
        raise BackboneError(f"{spec!r} brings its own weights; {weights!r} cannot be used with it.")
    if precision != "float32" and family in MODEL_FILES:
        raise BackboneError(f"{spec!r} carries its own precision; {precision!r} cannot be asked of it.")
    try:
        return _load(spec, weights, labels, device, precision, optimize=optimize)
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES:
            raise
        raise BackboneError(
            f"{spec!r} needs the package {error.name}: pip install 'boxcal[serve]' (in a checkout: make gpu)."
        ) from error


def _load(
    spec: str, weights: str | None, labels: Path | None, device: str, precision: str, *, optimize: bool
) -> Backbone:
    """Load a model; each family imports what it needs."""
    family, _, rest = spec.partition(":")
    if spec == "digits":
        from boxcal.models.backends.onnx_backbone import load_digits_onnx  # noqa: PLC0415
        from boxcal.models.backends.onnx_file import is_cpu  # noqa: PLC0415

        if precision == "float32" and (is_cpu(device) or find_spec("torch") is None):
            return load_digits_onnx(labels=labels, device=device)
        from boxcal.models.backends.digits import load_digits  # noqa: PLC0415

        return load_digits(labels=labels, device=device, precision=precision)
    if family == "torchvision" and rest:
        from boxcal.models.backends.torchvision_models import load_torchvision  # noqa: PLC0415

        return load_torchvision(
            rest, weights=weights, labels=labels, device=device, precision=precision, optimize=optimize
        )
    if family == "timm" and rest:
        from boxcal.models.backends.timm_models import load_timm  # noqa: PLC0415

        return load_timm(rest, weights=weights, labels=labels, device=device, precision=precision)
    if family in WITH_WEIGHTS and rest:
        return _load_path(family, Path(rest), labels, device, precision, optimize=optimize)
    if family == "logits" and (rest or spec == "logits"):
        return LogitsOnly.of(rest, labels)
    raise BackboneError(f"Unknown model {spec!r}: expected {SPECIFICATIONS}.{_advice(spec)}")


def _advice(spec: str) -> str:
    """Say what to write in place of a path or a name alone."""
    path = Path(spec)
    if path.suffix[1:] in MODEL_FILES:
        return f" Did you mean '{path.suffix[1:]}:{spec}'?"
    if (path / "config.json").is_file():
        return f" Did you mean 'transformers:{spec}'?"
    if path.suffix in WEIGHT_FILES or path.is_file():
        return (
            f" {path.name} is not read as a model: export it as ONNX (torch.onnx, skl2onnx, onnxmltools, "
            "tf2onnx) or with torch.export.save. For weights of an architecture, name that, and the file in "
            "BOXCAL_WEIGHTS."
        )
    return ""


def _load_path(
    family: str, path: Path, labels: Path | None, device: str, precision: str, *, optimize: bool
) -> Backbone:
    """Load a file or a folder that has its own weights."""
    if family == "transformers":
        from boxcal.models.backends.transformers_models import load_transformers  # noqa: PLC0415

        return load_transformers(path, labels=labels, device=device, precision=precision)
    if family == "onnx":
        from boxcal.models.backends.onnx_backbone import load_onnx  # noqa: PLC0415

        return load_onnx(path, labels=labels, device=device, optimize=optimize)
    from boxcal.models.backends.exported_programs import load_exported_program  # noqa: PLC0415

    return load_exported_program(path, labels=labels, device=device)
