"""Decodes an encoded image (JPEG, PNG or WebP) and hands it to the preprocessing.

Format and size are read from the header and checked before any pixel is decoded. A JPEG is decoded at 1/2,
1/4 or 1/8 of its size where the preprocessing shrinks it anyway. The EXIF orientation is applied, transparent
pixels are laid on the preprocessing's background, and every mode becomes 8-bit RGB. Colour profiles are
ignored, as they were in training. Animations are refused, because no frame of them is the input.
"""

from __future__ import annotations

import io
import time

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, JpegImagePlugin, PngImagePlugin, UnidentifiedImageError, WebPImagePlugin

from boxcal.models import InvalidImage, TooManyPixels
from boxcal.models.inputs.preprocessing import Preprocessing

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


def decode(data: bytes, *, preprocessing: Preprocessing, max_pixels: int) -> NDArray[np.float32]:
    """Turn an encoded image into one input of the backbone.

    Parameters
    ----------
    data
        A whole JPEG, PNG or WebP file.
    preprocessing
        Turns the decoded image into an input.
    max_pixels
        Largest width times height that is decoded.

    Returns
    -------
    NDArray
        float32 of the shape `preprocessing.input_shape`.

    Raises
    ------
    InvalidImage
        The format is not supported, or the image is animated, truncated or damaged.
    TooManyPixels
        The header announces more than `max_pixels`.
    """
    kind = image_format(data)
    width, height = image_size(data)
    check_size(width, height, max_pixels)
    if kind == "JPEG" and (scans := count_scans(data)) > MAX_SCANS:
        raise InvalidImage(f"The JPEG image has {scans:,} scans; at most {MAX_SCANS} are decoded.")
    # All scans of a small image take about a second, and a method in Python for each of forty reads costs
    # as much as the rest of the header.
    source = io.BytesIO(data) if width * height <= SMALL_PIXELS else _TimedReader(data)
    try:
        with Image.open(source, formats=[kind]) as image:
            check_size(image.width, image.height, max_pixels)
            if getattr(image, "is_animated", False):
                raise InvalidImage(f"The {kind} image is an animation; send one still image.")
            if kind == "JPEG":
                image.draft("RGB", preprocessing.needed_size(image.width, image.height))
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
    return preprocessing(flat if turn is None else flat.transpose(turn))


def image_format(data: bytes) -> str:
    """Tell JPEG, PNG and WebP apart by their first bytes.

    Raises
    ------
    InvalidImage
        They are none of them.
    """
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if not data:
        raise InvalidImage("The image is empty: 0 bytes.")
    raise InvalidImage(
        f"Unsupported format: expected JPEG, PNG or WebP, got data that begin with {data[:8]!r}."
    )


def count_scans(data: bytes) -> int:
    """Count the markers at the start of a JPEG's scans: numbers of two bytes from an even or an odd place.

    Eight times as fast as `bytes.count`.
    """
    places = (np.frombuffer(data, "<u2", (len(data) - start) // 2, start) for start in (0, 1))
    return sum(int(np.count_nonzero(numbers == START_OF_SCAN)) for numbers in places)


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image with more than `max_pixels` pixels, or with sides that are too long or too unequal.

    Raises
    ------
    TooManyPixels
        Names its size and the limit.
    """
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
    """Read width and height of a JPEG, PNG or WebP file from its header, without decoding it.

    Raises
    ------
    InvalidImage
        The format is not supported, or the header cannot be read.
    """
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

    Raises
    ------
    InvalidImage
        The first chunk is not VP8, VP8L or VP8X, or is cut off.

    References
    ----------
    RFC 9649, sections 2.5 to 2.7 and 3.4; RFC 6386, section 9.1.
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
