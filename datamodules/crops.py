"""Crops of decoded images that work on their bytes: what the general transforms give, without their bookkeeping.

All stay with 8-bit pixels.
"""

import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from PIL import Image
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision.transforms import functional
from torchvision.transforms.functional import pil_modes_mapping
from torchvision.transforms.v2 import functional as functional_v2

from lapbench.datamodules.decoding import Pixels


def planes(image: Image.Image | Pixels) -> Tensor:
    """An image [H, W] or [H, W, C] as a uint8 tensor [C, H, W] of its own memory."""
    pixels = np.asarray(image)
    return torch.from_numpy(np.array(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1), order="C"))


class ResizedCrop:
    """Random resized crop and random flip: only the crop goes through Pillow, not the whole photograph.

    Args:
        drawn: timm's transform, which draws the crop and knows size and interpolation.
        hflip: Probability of a horizontal flip.
        backend: ``pil`` resizes with Pillow, ``tensor`` with torch's 8-bit kernels.
    """

    def __init__(self, drawn: RandomResizedCropAndInterpolation, hflip: float, backend: str) -> None:
        self.drawn = drawn
        self.hflip = hflip
        self.resized = _by_torch if backend == "tensor" else _by_pillow

    def __call__(self, pixels: Pixels) -> Pixels:
        """uint8 [H, W] or [H, W, 3] to [size, size] or [size, size, 3]."""
        shape_only = _shape_only(*pixels.shape[:2])
        top, left, height, width = self.drawn.get_params(shape_only, self.drawn.scale, self.drawn.ratio)
        choice = self.drawn.interpolation
        interpolation = random.choice(choice) if isinstance(choice, tuple) else choice
        crop = self.resized(pixels[top : top + height, left : left + width], self.drawn.size, interpolation)
        return crop[:, ::-1] if self.hflip and torch.rand(1) < self.hflip else crop


@lru_cache(maxsize=16)  # several crops of an image ask for the same
def _shape_only(height: int, width: int) -> Tensor:
    return torch.empty(height, width, device="meta")


def _by_pillow(crop: Pixels, size: tuple[int, int], interpolation: functional.InterpolationMode) -> Pixels:
    height, width = size
    return np.asarray(Image.fromarray(crop).resize((width, height), pil_modes_mapping[interpolation]))


def _by_torch(crop: Pixels, size: tuple[int, int], interpolation: functional.InterpolationMode) -> Pixels:
    channels_last = torch.from_numpy(np.require(crop, requirements="W"))  # torch warns of memory that it cannot write
    image = channels_last[None] if crop.ndim == 2 else channels_last.permute(2, 0, 1)
    resized = functional_v2.resize(image, size, interpolation, antialias=True)
    pixels: Pixels = (resized[0] if crop.ndim == 2 else resized.permute(1, 2, 0)).numpy()
    return pixels


class SameSize:
    """Evaluation of images that mostly have the right size already: those stay as they are."""

    def __init__(self, size: int, otherwise: Callable[[Pixels], Tensor]) -> None:
        self.size = size
        self.otherwise = otherwise

    def __call__(self, pixels: Pixels) -> Tensor:
        """uint8 [H, W] or [H, W, C] to [C, size, size]."""
        return planes(pixels) if pixels.shape[:2] == (self.size, self.size) else self.otherwise(pixels)


class SmallCrop:
    """Random crop from the padded image and random flip, for images that mostly have the right size already.

    At 8 x 8 pixels the general transforms spend their time on bookkeeping: this one takes a tenth of it.

    Args:
        size: Side of the square crop in pixels.
        padding: Pixels added on each side.
        padding_mode: ``constant`` (black), ``reflect``, ``edge``, ``symmetric``.
        hflip: Probability of a horizontal flip.
        otherwise: The transform of images of other sizes.
    """

    def __init__(
        self, size: int, padding: int, padding_mode: str, hflip: float, otherwise: Callable[[Pixels], Tensor]
    ) -> None:
        self.size = size
        self.padding = padding
        self.hflip = hflip
        self.otherwise = otherwise
        # Padding moves no values, only places: pad the places once, and each crop is one indexing.
        # Place `size` is a black border beside the image.
        border = {"constant_values": size} if padding_mode == "constant" else {}
        self.places = np.pad(np.arange(size), padding, mode=padding_mode, **border)  # type: ignore[call-overload]

    def __call__(self, pixels: Pixels) -> Tensor:
        """uint8 [H, W] or [H, W, C] to [C, size, size]."""
        if pixels.shape[:2] != (self.size, self.size):
            return self.otherwise(pixels)
        top, left = random.randint(0, 2 * self.padding), random.randint(0, 2 * self.padding)
        rows, columns = self.places[top : top + self.size], self.places[left : left + self.size]
        if self.hflip and random.random() < self.hflip:
            columns = columns[::-1]
        bordered = np.zeros((self.size + 1, self.size + 1, *pixels.shape[2:]), np.uint8)
        bordered[:-1, :-1] = pixels
        return planes(bordered[rows[:, None], columns])
