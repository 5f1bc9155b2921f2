"""Images and tensors: from the bytes of a JPEG, PNG or WebP file, or from numbers, to one input.

Format and size are read from the header and checked before any pixel is decoded. A JPEG is decoded at 1/2,
1/4 or 1/8 of its size where the preprocessing shrinks it anyway. The EXIF orientation is applied, transparent
pixels are laid on the preprocessing's background, and every mode becomes 8-bit RGB. Colour profiles are
ignored, as they were in training. Animations are refused, because no frame of them is the input. The
preprocessing then does exactly what was done in the network's training.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError, WebPImagePlugin

from boxcal.models import InvalidImage, TooManyPixels, UnusableInput
from boxcal.models.inputs.base import Kind, Samples

# check_size replaces Pillow's own limit; its error names the size and the limit.
Image.MAX_IMAGE_PIXELS = None
# Pillow divides an image into blocks of 16 MiB, which glibc keeps for the thread that frees them: up to
# 250 MiB for each thread that ever decoded a large image. It returns blocks of more than 32 MiB to the
# system at once.
Image.core.set_block_size(64 * 2**20)  # type: ignore[attr-defined]

MAX_SIDE = 32_768
"""Longest side of an image, in pixels."""
MAX_ASPECT = 200
"""Longest side divided by the shortest."""
MAX_SCANS = 100
"""Of a progressive JPEG; encoders write about ten. Each is a pass over all pixels."""
DECODE_SECONDS = 10.0

PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
START_OF_SCAN = int.from_bytes(b"\xff\xda", "little")
SMALL_PIXELS = 1_000_000
"""Of an image that a decoder passes over in a few milliseconds."""
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of a JPEG's frame header, which holds its size."""
OTHER_FORMATS = (
    (4, b"ftypavi", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif1", "HEIC"),
    (4, b"ftyp", "a video"),
    (4, b"JXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (4, b"jP  ", "JPEG 2000"),
    (0, b"GIF8", "GIF"),
    (0, b"BM", "BMP"),
    (0, b"II*\x00", "TIFF"),
    (0, b"MM\x00*", "TIFF"),
    (0, b"%PDF", "PDF"),
    (128, b"DICM", "DICOM"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"<", "SVG, HTML or other text with tags"),
    (0, b"data:", "a data URL, not the bytes in it"),
    (0, b"/9j/", "a JPEG in base64, not its bytes"),
    (0, b"iVBORw0KGgo", "a PNG in base64, not its bytes"),
    (0, b"UklGR", "a WebP in base64, not its bytes"),
)
"""What people send instead: where it begins, with which bytes, and its name."""
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = {5, 6, 7, 8}
FROM_RIGHT, FROM_BOTTOM = {2, 3, 6, 7}, {3, 4, 7, 8}
"""Orientations whose first column, or row, is the last one of the file."""
MAX_DIMENSIONS = 32
"""Of a tensor in JSON."""
LARGEST_EXAMPLE = 1000
"""Numbers of a tensor that somebody may read."""
GREY_LEVELS = 16
DIGIT_SIDE = 8
LARGEST_SQUARE = 128 * DIGIT_SIDE


class Preprocessing(Protocol):
    """Turns an image into one input."""

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def background(self) -> int:
        """Grey level (0 black, 255 white) behind a transparent image."""
        ...

    def needed_size(self, width: int, height: int) -> tuple[int, int]:
        """Smallest width and height to which a decoder may shrink an image of this size."""
        ...

    def __call__(self, image: Image.Image, extent: Extent | None = None) -> NDArray[np.float32]:
        """Turn an image in mode RGB into one input; `extent`: where a decoder has shrunk it."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """Where the whole image lies in one that a decoder has shrunk, whose sides are rounded up."""

    width: int  # Of the whole image, in pixels
    height: int
    box: tuple[float, float, float, float]  # Left, upper, right and lower edge in the shrunk image

    @classmethod
    def of(cls, image: Image.Image) -> Extent:
        """Give that of an image that is not shrunk."""
        return cls(image.width, image.height, (0, 0, image.width, image.height))


@dataclass(frozen=True, slots=True)
class ImageClassification:
    """Resize the short side or both, crop the centre, scale to [0, 1], normalise, as torchvision's preset."""

    resize: int | tuple[int, ...]  # Length of the short side after resizing, in pixels; or height and width
    # Side of the square that is cut from the centre, in pixels; None where nothing is cut off
    crop: int | None
    mean: tuple[float, ...]  # Per channel, on the scale [0, 1]: three numbers for colour, one for grey
    std: tuple[float, ...]
    interpolation: Image.Resampling = Image.Resampling.BILINEAR
    channels_last: bool = False  # Whether the channels are the last dimension of an input, not the first
    # Whether a crop that cannot be in the centre lies left and above it, as transformers has it
    rounds_down: bool = field(default=False, repr=False)  # fingerprints have the rest

    @property
    def background(self) -> int:
        """White, as on a page."""
        return 255

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width, in the layout's order."""
        channels, (height, width) = len(self.mean), self.size
        return (height, width, channels) if self.channels_last else (channels, height, width)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an input."""
        if self.crop is not None:
            return self.crop, self.crop
        return (
            (self.resize, self.resize) if isinstance(self.resize, int) else (self.resize[0], self.resize[1])
        )

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing; the long side is rounded down, as torchvision does."""
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        if width <= height:
            return self.resize, int(self.resize * height / width)
        return int(self.resize * width / height), self.resize

    def needed_size(self, width: int, height: int) -> tuple[int, int]:
        """Twice the size of the resized image: shrinking to it in the decoder hardly changes the result."""
        across, down = self.resized(width, height)
        return 2 * across, 2 * down

    def __call__(self, image: Image.Image, extent: Extent | None = None) -> NDArray[np.float32]:
        """Turn an image in mode RGB into one float32 input; `extent`: where a decoder has shrunk it."""
        if len(self.mean) == 1:
            image = image.convert("L")
        pixels = np.atleast_3d(np.asarray(self.crop_of(image, extent or Extent.of(image))))
        # (x / 255 - mean) / std as one multiplication and one subtraction.
        std = np.asarray(self.std, np.float32)
        factor, offset = np.float32(1 / 255) / std, np.asarray(self.mean, np.float32) / std
        if not self.channels_last:
            pixels = pixels.transpose(2, 0, 1)
            factor, offset = factor[:, None, None], offset[:, None, None]
        scaled: NDArray[np.float32] = np.multiply(pixels, factor, dtype=np.float32, order="C")
        scaled -= offset
        return scaled

    def crop_of(self, image: Image.Image, extent: Extent) -> Image.Image:
        """Resize, and crop the square in the centre."""
        (width, height), whole = self.resized(extent.width, extent.height), extent.box
        if self.crop is None:
            return image.resize((width, height), self.interpolation, whole)
        left, top = (self._start(side, self.crop) for side in (width, height))
        if self.crop <= min(width, height):
            # Only the pixels inside the crop are computed; the filter still reads their neighbours.
            across, down = (whole[2] - whole[0]) / width, (whole[3] - whole[1]) / height
            box = (
                whole[0] + left * across,
                whole[1] + top * down,
                whole[0] + (left + self.crop) * across,
                whole[1] + (top + self.crop) * down,
            )
            return image.resize((self.crop, self.crop), self.interpolation, box)
        cropped = Image.new(image.mode, (self.crop, self.crop))
        cropped.paste(image.resize((width, height), self.interpolation, whole), (-left, -top))
        return cropped

    def _start(self, side: int, crop: int) -> int:
        """Return where the crop begins: below 0 where it is padded, which torchvision rounds otherwise."""
        if side < crop:
            return -((crop - side) // 2)
        return (side - crop) // 2 if self.rounds_down else round((side - crop) / 2)


@dataclass(frozen=True, slots=True)
class DigitLevels:
    """Turn an image into the form of scikit-learn's digits: 8 × 8, white on black, integers 0 to 16.

    The data set counts the inked pixels of 4 × 4 blocks; averaging areas and rounding does the same.
    """

    @property
    def background(self) -> int:
        """Black: the digits are white."""
        return 0

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """One grey channel, height, width."""
        return (1, DIGIT_SIDE, DIGIT_SIDE)

    def needed_size(self, width: int, height: int) -> tuple[int, int]:
        """Eight pixels per side of each averaged block are enough."""
        side = 8 * DIGIT_SIDE
        return side, side

    def __call__(self, image: Image.Image, extent: Extent | None = None) -> NDArray[np.float32]:
        """Turn an image in mode RGB into float32 (1, 8, 8), integers 0 to 16."""
        grey = image.convert("L")
        if grey.width != grey.height:
            # Averaged first where it is large: the square has the area of the longer side.
            grey = grey.reduce(max(1, max(grey.size) // LARGEST_SQUARE))
            side = max(grey.size)
            square = Image.new("L", (side, side), self.background)
            square.paste(grey, ((side - grey.width) // 2, (side - grey.height) // 2))
            grey = square
        if grey.width != DIGIT_SIDE:
            grey = grey.resize((DIGIT_SIDE, DIGIT_SIDE), Image.Resampling.BOX)
        levels: NDArray[np.float32] = np.asarray(grey, np.float32)[None] * np.float32(GREY_LEVELS / 255)
        return levels.round()


class ImageInputs:
    """Encoded images, if there is a preprocessing, and tensors.

    `preprocessing`: turns an image into one sample; None where the backbone reads tensors only.
    `holds_bytes`: whether the model reads integers from 0 to 255.
    """

    def __init__(
        self, preprocessing: Preprocessing | None, shape: tuple[int, ...], *, holds_bytes: bool = False
    ) -> None:
        self.preprocessing = preprocessing
        self.shape = shape
        self._holds_bytes = holds_bytes
        self.kind: Kind = "tensors" if preprocessing is None else "images"
        self.members = ("tensor",) if preprocessing is None else ("image", "tensor")

    def refusal(self, member: str) -> str:
        """Say why this input cannot be read."""
        if member == "image":
            return (
                f"The model takes tensors of the shape {self.shape}; its declaration does not say how an "
                "image becomes one."
            )
        return f"The model takes {' or '.join(self.members)}, not {member}."

    def example(self) -> dict[str, Any] | None:
        """Give a tensor of zeros, if it is small."""
        if self.kind == "images" or math.prod(self.shape) > LARGEST_EXAMPLE:
            return None
        return {"tensor": np.zeros(self.shape).tolist()}

    def blank(self, count: int) -> Samples:
        """Give zeros (count, *shape), float32."""
        return np.zeros((count, *self.shape), np.float32)

    def decode(self, member: str, value: Any, max_pixels: int) -> Samples:
        """Turn an encoded image, or a tensor of nested lists, into one sample; raises BackboneError."""
        if member == "image" and self.preprocessing is not None:
            return decode(value, preprocessing=self.preprocessing, max_pixels=max_pixels)
        return self._read(read_tensor(value, self.shape), "tensor")

    def check(self, values: NDArray[Any]) -> Samples:
        """Check tensors (N, *shape), and convert them to float32."""
        if values.shape[1:] != self.shape or values.ndim == 0 or not len(values):
            expected = ", ".join(("N", *map(str, self.shape)))
            raise UnusableInput(f"The array has the shape {values.shape}; the model takes ({expected}).")
        with np.errstate(over="ignore"):
            samples = values.astype(np.float32)
        return self._read(_finite(samples, "array"), "array")

    def batch(self, samples: Samples) -> Samples:
        """Give the samples as they are."""
        return samples

    def _read(self, samples: Samples, name: str) -> Samples:
        if self._holds_bytes and not np.array_equal(samples, np.clip(np.rint(samples), 0, 255)):
            raise UnusableInput(f"The {name} holds other numbers than integers from 0 to 255 (uint8).")
        return samples


def decode(data: bytes, *, preprocessing: Preprocessing, max_pixels: int) -> NDArray[np.float32]:
    """Turn a whole JPEG, PNG or WebP file into one input of the shape `preprocessing.input_shape`.

    Raises InvalidImage for other formats and animated or damaged images, and TooManyPixels for those whose
    header announces a larger product of width and height than `max_pixels`.
    """
    kind = image_format(data)
    width, height = image_size(data)
    check_size(width, height, max_pixels)
    if kind == "JPEG" and (scans := count_scans(data)) > MAX_SCANS:
        raise InvalidImage(f"The JPEG image has {scans:,} scans; at most {MAX_SCANS} are decoded.")
    # All scans of a small image take about a second, and a method in Python for each of forty reads costs
    # as much as the rest of the header.
    source = io.BytesIO(data) if width * height <= SMALL_PIXELS else _TimedReader(data)
    extent = None
    try:
        with Image.open(source, formats=[kind]) as image:
            check_size(image.width, image.height, max_pixels)
            # A JPEG of several images is a photograph with a preview or its depth, as phones write it.
            if kind != "JPEG" and getattr(image, "is_animated", False):
                raise InvalidImage(f"The {kind} image is an animation; send one still image.")
            if kind == "JPEG":
                orientation = _orientation(image)
                sides = image.size[::-1] if orientation in SIDEWAYS else image.size
                needed = preprocessing.needed_size(*sides)
                drafted = image.draft("RGB", needed if sides == image.size else needed[::-1])
                extent = drafted and _extent(sides, image.size, drafted[1], orientation)
                if isinstance(image, ImageFile.ImageFile):
                    # So that the time is checked often where a scan takes long.
                    image.decodermaxblock = 4096 if image.width * image.height > SMALL_PIXELS else 2**16
            image.load()
            turn = TURNS.get(_orientation(image))
            flat = flatten(image, preprocessing.background)
    except UnidentifiedImageError as error:  # its message has the address of an object
        raise InvalidImage(
            f"The {kind} image of {len(data):,} bytes is damaged: no readable header."
        ) from error
    except (InvalidImage, MemoryError):
        raise
    except Exception as error:  # decoders answer damaged bytes with nearly every kind of exception
        raise InvalidImage(f"The {kind} image of {len(data):,} bytes is damaged: {error}.") from error
    return preprocessing(flat if turn is None else flat.transpose(turn), extent)


def is_hidden(name: str) -> bool:
    """Whether a file or folder beside images is hidden, or left there by a file manager."""
    return name.startswith(".") or name in {"__MACOSX", "Thumbs.db"}


def image_format(data: bytes) -> str:
    """Tell JPEG, PNG and WebP apart by their first bytes; InvalidImage if they are none of them."""
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if not data:
        raise InvalidImage("The image is empty: 0 bytes.")
    found = (name for place, start, name in OTHER_FORMATS if data.startswith(start, place))
    got = next(found, f"data that begin with {data[:8]!r}")
    raise InvalidImage(f"Unsupported format: expected JPEG, PNG or WebP, got {got}.")


def count_scans(data: bytes) -> int:
    """Count the markers at the start of a JPEG's scans: numbers of two bytes from an even or an odd place.

    Eight times as fast as `bytes.count`.
    """
    places = (np.frombuffer(data, "<u2", (len(data) - start) // 2, start) for start in (0, 1))
    return sum(int(np.count_nonzero(numbers == START_OF_SCAN)) for numbers in places)


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Raise TooManyPixels for more than `max_pixels` pixels, or sides that are too long or too unequal."""
    shorter, longer = sorted((width, height))
    if width * height > max_pixels:
        limit = f"at most {max_pixels:,} are decoded"
    elif longer > MAX_SIDE:
        limit = f"a side has at most {MAX_SIDE:,}"
    elif longer > MAX_ASPECT * max(shorter, 1):
        limit = f"the longer side is at most {MAX_ASPECT} times the shorter"
    else:
        return
    raise TooManyPixels(f"The image has {width:,} x {height:,} pixels; {limit}.")


def image_size(data: bytes) -> tuple[int, int]:
    """Read width and height of a JPEG, PNG or WebP file from its header; InvalidImage if it has none."""
    kind = image_format(data)
    if kind == "WEBP":
        return webp_header(data)[:2]
    if kind == "PNG" and len(data) >= 24:
        return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    position = 2
    while kind == "JPEG" and position + 9 <= len(data) and data[position] == 0xFF:
        marker = data[position + 1]
        if marker in FRAMES:
            return int.from_bytes(data[position + 7 : position + 9]), int.from_bytes(
                data[position + 5 : position + 7]
            )
        # 0xFF may be repeated before a marker.
        position += 1 if marker == 0xFF else 2 + int.from_bytes(data[position + 2 : position + 4])
    raise InvalidImage(f"The {kind} image of {len(data):,} bytes is damaged: its header cannot be read.")


def webp_header(data: bytes) -> tuple[int, int, bool]:
    """Read width, height and whether it is animated from the first chunk of a WebP file.

    Raises InvalidImage where this is not VP8, VP8L or VP8X, or is cut off. RFC 9649, sections 2.5 to 2.7 and
    3.4; RFC 6386, section 9.1.
    """
    chunk, body = data[12:16], data[20:30]
    if chunk == b"VP8X" and len(body) >= 10:
        width, height = (1 + int.from_bytes(body[start : start + 3], "little") for start in (4, 7))
        return width, height, bool(body[0] & 0x02)
    if chunk == b"VP8L" and len(body) >= 5 and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), False
    if chunk == b"VP8 " and len(body) >= 10 and body[3:6] == b"\x9d\x01\x2a":
        width, height = (int.from_bytes(body[start : start + 2], "little") & 0x3FFF for start in (6, 8))
        return width, height, False
    raise InvalidImage(f"The WEBP image of {len(data):,} bytes is damaged: its header cannot be read.")


def flatten(image: Image.Image, background: int) -> Image.Image:
    """Convert an image of any mode to 8-bit RGB, on a grey `background` where it is transparent."""
    if image.mode in {"I", "I;16", "I;16B", "I;16L"}:
        # 16 bits of grey: keep the upper 8, as is done to 16 bits of colour.
        values = np.asarray(image)
        grey = Image.fromarray((values >> 8).clip(0, 255).astype(np.uint8))
        return grey.convert("RGB")
    if image.has_transparency_data:
        layered = image.convert("RGBA")
        canvas = Image.new("RGBA", layered.size, (background, background, background, 255))
        return Image.alpha_composite(canvas, layered).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which would copy it


def _extent(
    sides: tuple[int, int], shrunk: tuple[int, int], box: tuple[float, ...], orientation: int
) -> Extent:
    """Give the extent of an upright image of these sides, which its file has in this box of a shrunk one."""
    _, _, width, height = box
    if orientation in SIDEWAYS:
        width, height, shrunk = height, width, shrunk[::-1]
    left = shrunk[0] - width if orientation in FROM_RIGHT else 0
    top = shrunk[1] - height if orientation in FROM_BOTTOM else 0
    return Extent(*sides, (left, top, left + width, top + height))


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF is ignored; the pixels are unaffected
        return 1


class _TimedReader(io.BytesIO):
    """The bytes of an image; reading them fails `DECODE_SECONDS` after the first, which ends the decoding."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._end = time.monotonic() + DECODE_SECONDS

    def read(self, size: int | None = -1, /) -> bytes:
        if time.monotonic() > self._end:
            raise InvalidImage(f"The image takes more than {DECODE_SECONDS:g} s to decode.")
        return super().read(size)


def read_tensor(value: Any, shape: Sequence[int]) -> NDArray[np.float32]:
    """Read one input from nested JSON lists."""
    if (actual := _shape(value)) != tuple(shape):
        raise UnusableInput(f"The tensor has the shape {actual}; the model takes {tuple(shape)}.")
    samples = np.empty(actual, np.float32)
    _fill(samples, value)
    return _finite(samples, "tensor")


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of nested lists, by the first item of each."""
    shape: tuple[int, ...] = ()
    while isinstance(value, list) and len(shape) <= MAX_DIMENSIONS:
        shape = (*shape, len(value))
        value = value[0] if value else None
    return shape


def _fill(target: NDArray[np.float32], value: Any) -> None:
    """Fill an array from nested lists, one innermost list at a time; other threads can run between."""
    if not isinstance(value, list) or len(value) != len(target):
        raise UnusableInput("The tensor is ragged: its lists differ in length.")
    if target.ndim > 1:
        for part, item in zip(target, value, strict=True):
            _fill(part, item)
        return
    try:
        if not all(type(number) in (float, int) for number in value):
            raise UnusableInput("The tensor holds something that is not a number.")
        with np.errstate(over="ignore"):
            target[...] = np.array(value, np.float64)
    except OverflowError:
        raise UnusableInput("The tensor holds an integer that is too large.") from None


def _finite(samples: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    if not np.isfinite(samples).all():
        raise UnusableInput(f"The {name} holds NaN, or numbers that are infinite in float32.")
    return samples
