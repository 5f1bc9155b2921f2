"""Decoding: every kind of image people send, bytes that are none, and values that no input can hold."""

import base64
import io
import re
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional

from boxcal.models import InvalidImage, TooManyPixels, UnusableInput
from boxcal.models.inputs.images import DigitLevels, ImageClassification, Preprocessing, decode
from boxcal.models.inputs.rows import Column, RowInputs

DIGITS = DigitLevels()
IMAGENET = ImageClassification(resize=64, crop=56, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
MAX_PIXELS = 1_000_000


def read(data: bytes, preprocessing: Preprocessing = DIGITS, max_pixels: int = MAX_PIXELS) -> Any:
    return decode(data, preprocessing=preprocessing, max_pixels=max_pixels)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def scene(width: int = 320, height: int = 240) -> Image.Image:
    """A smooth image that no symmetry leaves unchanged."""
    y, x = np.mgrid[0 : 1 : height * 1j, 0 : 1 : width * 1j]
    pixels = np.stack([255 * x, 255 * y, 255 * x * y], axis=-1)
    return Image.fromarray(pixels.astype(np.uint8))


def test_an_image_is_squashed_to_height_and_width() -> None:
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (30, 50, 3), dtype=np.uint8))
    squash = ImageClassification(resize=(8, 6), crop=None, mean=(0.5,) * 3, std=(0.5,) * 3)
    pixels = np.asarray(image.resize((6, 8), Image.Resampling.BILINEAR)) / 255
    assert squash.input_shape == (3, 8, 6)
    np.testing.assert_allclose(squash(image), (pixels.transpose(2, 0, 1) - 0.5) / 0.5, atol=1e-6)


@pytest.mark.parametrize(("resize", "crop"), [(28, 31), (28, 29), (30, 34), (61, 64), (40, 32), (41, 32)])
@pytest.mark.parametrize("size", [(40, 28), (28, 28), (27, 90)])
def test_a_crop_is_that_of_torchvision(resize: int, crop: int, size: tuple[int, int]) -> None:
    """Also where it is larger than the image, and padded."""
    image = scene(*size)
    resized = functional.resize(image, resize, functional.InterpolationMode.BILINEAR)
    expected = np.asarray(functional.center_crop(resized, [crop, crop])).transpose(2, 0, 1) / 255
    found = ImageClassification(resize=resize, crop=crop, mean=(0.0,) * 3, std=(1.0,) * 3)(image)
    np.testing.assert_allclose(found, expected, atol=0.01)


def digit() -> Image.Image:
    levels = np.random.default_rng(0).integers(0, 17, (8, 8))
    return Image.fromarray(np.rint(levels * 255 / 16).astype(np.uint8))


def png_header(width: int, height: int) -> bytes:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    header = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    data = struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT"))
    return b"\x89PNG\r\n\x1a\n" + header + data


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_the_three_kinds_are_read(kind: str) -> None:
    image = scene()
    assert np.abs(read(encoded(image, kind, quality=95), IMAGENET) - IMAGENET(image)).max() < 0.04


def test_lossless_kinds_are_read_exactly() -> None:
    for data in (encoded(digit()), encoded(digit().convert("RGB"), "WEBP", lossless=True)):
        assert np.array_equal(read(data), DIGITS(digit().convert("RGB")))


@pytest.mark.parametrize("size", [(320, 240), (1600, 1200), (1203, 777), (90, 4000)])
def test_a_jpeg_shrunk_while_decoding_is_the_same_image(size: tuple[int, int]) -> None:
    data = encoded(scene(*size), "JPEG", quality=95)
    whole = IMAGENET(Image.open(io.BytesIO(data)).convert("RGB"))
    assert np.abs(read(data, IMAGENET, max_pixels=2_000_000) - whole).max() < 0.02


