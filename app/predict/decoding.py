"""From the bytes of an encoded image to one input of the backbone; runs in the decoding pool, off the loop.

JPEG, PNG and WebP are read. Size and kind are checked from the header, before a pixel is decoded, and a
JPEG is decoded at a half, a quarter or an eighth of its size where the preprocessing shrinks it anyway. A
image is turned as its EXIF orientation says, laid on the preprocessing's background where it is
transparent, and brought to 8 bits. Colour profiles are ignored, as they were in training. Animations are
refused: which of their frames was meant is not ours to guess.
"""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from boxcal.app.errors import ImageTooLarge, InvalidInput
from boxcal.models.preprocessing import Preprocessing

# The limit below is stricter, is known to the client, and names the size.
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
    """Bring an encoded image to one input of the backbone.

    Parameters
    ----------
    data
        The whole of a JPEG, PNG or WebP file.
    preprocessing
        The way from an image to an input.
    max_pixels
        Largest product of width and height that is decoded.

    Returns
    -------
    NDArray
        float32 of the shape `preprocessing.input_shape`.

    Raises
    ------
    InvalidInput
        If the bytes are no image, an animation, truncated or damaged.
    ImageTooLarge
        If the header promises more pixels than `max_pixels`.
    """
    kind = image_format(data)
    if kind == "WEBP":
        # Pillow would allocate the canvas while opening it.
        width, height, animated = webp_header(data)
        check_size(width, height, max_pixels)
        if animated:
            raise InvalidInput("The WebP image is an animation; send one still image.")
    try:
        with Image.open(io.BytesIO(data), formats=[kind]) as image:
            check_size(image.width, image.height, max_pixels)
            if kind == "PNG" and getattr(image, "is_animated", False):
                raise InvalidInput("The PNG image is an animation; send one still image.")
            if kind == "JPEG":
                image.draft("RGB", preprocessing.needed_size(image.width, image.height))
            image.load()
            turn = TURNS.get(_orientation(image))
            flat = flatten(image, preprocessing.background)
    except (InvalidInput, ImageTooLarge, MemoryError):
        raise
    except Exception as error:  # decoders answer damaged bytes with nearly every kind of exception
        raise InvalidInput(f"The {kind} image of {len(data):,} bytes is damaged: {error}.") from error
    return preprocessing(flat if turn is None else flat.transpose(turn))


def image_format(data: bytes) -> str:
    """Tell JPEG, PNG and WebP apart by their first bytes.

    Raises
    ------
    InvalidInput
        If the bytes are none of them.
    """
    if data.startswith(b"\xff\xd8\xff"):
        return "JPEG"
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "PNG"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if not data:
        raise InvalidInput("The image is empty: 0 bytes.")
    raise InvalidInput(f"{len(data):,} bytes that begin with {data[:8]!r} are no JPEG, PNG or WebP image.")


def check_size(width: int, height: int, max_pixels: int) -> None:
    """Hold an image to the limit on pixels.

    Raises
    ------
    ImageTooLarge
        Naming its size and the limit.
    """
    if width * height > max_pixels:
        raise ImageTooLarge(
            f"The image has {width:,} x {height:,} pixels; at most {max_pixels:,} are decoded."
        )


def webp_header(data: bytes) -> tuple[int, int, bool]:
    """Read width, height and whether it is an animation from the first chunk of a WebP file.

    Raises
    ------
    InvalidInput
        If the first chunk is none of the three that a WebP file begins with, or is cut off.

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
    raise InvalidInput(f"The WEBP image of {len(data):,} bytes is damaged: its header cannot be read.")


def flatten(image: Image.Image, background: int) -> Image.Image:
    """Bring an image of any mode to 8-bit RGB, on a grey `background` where it is transparent."""
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
    except Exception:  # damaged EXIF turns nothing; the pixels are as good as ever
        return 1
