"""What requests carry: options, arrays, and images, in the forms that the service reads."""

import io
import json
import math
import mimetypes
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, cast

import numpy as np
import numpy.typing as npt

BoundValue = float | Mapping[str, float] | Sequence[float]
"""One number for every class, numbers by label (also a Series of pandas), or one number per class."""

File = bytes | str | Path
"""The content of a file, or its path."""

ImageSource = File | npt.ArrayLike
"""An encoded image, the path of one, an image of PIL, or pixels: uint8 (H, W), (H, W, 3) or (H, W, 4)."""

ValidationData = File | Mapping[str, Any]
"""A file by path or as bytes, or a document with `labels` and `logits`, `features` or `texts`."""

FeatureRows = npt.ArrayLike | Sequence[Sequence[Any] | Mapping[str, Any]] | Mapping[str, Sequence[Any]]
"""Rows of features: an array (N, D), a list of rows (values, or values by name), columns by name, or a
DataFrame."""

Floats = npt.NDArray[np.floating[Any]]

LONGEST_QUERY = 2000
PNG_MODES = ("1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA")
"""PIL's modes that a PNG file can have."""


class AnswerOptions(TypedDict, total=False):
    """Options of a prediction, as keyword arguments.

    Attributes
    ----------
    lower, upper
        Hard bounds on the probabilities.
    top_k
        Number of classes in `top`.
    probabilities, logits
        Whether each prediction has all K of them.
    explain
        Whether each prediction has its mapped logits and the fitted bounds.
    feedback
        Whether each prediction has an `id` for `feedback`; the service keeps its logits. Such a request is
        not sent again after a lost connection.
    prior_adjustment
        Whether probabilities are adjusted to the class frequencies of recent predictions.
    calibrator
        A version of the registry (0 is `uncalibrated`) instead of the active one.
    timeout_ms
        Milliseconds after which the service stops and answers 504 (ServiceFaultError). Beyond 30 s, the
        client waits that much longer too.
    """

    lower: BoundValue
    upper: BoundValue
    top_k: int
    probabilities: bool
    logits: bool
    explain: bool
    feedback: bool
    prior_adjustment: bool
    calibrator: int | Literal["active"]
    timeout_ms: float


def options_document(options: AnswerOptions) -> dict[str, Any]:
    """Return options in the contract's form, the two bounds under `bounds`."""
    document: dict[str, Any] = {
        name: value.item() if isinstance(value, np.generic) else value
        for name, value in options.items()
        if name not in ("lower", "upper") and value is not None
    }
    bounds = {
        side: _bound(value, side)
        for side in ("lower", "upper")
        if (value := cast("BoundValue | None", options.get(side))) is not None
    }
    return document | ({"bounds": bounds} if bounds else {})


def _bound(value: Any, side: str) -> Any:
    """Give a bound as JSON has it; a Series of pandas with an index of its own is one by label."""
    _refuse_masked(value, side)
    is_series = hasattr(value, "items") and list(value.keys()) != list(range(len(value)))
    if isinstance(value, Mapping) or is_series:
        return {str(label): float(number) for label, number in value.items()}
    return np.asarray(value, dtype=np.float64).tolist()


def _refuse_masked(values: Any, name: str) -> None:
    if np.ma.is_masked(values):
        raise ValueError(f"{name} has masked values: leave them out or fill them")


