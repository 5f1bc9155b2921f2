"""The declaration of a model file: labels, preprocessing and the kind of its outputs, in JSON.

For `model.onnx` or `model.pt2` it is `model.json` in the same folder:

    {
      "labels": ["cat", "dog"],                  or the name of a file in the folder, one label per line
      "outputs": "logits",                       or "probabilities": their logarithms are used as logits
      "output": "scores",                        the output of the file that is served
      "activation": "sigmoid",                   one number: the probability of the second of two classes, or,
                                                 with "outputs": "logits", what the sigmoid is taken of
      "features": ["age", "income"],             names of the features, for rows
      "tokenizer": "tokenizer.json",             file in the folder, for texts
      "pad": {"input_ids": 0},                   what each input of tokens is padded with
      "max_length": 512,                         most tokens of a sample
      "preprocessing": {
        "resize": 256, "crop": 224,              short side, then the square crop in the centre, in pixels;
                                                 "resize": [224, 224] is height and width, which need none
        "mean": [0.485, 0.456, 0.406],           per channel, on the scale [0, 1]; one number for grey
        "std": [0.229, 0.224, 0.225],
        "interpolation": "bilinear"              or "nearest", "box", "hamming", "bicubic", "lanczos"
      }
    }

All members are optional. Without `preprocessing` the backbone reads tensors only. An ONNX file may have the
same members in its own metadata, each as JSON; `model.json` takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, Json, ValidationError

from boxcal.models import BackboneError
from boxcal.models.backends.checks import check_labels, read_labels, read_lines
from boxcal.models.inputs.images import ImageClassification

Number = Annotated[float, Field(allow_inf_nan=False)]
Pixels = Annotated[int, Field(ge=1, le=16384)]


class PreprocessingSpec(BaseModel):
    """How an image is turned into an input."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    resize: Pixels | Annotated[list[Pixels], Field(min_length=2, max_length=2)]
    crop: Pixels | None = None
    mean: list[Number]
    std: list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]
    interpolation: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = "bilinear"


class ModelSpec(BaseModel):
    """The declaration of one model file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    labels: list[str] | str | None = None
    outputs: Literal["logits", "probabilities"] = "logits"
    preprocessing: PreprocessingSpec | None = None
    output: str | None = None
    activation: Literal["sigmoid"] | None = None
    features: list[str] | None = None
    tokenizer: str | None = None
    pad: dict[str, int] | None = None
    max_length: Annotated[int, Field(ge=1, le=2**20)] | None = None

    def labels_for(
        self, num_classes: int, path: Path, override: Path | None, found: tuple[str, ...] | None = None
    ) -> tuple[str, ...]:
        """Take the labels from the file `override`, this declaration, or `found`; else number the classes."""
        if override is not None:
            return read_labels(override, num_classes)
        if isinstance(self.labels, str):
            return read_labels(beside(path, "labels", self.labels), num_classes)
        if self.labels is not None:
            return check_labels(self.labels, num_classes, f"The declaration of {path.name}")
        return found or tuple(map(str, range(num_classes)))

    def declared_labels(self, path: Path, override: Path | None) -> list[str] | None:
        """Return the labels of the file `override` or of this declaration, unchecked; None without both."""
        if override is not None or isinstance(self.labels, str):
            return read_lines(override or beside(path, "labels", str(self.labels)))
        return self.labels

    def preprocessing_for(self, shape: tuple[int | None, ...], path: Path) -> ImageClassification | None:
        """Build the declared preprocessing for inputs (C, H, W) or (H, W, C); None stands for a free size."""
        if (declared := self.preprocessing) is None:
            return None
        if not len(declared.mean) == len(declared.std) in {1, 3}:
            raise BackboneError(
                f"{path}: mean has {len(declared.mean)} numbers and std {len(declared.std)}; "
                "each needs one for grey or three for colour."
            )
        if isinstance(declared.resize, int) and declared.crop is None:
            raise BackboneError(
                f"{path}: preprocessing.crop: a short side (`resize`: {declared.resize}) needs a `crop`; a "
                "height and width (`resize`: [H, W]) may have one."
            )
        for channels_last in (False, True):
            preprocessing = ImageClassification(
                resize=declared.resize if isinstance(declared.resize, int) else tuple(declared.resize),
                crop=declared.crop,
                mean=tuple(declared.mean),
                std=tuple(declared.std),
                interpolation=Image.Resampling[declared.interpolation.upper()],
                channels_last=channels_last,
            )
            ours = preprocessing.input_shape
            if len(shape) == 3 and all(free in {None, size} for free, size in zip(shape, ours, strict=True)):
                return preprocessing
        made = (len(declared.mean), *preprocessing.size)
        read = tuple("any" if size is None else size for size in shape)
        raise BackboneError(
            f"{path}: the declared preprocessing makes {' x '.join(map(str, made))}, but the model reads "
            f"{read}."
        )


def beside(path: Path, member: str, name: str) -> Path:
    """Name the file that a member of the declaration of a model says, in the folder of the model."""
    try:
        return path.with_name(name)
    except ValueError as error:
        raise BackboneError(
            f"{path}: {member} is {name!r:.200}; it must be the name of a file in the folder of the model."
        ) from error


class MetadataSpec(BaseModel):
    """The same members in the metadata of an ONNX file: each is JSON text."""

    model_config = ConfigDict(extra="ignore")

    labels: Json[list[str]] | None = None
    outputs: Json[str] | None = None
    preprocessing: Json[dict[str, Any]] | None = None
    output: Json[str] | None = None
    activation: Json[str] | None = None
    features: Json[list[str]] | None = None
    tokenizer: Json[str] | None = None
    pad: Json[dict[str, int]] | None = None
    max_length: Json[int] | None = None


def read_spec(path: Path, metadata: Mapping[str, str] | None = None) -> ModelSpec:
    """Read the declaration from `model.json`, or from the model file's own metadata."""
    declaration = path.with_suffix(".json")
    try:
        if declaration.is_file():
            return ModelSpec.model_validate_json(declaration.read_bytes())
        if metadata:
            carried = MetadataSpec.model_validate(dict(metadata)).model_dump(exclude_none=True)
            return ModelSpec.model_validate(carried)
    except ValidationError as error:
        source = declaration if declaration.is_file() else f"the metadata of {path}"
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the document"
        raise BackboneError(f"{source}: {place}: {first['msg']}, got {first['input']!r:.200}.") from error
    return ModelSpec()
