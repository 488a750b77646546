"""Image bytes to 8-bit pixels, the same for every format that data sets bring along.

- Grey, palette and CMYK images become RGB (or all become grey with ``channels=1``).
- Transparent images are laid on white, as a browser shows them on an empty page.
- 16-bit grey keeps its levels: the high byte is taken (Pillow's own conversion clips everything above 255 to white).
- The EXIF orientation is applied; an unreadable EXIF block counts as none.
- The format is found from the bytes, never from the name.

Pillow decides all of that. simplejpeg, where it is installed, decodes the common JPEGs to the same bits in less time.
"""

import io
import math
import struct
import warnings

import numpy as np
import numpy.typing as npt
from PIL import Image

from lapbench.errors import UserError

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

Pixels = npt.NDArray[np.uint8]

FORMATS = ("JPEG", "PNG", "WEBP")
_ORIENTATION = 0x0112
_TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# The JPEGs that need no conversion after decoding: what simplejpeg calls them and their pixels, by channels.
_COMMON = {3: ("YCbCr", "RGB"), 1: ("Gray", "GRAY")}
# What Pillow raises on damaged input, by format and kind of damage.
DAMAGE = (OSError, SyntaxError, ValueError, KeyError, IndexError, TypeError, EOFError, struct.error)


def decode_image(data: bytes, channels: int = 3) -> Pixels:
    """Decode a JPEG, PNG or WebP image completely.

    Args:
        data: The file's bytes.
        channels: 3 for RGB, 1 for grey.

    Returns:
        uint8 [H, W, 3], or [H, W] with one channel. It may be read-only.

    Raises:
        UserError: not an image of these formats, truncated, or damaged.
    """
    jpeg = data.startswith(b"\xff\xd8")
    exif = any(name in data for name in ((b"Exif",) if jpeg else (b"Exif", b"eXIf", b"EXIF")))
    if simplejpeg is not None and jpeg and not exif:
        pixels = _common_jpeg(data, channels)
        if pixels is not None:
            return pixels
    if exif:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of every damaged tag
            image, transpose = _load(data)
    else:  # switching warnings off and on takes as long as decoding a small image
        image, transpose = _load(data)
    image = _eight_bit(image, "RGB" if channels == 3 else "L")
    return np.asarray(image.transpose(transpose) if transpose is not None else image)


def _common_jpeg(data: bytes, channels: int) -> Pixels | None:
    """The pixels of an intact JPEG of ordinary size and colours; None leaves all others, and complaints, to Pillow."""
    kind, wanted = _COMMON[channels]
    try:
        height, width, stored, _ = simplejpeg.decode_jpeg_header(data)
        if stored != kind or height * width > (Image.MAX_IMAGE_PIXELS or math.inf):
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(data, wanted)
    except ValueError:
        return None
    return pixels if channels == 3 else pixels[..., 0]


def _load(data: bytes) -> tuple[Image.Image, Image.Transpose | None]:
    """The image as it is stored, and what turns it upright."""
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
        image.load()
    except (*DAMAGE, Image.DecompressionBombError) as error:
        raise UserError(f"cannot decode the image ({len(data)} bytes): {_one_line(error)}") from error
    return image, _TRANSPOSES.get(_orientation(image)) if "exif" in image.info else None


def _eight_bit(image: Image.Image, mode: str) -> Image.Image:
    if image.mode == mode and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16-bit grey: "I;16", or "I" in older versions of Pillow
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert(mode)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layers = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), layers).convert(mode)
    return image.convert(mode)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) when there is none or it cannot be read."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except DAMAGE:
        return 1
    return orientation if isinstance(orientation, int) else 1


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
