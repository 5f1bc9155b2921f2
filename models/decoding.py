"""Decodes an encoded image (JPEG, PNG or WebP) and hands it to the preprocessing.

Format and size are read from the header and checked before any pixel is decoded. A JPEG is decoded at 1/2,
1/4 or 1/8 of its size where the preprocessing shrinks it anyway. The EXIF orientation is applied, transparent
pixels are laid on the preprocessing's background, and every mode becomes 8-bit RGB. Colour profiles are
ignored, as they were in training. Animations are refused, because no frame of them is the input.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from boxcal.models.errors import InvalidImage, TooManyPixels
from boxcal.models.preprocessing import Preprocessing

# check_size replaces Pillow's own limit; its error names the size and the limit.
Image.MAX_IMAGE_PIXELS = None

PLUGINS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin)
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
    if kind == "WEBP":
        # Pillow would allocate the canvas while opening it.
        width, height, animated = webp_header(data)
        check_size(width, height, max_pixels)
        if animated:
            raise InvalidImage("The WebP image is an animation; send one still image.")
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            check_size(image.width, image.height, max_pixels)
            if kind == "PNG" and getattr(image, "is_animated", False):
                raise InvalidImage("The PNG image is an animation; send one still image.")
            if kind == "JPEG":
                image.draft("RGB", preprocessing.needed_size(image.width, image.height))
            image.load()
            turn = TURNS.get(_orientation(image))
            flat = flatten(image, preprocessing.background)
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


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Refuse an image with more than `max_pixels` pixels.

    Raises
    ------
    TooManyPixels
        Names its size and the limit.
    """
    if width * height > max_pixels:
        raise TooManyPixels(
            f"The image has {width:,} x {height:,} pixels; at most {max_pixels:,} are decoded."
        )


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
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF is ignored; the pixels are unaffected
        return 1
