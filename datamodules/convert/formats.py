"""Image bytes: which format they are, and lossless PNG for arrays."""

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The extensions (lower case) by which a sample's image is told from its other members.
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")


def image_extension(image: bytes) -> str | None:
    """The extension that the first bytes call for (``jpg``, ``png``, ``webp``), None if they are no such image.

    ImageNet holds a PNG named ``.JPEG``, so names do not tell. Looking no further keeps conversion at copying speed:
    an image damaged further in is found when it is decoded.
    """
    if image.startswith(b"\xff\xd8\xff"):
        return "jpg"
    if image.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if image.startswith(b"RIFF") and image[8:12] == b"WEBP":
        return "webp"
    return None


def encode_png(pixels: "NDArray[np.uint8]") -> bytes:
    """``pixels`` [H, W] (grey) or [H, W, 3] (RGB) as the bytes of a PNG file."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, format="PNG")
    return stream.getvalue()


def shorten(value: Any) -> str:
    """``repr(value)`` cut to a length that fits an error line."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
