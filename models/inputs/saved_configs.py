"""What lies beside a model as libraries save it: the configuration of its image processor, as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from boxcal.models import BackboneError
from boxcal.models.inputs.images import ImageClassification

MOST_BYTES = 16 * 2**20
"""Of a document; that of a model of 20,000 classes has one."""
PART = "image_processor"
UNLIKE = ("Levit", "MobileViT", "MobileVit", "PoolFormer")
"""Image processors whose sizes mean something else, or whose channels are turned round."""

SHORT_SIDE = ("Bit", "CLIP", "ChineseCLIP", "Conv", "MobileNet", "Siglip", "TextNet", "Vilt")
"""Image processors whose `size`, where it is one number, is that of the short side; of others, of both."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        with path.open("rb") as file:
            document = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise BackboneError(f"{path} is no readable JSON document: {error}") from error
    if not isinstance(document, dict):
        raise BackboneError(f"{path} holds no JSON object.")
    return document


def read_if_there(path: Path) -> dict[str, Any]:
    """Read a JSON object; an empty one where there is no file."""
    return read_json(path) if path.is_file() else {}


def image_processor(folder: Path) -> Path | None:
    """Find the configuration of an image processor, which may be part of that of a processor."""
    if (path := folder / "preprocessor_config.json").is_file():
        return path
    path = folder / "processor_config.json"
    return path if PART in read_if_there(path) else None


def image_preprocessing(path: Path) -> ImageClassification:
    """Convert the configuration of an image processor; what cannot be converted is refused."""
    found = read_json(path)
    found = part if isinstance(part := found.get(PART), dict) else found
    for member in ("do_resize", "do_rescale", "do_normalize"):
        if not found.get(member, True):
            raise BackboneError(f"{path}: {member} is false; boxcal resizes, scales and normalises.")
    if found.get("do_pad"):
        raise BackboneError(f"{path}: do_pad must be false.")
    processor = str(found.get("image_processor_type") or found.get("feature_extractor_type") or "")
    if processor.startswith(UNLIKE):
        raise BackboneError(f"{path}: a {processor} resizes or normalises otherwise than boxcal does.")
    for member in ("include_top", "rescale_offset", "do_flip_channel_order"):
        # EfficientNet divides by `image_std` twice where include_top is true or missing.
        if found.get(member, member == "include_top" and processor.startswith("EfficientNet")):
            raise BackboneError(f"{path}: {member} is true, which boxcal does not reproduce.")
    if found.get("crop_pct") and found.get("do_center_crop"):
        raise BackboneError(f"{path}: crop_pct together with do_center_crop is not supported.")
    try:
        if abs(float(found.get("rescale_factor", 1 / 255)) - 1 / 255) > 1e-9:
            raise BackboneError(f"{path}: rescale_factor must be 1/255.")
        resize, crop = _sizes(found, processor, path)
        return ImageClassification(
            resize,
            crop,
            tuple(map(float, found["image_mean"])),
            tuple(map(float, found["image_std"])),
            Image.Resampling(found.get("resample", Image.Resampling.BILINEAR)),
            rounds_down=True,
        )
    except BackboneError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise BackboneError(f"{path} is no configuration of an image processor: {error!r}") from error


def _sizes(found: dict[str, Any], processor: str, path: Path) -> tuple[int | tuple[int, int], int | None]:
    """Return the sizes of the resize and of the crop."""
    size: Any = found.get("size")
    crop: Any = found.get("crop_size")
    if isinstance(size, int):
        if not processor:
            raise BackboneError(f"{path}: the size {size} is of the short side or of both; name them.")
        is_short = processor.startswith(SHORT_SIDE)
        size = {"shortest_edge": size} if is_short else {"height": size, "width": size}
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    cropped = bool(found.get("do_center_crop")) and crop is not None
    square = cropped and crop["height"] == crop["width"]
    if isinstance(size, dict):
        if {"height", "width"} <= size.keys() and (square or not cropped):
            return (size["height"], size["width"]), int(crop["height"]) if cropped else None
        if "shortest_edge" in size and found.get("crop_pct") and not cropped:  # ConvNeXT
            edge = int(size["shortest_edge"])
            return ((edge, edge), None) if edge >= 384 else (int(edge / found["crop_pct"]), edge)
        if "shortest_edge" in size and square:
            return int(size["shortest_edge"]), int(crop["height"])
    raise BackboneError(f"{path}: the size {size} with the crop {crop if cropped else None} is unknown.")