def array_body(
    array: npt.ArrayLike, options: AnswerOptions, members: Callable[[list[Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Send an array as an `.npy` body and its options in the query string.

    Bounds for many classes exceed the length of query that servers and proxies accept. Then the whole request
    is JSON, with the array in `members`.
    """
    values = float_array(array)
    document = options_document(options)
    query = json.dumps(document, separators=(",", ":")) if document else ""
    if len(query) > LONGEST_QUERY:
        exact = values.astype(np.float64).tolist()  # the shortest digits of a float32 name another float64
        return {
            "content": json.dumps(members(exact) | {"options": document}),
            "headers": {"content-type": "application/json"},
        }
    body = io.BytesIO()
    np.save(body, values, allow_pickle=False)
    return {
        "content": body.getvalue(),
        "headers": {"content-type": "application/x-npy"},
        "params": {"options": query} if query else {},
    }


def inputs_body(inputs: Sequence[Mapping[str, Any]], options: AnswerOptions) -> dict[str, Any]:
    """Send inputs as JSON, with their options."""
    if not inputs:
        raise ValueError("a prediction needs at least one input")
    document = {"inputs": plain(list(inputs)), "options": options_document(options)}
    return {
        "content": json.dumps(document, allow_nan=False),
        "headers": {"content-type": "application/json"},
    }


def features_body(rows: FeatureRows, options: AnswerOptions) -> dict[str, Any]:
    """Send an array of numbers as `.npy`, and other rows of features as JSON."""
    if hasattr(rows, "columns"):
        rows = plain(rows)
    elif isinstance(rows, Mapping):
        rows = _joined(rows)
    elif getattr(rows, "dtype", np.dtype(object)).kind in "iufb":
        return array_body(cast("npt.ArrayLike", rows), options, _listed("features"))
    return inputs_body([{"features": row} for row in cast("Sequence[Any]", rows)], options)


def tensors_body(
    tensors: npt.ArrayLike | Mapping[str, Sequence[Any] | npt.ArrayLike], options: AnswerOptions
) -> dict[str, Any]:
    """Send a batch as `.npy`, and the named inputs of a model of tokens as JSON."""
    if isinstance(tensors, Mapping):
        return inputs_body([{"tokens": sample} for sample in _joined(tensors)], options)
    return array_body(tensors, options, _listed("tensor"))


def _listed(member: str) -> Callable[[list[Any]], dict[str, Any]]:
    return lambda rows: {"inputs": [{member: row} for row in plain(rows)]}


def _joined(columns: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Turn values by name, N of each, into N objects."""
    counts = {name: len(values) for name, values in columns.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise ValueError(f"every name needs as many values as the others, got {shown}")
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def float_array(array: npt.ArrayLike) -> Floats:
    """Return a C-contiguous float array; TypeError for a DataFrame, whose names of columns it would lose."""
    names = list(getattr(array, "columns", ()))
    is_named = [str(name) for name in names] != [str(index) for index in range(len(names))]
    if is_named or any(isinstance(name, str) for name in names):
        raise TypeError(
            "the columns of a DataFrame are not matched with the classes here: bring them into the order of "
            "`labels` in client.model(), and pass .to_numpy()"
        )
    _refuse_masked(array, "the array")
    values = np.asarray(array)
    return np.ascontiguousarray(values, dtype=values.dtype if values.dtype.kind == "f" else np.float64)


def label_array(labels: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return class names or indices (N,), which as Python's objects no file format could hold."""
    _refuse_masked(labels, "labels")
    values = np.asarray(labels)
    if values.dtype != object:
        return values
    for row, label in enumerate(values.tolist()):
        if not isinstance(label, str | int | np.integer):
            raise TypeError(f"labels[{row}] is {label!r}; a label is the name or the index of a class")
    return np.array(values.tolist())


def read_file(path: str | Path) -> tuple[str, bytes]:
    """Return the name and the content of a file."""
    return Path(path).name, Path(path).read_bytes()


def image_part(image: ImageSource, position: int) -> tuple[str, bytes, str]:
    """Name an image and read it; images of PIL and pixels are sent as PNG."""
    name = f"image-{position}"
    if isinstance(image, bytes):
        content = image
    elif isinstance(image, str | Path):
        name, content = read_file(image)
    else:
        content = _png_of_pil(image) if hasattr(image, "getexif") else _png_of_pixels(np.asarray(image))
    return name, content, mimetypes.guess_type(name)[0] or "application/octet-stream"


def _png_of_pil(image: Any) -> bytes:
    """Encode an image of PIL, turned as its EXIF orientation says."""
    from PIL import ImageOps  # noqa: PLC0415 - whoever has such an image has the package

    turned, out = ImageOps.exif_transpose(image), io.BytesIO()
    (turned if turned.mode in PNG_MODES else turned.convert("RGB")).save(out, "PNG")
    return out.getvalue()


def _png_of_pixels(pixels: npt.NDArray[Any]) -> bytes:
    """Encode grey, RGB or RGBA pixels (H, W), (H, W, 1), (H, W, 3) or (H, W, 4) as PNG."""
    colour = {1: 0, 3: 2, 4: 6}.get(pixels.shape[2] if pixels.ndim == 3 else 1)
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or colour is None or not pixels.size:
        raise ValueError(
            "an image is bytes, a path, an image of PIL, or uint8 (H, W), (H, W, 3) or (H, W, 4), got "
            f"{pixels.dtype} of shape {pixels.shape}; predict_tensors takes preprocessed inputs"
        )
    height, width = pixels.shape[:2]
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (1, 0)))  # each begins with its filter, 0 for none
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    written = b"\x89PNG\r\n\x1a\n"
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 1)), (b"IEND", b"")):
        written += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return written


def pack_images(folder: Path) -> bytes:
    """Pack a folder that holds a folder of images for each class, as `/fit` takes it."""
    archive = io.BytesIO()
    # Images are compressed already. A zip archive holds times from 1980 to 2107, and names in UTF-8.
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED, strict_timestamps=False) as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                name = os.fsencode(path.relative_to(folder))
                packed.write(path, name.decode("utf-8", "backslashreplace"))
    return archive.getvalue()


def upload_part(data: ValidationData) -> tuple[str, bytes, str]:
    """Name a validation set and read it; pack a folder of images, and write a document as JSON."""
    if isinstance(data, Mapping):
        name, content = "validation.json", json.dumps(plain(data), allow_nan=False).encode()
    elif isinstance(data, bytes):
        name, content = "validation", data
    elif Path(data).is_dir():
        name, content = f"{Path(data).name}.zip", pack_images(Path(data))
    else:
        name, content = read_file(data)
    return name, content, "application/octet-stream"


def plain(value: Any) -> Any:
    """Bring arrays to lists, a DataFrame to an object for each row, and missing values, as NaN, to null."""
    if hasattr(value, "columns"):
        if len(names := [str(name) for name in value.columns]) > len(set(names)):
            raise ValueError(f"the columns of a DataFrame need different names, got {', '.join(names)}")
        return _joined({name: plain(value[own]) for name, own in zip(names, value.columns, strict=True)})
    if hasattr(value, "to_list"):  # a column; those of pandas have other missing values than NaN
        missing = value.isna() if hasattr(value, "isna") else [False] * len(value)
        return [
            None if none else int(one) if isinstance(one, bool) else plain(one)
            for one, none in zip(value.to_list(), missing, strict=True)
        ]
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value
