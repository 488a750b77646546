"""Images of every kind that data sets hold come out as 8-bit RGB or grey, upright, with their levels.

All of it holds with simplejpeg and without.
"""

import io

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from lapbench.datamodules import decoding
from lapbench.datamodules.decoding import decode_image
from lapbench.errors import UserError

ORIENTATION = 0x0112
GRADIENT = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20  # 3 rows, 4 columns


@pytest.fixture(autouse=True, params=[simplejpeg, None], ids=["simplejpeg", "pillow"])
def _decoder(request, monkeypatch):
    monkeypatch.setattr(decoding, "simplejpeg", request.param)


def encoded(image, file_format="PNG", **settings):
    stream = io.BytesIO()
    image.save(stream, file_format, **settings)
    return stream.getvalue()


def pixels(data, channels=3):
    array = decode_image(data, channels)
    assert array.dtype == np.uint8
    assert array.shape[2:] == ((3,) if channels == 3 else ())
    return array


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
    assert decode_image(encoded(Image.new("RGB", (32, 16)), "JPEG", exif=exif)).shape == (32, 16, 3)


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
        assert decode_image(encoded(image, file_format, exif=exif)).shape == (24, 32, 3)


def test_the_bytes_decide_not_the_name():
    for file_format in ("JPEG", "PNG", "WEBP"):
        assert decode_image(encoded(Image.new("RGB", (8, 8), "red"), file_format)).shape == (8, 8, 3)


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
                outcomes.add(decode_image(bytes(data)).shape[2:])
            except UserError:
                outcomes.add("error")
    assert outcomes == {(3,), "error"}


def by_pillow(data, channels=3):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB" if channels == 3 else "L"))


@pytest.mark.parametrize("size", [(1, 1), (2, 1), (7, 5), (17, 33), (63, 65), (130, 97)])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_jpegs_have_pillows_bits(mode, size):
    rng = np.random.default_rng(0)
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    rough = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
    smooth = Image.fromarray(rng.integers(0, 256, (4, 3, *shape[2:]), dtype=np.uint8)).resize(size)
    for image in (rough, smooth):
        for quality in (40, 90):
            for progressive in (False, True):
                for subsampling in ("4:4:4", "4:2:2", "4:2:0"):
                    options = {} if mode == "L" else {"subsampling": subsampling}
                    data = encoded(image, "JPEG", quality=quality, progressive=progressive, **options)
                    for channels in (1, 3):
                        assert np.array_equal(pixels(data, channels), by_pillow(data, channels))


@pytest.mark.parametrize("subsampling", ["444", "422", "420", "440", "411"])
def test_jpegs_of_another_encoder_have_pillows_bits(subsampling):
    array = np.asarray(Image.fromarray(np.random.default_rng(1).integers(0, 256, (5, 4, 3), np.uint8)).resize((61, 43)))
    data = simplejpeg.encode_jpeg(array.copy(), 85, "RGB", subsampling)
    assert np.array_equal(pixels(data), by_pillow(data))


def test_simplejpeg_decodes_the_common_kinds_only(monkeypatch):
    monkeypatch.setattr(decoding, "simplejpeg", simplejpeg)
    colour, grey = Image.new("RGB", (16, 8), "red"), Image.new("L", (16, 8), 9)
    common = encoded(colour, "JPEG")
    assert decoding._common_jpeg(common, 3).shape == (8, 16, 3)
    assert decoding._common_jpeg(encoded(grey, "JPEG"), 1).shape == (8, 16)
    for data, channels in (
        (common, 1),
        (encoded(grey, "JPEG"), 3),
        (encoded(Image.new("CMYK", (16, 8)), "JPEG"), 3),
        (encoded(colour, "JPEG", keep_rgb=True), 3),
        (common[:-4], 3),
        (common[:2], 3),
    ):
        assert decoding._common_jpeg(data, channels) is None
    # Pillow refuses images that are out of all proportion: it must see them.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16 * 8 - 1)
    assert decoding._common_jpeg(common, 3) is None
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16 * 8 // 2 - 1)
    with pytest.raises(UserError, match="decompression bomb"):
        decode_image(common)


def test_damaged_jpegs_have_pillows_outcome():
    rng = np.random.default_rng(2)
    whole = encoded(Image.fromarray(rng.integers(0, 256, (3, 4, 3), np.uint8)).resize((37, 29)), "JPEG")
    outcomes = {"error": 0, "pixels": 0}
    for trial in range(400):
        data = bytearray(whole)
        for place in rng.integers(0, len(data), 2):
            data[place] = rng.integers(0, 256)
        data = bytes(data[: int(rng.integers(2, len(data)))] if trial % 4 == 0 else data)
        try:
            expected = by_pillow(data)
        except (OSError, SyntaxError, ValueError):
            outcomes["error"] += 1
            with pytest.raises(UserError, match="cannot decode the image"):
                decode_image(data)
        else:
            outcomes["pixels"] += 1
            assert np.array_equal(pixels(data), expected)
    assert min(outcomes.values()) > 50