def test_a_jpeg_on_its_side_is_not_shrunk_below_twice_its_sides() -> None:
    stored = Image.fromarray(np.random.default_rng(0).integers(0, 256, (250, 1000, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(stored, "JPEG", exif=exif, quality=95)
    squash = ImageClassification(resize=(16, 128), crop=None, mean=(0.0,) * 3, std=(1.0,) * 3)
    upright = Image.open(io.BytesIO(data)).convert("RGB").transpose(Image.Transpose.ROTATE_270)
    assert np.abs(read(data, squash) - squash(upright)).max() < 0.03


# How a camera stores an upright scene under each orientation tag.
STORED = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_obeyed(kind: str, orientation: int) -> None:
    upright = scene(160, 120)
    turn = STORED[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(upright if turn is None else upright.transpose(turn), kind, exif=exif, quality=95)
    assert np.abs(read(data, IMAGENET) - IMAGENET(upright)).max() < 0.04


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize(("resize", "crop"), [(64, 56), (32, 32), (28, 40), ((24, 32), None)])
def test_a_jpeg_shrunk_while_decoding_is_cropped_as_the_whole_image(
    resize: int | tuple[int, int], crop: int | None, orientation: int
) -> None:
    """Where the sides, 401 and 301, are no multiples of what they are divided by."""
    grey = np.random.default_rng(3).integers(64, 192, (19, 25, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = Image.fromarray(grey).resize((401, 301), Image.Resampling.BICUBIC)
    data = encoded(stored, "JPEG", exif=exif, quality=95)
    preprocessing = ImageClassification(resize=resize, crop=crop, mean=(0.0,) * 3, std=(1.0,) * 3)
    whole = preprocessing(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert np.abs(read(data, preprocessing) - whole).max() < 3.5 / 255


def test_transparent_parts_show_the_preprocessings_background() -> None:
    clear = Image.new("RGBA", (32, 32), (200, 10, 10, 0))
    assert read(encoded(clear)).max() == 0
    assert read(encoded(clear), IMAGENET).min() == 1
    half = Image.new("LA", (32, 32), (255, 128))
    assert np.all(read(encoded(half)) == 8)
    palette = Image.new("P", (32, 32), 1)
    palette.putpalette([0, 0, 0, 255, 255, 255])
    assert np.all(read(encoded(palette)) == 16)
    assert read(encoded(palette, transparency=1)).max() == 0
    assert np.all(read(encoded(palette, transparency=b"\xff\x80")) == 8)
    assert read(encoded(Image.new("RGB", (8, 8), "white"), transparency=(255, 255, 255))).max() == 0


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA"])
def test_every_mode_of_png_is_read(mode: str) -> None:
    assert np.all(read(encoded(Image.new("L", (8, 8), 255).convert(mode))) == 16)


def test_png_of_16_bits_and_cmyk_and_grey_jpegs_are_read() -> None:
    for level, expected in ((65535, 16), (32768, 8)):
        assert np.all(read(encoded(Image.fromarray(np.full((8, 8), level, np.uint16)))) == expected)
    white = Image.new("CMYK", (64, 64), (0, 0, 0, 0))
    assert np.all(read(encoded(white, "JPEG")) == 16)
    assert np.all(read(encoded(white, "JPEG"), IMAGENET) > 0.98)
    assert np.all(read(encoded(Image.new("L", (64, 64), 255), "JPEG")) == 16)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty: 0 bytes"),
        (b"hello, this is no image", r"expected JPEG, PNG or WebP, got data that begin with b'hello, t'"),
        (b"%PDF-1.7", "expected JPEG, PNG or WebP"),
        (b"\xff\xd8\xff", "JPEG image of 3 bytes is damaged"),
        (b"\xff\xd8\xff\xe0" + bytes(2000), "JPEG image of 2,004 bytes is damaged"),
        (b"\x89PNG\r\n\x1a\n", "PNG image of 8 bytes is damaged"),
        (b"RIFF\x10\0\0\0WEBPVP8 ", "WEBP image of 16 bytes is damaged: its header cannot be read"),
        *(
            (encoded(Image.new("RGB", (9, 9)), kind), f"expected JPEG, PNG or WebP, got {kind}")
            for kind in ("GIF", "BMP", "TIFF", "AVIF")
        ),
        (b"\0\0\0\x24ftypheic\0\0\0\0mif1heic", "got HEIC"),
        (base64.b64encode(encoded(Image.new("RGB", (9, 9)), "JPEG")), "got a JPEG in base64, not its bytes"),
        (b"hello", re.escape("got data that begin with b'hello'")),
    ],
)
def test_what_is_no_image_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidImage, match=message) as caught:
        read(data)
    assert "0x" not in str(caught.value)  # no address of an object


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.95])
def test_truncated_images_are_refused(kind: str, kept: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (100, 100, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    with pytest.raises(InvalidImage, match="damaged"):
        read(data[: int(kept * len(data))])


def test_animations_are_refused() -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green")]
    for kind in ("PNG", "WEBP"):
        with pytest.raises(InvalidImage, match="animation"):
            read(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))


def test_of_a_jpeg_of_several_images_the_first_is_read() -> None:
    """As phones and cameras write photographs with a preview, a gain map or the depth."""
    image = scene(2000, 1500)
    several = encoded(image, "MPO", save_all=True, append_images=[Image.new("RGB", (64, 48), "red")])
    assert several.count(b"\xff\xd8\xff") == 2
    np.testing.assert_array_equal(
        read(several, IMAGENET, 10_000_000), read(encoded(image, "JPEG"), IMAGENET, 10_000_000)
    )


def test_too_many_pixels_are_refused_by_the_header_alone() -> None:
    with pytest.raises(TooManyPixels, match=r"50,000 x 50,000 pixels; at most 1,000,000"):
        read(png_header(50_000, 50_000))
    for kind, options in (("JPEG", {}), ("PNG", {}), ("WEBP", {}), ("WEBP", {"lossless": True})):
        image = Image.new("RGB", (1001, 1000))
        with pytest.raises(TooManyPixels, match=r"1,001 x 1,000 pixels"):
            read(encoded(image, kind, **options))
        read(encoded(image, kind, **options), max_pixels=1_001_000)
    alpha = Image.new("RGBA", (1200, 1000), (0, 0, 0, 9))
    with pytest.raises(TooManyPixels, match=r"1,200 x 1,000"):
        read(encoded(alpha, "WEBP"))
    canvas = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (16382).to_bytes(3, "little") * 2
    with pytest.raises(TooManyPixels, match="16,383 x 16,383"):
        read(b"RIFF" + struct.pack("<I", 4 + len(canvas)) + b"WEBP" + canvas)


@settings(max_examples=300)
@given(
    st.sampled_from(["JPEG", "PNG", "WEBP"]),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=20),
)
def test_mutated_images_are_read_or_refused_and_nothing_else(
    kind: str, changes: list[tuple[float, int]]
) -> None:
    data = bytearray(encoded(scene(40, 30), kind))
    for place, value in changes:
        data[int(place * len(data))] = value
    try:
        sample = read(bytes(data))
    except InvalidImage:
        return
    assert sample.shape == (1, 8, 8)
    assert np.isfinite(sample).all()


TOO_LARGE: dict[str, tuple[float | int, str]] = {
    "float32": (1e39, "3.4028234663852886e+38"),
    "float64": (10**400, "1.7976931348623157e+308"),
    "int32": (2**31, "2147483647"),
    "int64": (2**53, "9007199254740991"),
    "bool": (10**400, "1.7976931348623157e+308"),
}


def inputs(dtype: str) -> RowInputs:
    return RowInputs([Column("x", dtype, 2)], ["a", "b"], has_missing=False)


@pytest.mark.parametrize("dtype", TOO_LARGE)
@pytest.mark.parametrize("sign", [1, -1])
def test_values_beyond_the_type_of_the_input_are_refused(dtype: str, sign: int) -> None:
    value, limit = TOO_LARGE[dtype]
    with pytest.raises(UnusableInput) as caught:
        inputs(dtype).decode("features", [0, sign * value], 0)
    assert f"The feature 'b' is {sign * value!s:.100}; " in str(caught.value)
    assert f"{dtype}, at most {limit} in magnitude" in str(caught.value)
    if dtype in ("float32", "int32", "int64"):
        with pytest.raises(UnusableInput, match=rf"'b' .*at most {re.escape(limit)} in magnitude"):
            inputs(dtype).check(np.array([[0, 0], [0, sign * value]], np.float64))


@pytest.mark.parametrize("dtype", TOO_LARGE)
def test_the_largest_values_reach_the_model_as_they_are(dtype: str) -> None:
    rows = inputs(dtype)
    largest: Any = rows.columns[0].largest
    sample = rows.decode("features", [largest, -largest], 0)[None]
    np.testing.assert_array_equal(rows.check(sample), sample)
    np.testing.assert_array_equal(rows.batch(sample)["x"], np.array([[largest, -largest]], dtype))
