"""Images of every kind that data sets hold come out as 8-bit RGB or grey, upright, with their levels."""

import io

import numpy as np
import pytest
from PIL import Image

from lapbench.datamodules.decoding import decode_image
from lapbench.errors import UserError

ORIENTATION = 0x0112
GRADIENT = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20  # 3 rows, 4 columns


def encoded(image, file_format="PNG", **settings):
    stream = io.BytesIO()
    image.save(stream, file_format, **settings)
    return stream.getvalue()


def pixels(data, channels=3):
    image = decode_image(data, channels)
    assert image.mode == ("RGB" if channels == 3 else "L")
    return np.asarray(image)


def test_rgb_is_unchanged():
    array = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(pixels(encoded(Image.fromarray(array))), array)


def test_grey_becomes_three_equal_channels_or_stays():
    data = encoded(Image.fromarray(GRADIENT))
    assert np.array_equal(pixels(data), np.stack([GRADIENT] * 3, -1))
    assert np.array_equal(pixels(data, 1), GRADIENT)


def test_rgb_becomes_grey_by_luma():
    array = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255]]], np.uint8)
    assert pixels(encoded(Image.fromarray(array)), 1).tolist() == [[76, 150, 29]]  # ITU-R 601: 0.299, 0.587, 0.114


def test_palette():
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    assert pixels(encoded(image)).tolist() == [[[10, 20, 30], [40, 50, 60], [70, 80, 90]]]


@pytest.mark.parametrize("transparency", [1, b"\xff\x00\xff"])
def test_transparent_palette_is_laid_on_white(transparency):
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8)).convert("P")
    image.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    data = encoded(image, transparency=transparency)
    assert pixels(data).tolist() == [[[10, 20, 30], [255, 255, 255], [70, 80, 90]]]


def test_alpha_is_laid_on_white():
    array = np.array([[[0, 0, 0, 255], [0, 0, 0, 0], [0, 0, 0, 51]]], np.uint8)
    # 51 / 255 = a fifth of black on four fifths of white.
    assert pixels(encoded(Image.fromarray(array))).tolist() == [[[0] * 3, [255] * 3, [204] * 3]]
    grey = Image.merge("LA", (Image.new("L", (1, 1), 0), Image.new("L", (1, 1), 51)))
    assert pixels(encoded(grey), 1).tolist() == [[204]]


def test_transparent_colour_of_rgb_and_grey():
    rgb = Image.fromarray(np.array([[[1, 2, 3], [9, 9, 9]]], np.uint8))
    assert pixels(encoded(rgb, transparency=(1, 2, 3))).tolist() == [[[255] * 3, [9] * 3]]
    grey = Image.fromarray(np.array([[5, 9]], np.uint8))
    assert pixels(encoded(grey, transparency=5), 1).tolist() == [[255, 9]]


def test_cmyk_jpeg():
    ink = Image.new("CMYK", (16, 16), (0, 255, 255, 0))  # magenta and yellow make red
    assert np.abs(pixels(encoded(ink, "JPEG")).astype(int) - [255, 0, 0]).max() <= 3


def test_sixteen_bit_grey_keeps_its_levels():
    levels = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    data = encoded(Image.fromarray(levels))
    assert Image.open(io.BytesIO(data)).mode.startswith("I")
    assert pixels(data, 1).tolist() == [[0, 0, 1, 128, 255]]
    assert pixels(data)[..., 2].tolist() == [[0, 0, 1, 128, 255]]


def test_one_bit():
    data = encoded(Image.fromarray(np.array([[True, False]])))
    assert pixels(data, 1).tolist() == [[255, 0]]


@pytest.mark.parametrize("file_format", ["PNG", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, GRADIENT),
        (2, GRADIENT[:, ::-1]),
        (3, GRADIENT[::-1, ::-1]),
        (4, GRADIENT[::-1]),
        (5, GRADIENT.T),
        (6, np.rot90(GRADIENT, -1)),
        (7, GRADIENT[::-1, ::-1].T),
        (8, np.rot90(GRADIENT)),
        (99, GRADIENT),
    ],
)
def test_exif_orientation_is_applied(orientation, upright, file_format):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    image = Image.fromarray(GRADIENT).convert("RGB")
    settings = {"lossless": True} if file_format == "WEBP" else {}
    assert np.array_equal(pixels(encoded(image, file_format, exif=exif, **settings))[..., 0], upright)


def test_exif_orientation_of_a_jpeg():
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    assert decode_image(encoded(Image.new("RGB", (32, 16)), "JPEG", exif=exif)).size == (16, 32)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0garbage",
        b"Exif\0\0",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
        b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x05\0\0\xff\xff",  # orientation as far-away text
        b"Exif\0\0II*\0\xff\xff\xff\x7f",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x0c\0\xff\xff\xff\xff\0\0\0\0",
    ],
)
def test_bad_exif_neither_crashes_nor_warns(exif):
    image = Image.fromarray(np.tile(GRADIENT, (8, 8))).convert("RGB")
    for file_format in ("JPEG", "PNG", "WEBP"):
        assert decode_image(encoded(image, file_format, exif=exif)).size == image.size


def test_the_bytes_decide_not_the_name():
    for file_format in ("JPEG", "PNG", "WEBP"):
        assert decode_image(encoded(Image.new("RGB", (8, 8), "red"), file_format)).size == (8, 8)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("kept", [0.3, 0.9])
def test_truncated_images_are_errors(file_format, kept):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), file_format)
    with pytest.raises(UserError, match="cannot decode the image") as caught:
        decode_image(data[: int(len(data) * kept)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF\0\0\0\0WEBP", b"GIF89a" + b"\0" * 64]
)
def test_other_bytes_are_errors(data):
    with pytest.raises(UserError, match="cannot decode the image"):
        decode_image(data)


def test_damaged_images_raise_nothing_else():
    rng = np.random.default_rng(1)
    image = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    outcomes = set()
    for file_format in ("JPEG", "PNG", "WEBP"):
        whole = encoded(image, file_format, exif=exif)
        for _ in range(200):
            data = bytearray(whole)
            for place in rng.integers(0, len(data), 3):
                data[place] = rng.integers(0, 256)
            try:
                outcomes.add(decode_image(bytes(data)).mode)
            except UserError:
                outcomes.add("error")
    assert outcomes == {"RGB", "error"}
