"""Training and evaluation transforms: settings for timm's, and a fast path for images that are already small.

timm's ``3a`` is DeiT-III's 3-Augment: one of solarize (threshold 128), grey and Gaussian blur (radius 0.1 to 2) for
each image, with colour jitter after it (https://arxiv.org/abs/2204.07118).
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from timm.data.transforms import str_to_interp_mode
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision import transforms

from lapbench.errors import UserError

Transform = Callable[[Image.Image], Tensor]

CROPS = ("rrc", "rkrc", "rkrr", "src", "none")
INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "lanczos", "box", "hamming", "random")
PADDINGS = ("constant", "reflect", "edge", "symmetric")
_NUMBER = r"\d+(\.\d+)?"
# timm ignores or asserts on sections that it does not know.
_AUGMENTS = {
    "rand": rf"m\d+|n\d+|p{_NUMBER}|mstd({_NUMBER}|inf)|mmax\d+|inc[01]|t(weights|3a|3aw)",
    "augmix": rf"m\d+|w\d+|d-?\d+|a{_NUMBER}|b[01]|mstd{_NUMBER}",
    **dict.fromkeys(("v0", "v0r", "original", "originalr", "3a"), rf"mstd{_NUMBER}"),
}


@dataclass(frozen=True)
class TrainTransform:
    """How training images are augmented.

    Args:
        crop: ``rrc`` random resized crop; ``rkrc`` / ``rkrr`` timm's resize that keeps the ratio, then a centre /
            random crop; ``src`` DeiT-III's simple random crop: shorter side to the image size, then a random crop
            from the padded image (for small images that already have the right size: a random shift); ``none``
            resize and centre crop as in evaluation.
        scale: Area of the crop as a fraction of the image (``rrc``: default 0.08 to 1; ``rkrc``, ``rkrr``: 0.8 to 1).
        ratio: Aspect ratio of the crop (``rrc``: default 3/4 to 4/3; ``rkrc``, ``rkrr``: 0.9 to 1.11).
        padding: Pixels added on each side before the crop of ``src``: a square image moves by at most this many.
        padding_mode: What they hold: ``constant`` (black), ``reflect``, ``edge``, ``symmetric``.
        hflip: Probability of a horizontal flip.
        auto_augment: timm's string: ``rand-m9-mstd0.5-inc1`` (RandAugment), ``3a`` (3-Augment), ``augmix-m3``,
            ``v0``, ``original``; none when null.
        color_jitter: Strength of brightness, contrast and saturation jitter. As in the published recipes it acts
            without auto_augment and with ``3a``, not with RandAugment or AutoAugment.
        erase_prob: Probability of random erasing.
        erase_mode: ``const`` (zeros), ``rand`` (one random colour) or ``pixel`` (noise).
        erase_count: Most rectangles erased in one image.
        interpolation: Of resizing: ``bilinear``, ``bicubic``, ``nearest``, ``lanczos``, ``box``, ``hamming``, or
            ``random`` (bilinear or bicubic; ``rrc``, ``rkrc`` and ``rkrr`` only).
    """

    crop: str = "rrc"
    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] | None = None
    padding: int = 4
    padding_mode: str = "reflect"
    hflip: float = 0.5
    auto_augment: str | None = None
    color_jitter: float = 0.0
    erase_prob: float = 0.0
    erase_mode: str = "const"
    erase_count: int = 1
    interpolation: str = "bicubic"


def build_train_transform(
    settings: TrainTransform, image_size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Transform:
    """Build the training transform: PIL image (mode ``L`` or ``RGB``) -> float32 tensor [C, size, size], normalised.

    Args:
        settings: The augmentation.
        image_size: Side of the square output in pixels.
        mean: Mean of each channel, of values in 0..1; its length is the number of channels.
        std: Standard deviation of each channel.

    Raises:
        UserError: a setting that is unknown or out of range.
    """
    _check(settings, image_size)
    timm_crop = settings.crop if settings.crop in ("rrc", "rkrc", "rkrr") else None
    primary, secondary, final = create_transform(
        image_size,
        is_training=True,
        train_crop_mode=timm_crop,
        scale=settings.scale,
        ratio=settings.ratio,
        hflip=settings.hflip,
        color_jitter=settings.color_jitter or None,  # None is what turns it off
        auto_augment=settings.auto_augment,
        interpolation=settings.interpolation,
        mean=mean,
        std=std,
        re_prob=settings.erase_prob,
        re_mode=settings.erase_mode,
        re_count=settings.erase_count,
        separate=True,
    )
    if timm_crop is None:
        primary = transforms.Compose(
            [*_fixed_crop(settings, image_size), transforms.RandomHorizontalFlip(settings.hflip)]
        )
    composed: Transform = transforms.Compose([primary, secondary, final])
    if timm_crop is None and not (settings.auto_augment or settings.color_jitter or settings.erase_prob):
        padding = settings.padding if settings.crop == "src" else 0
        return SmallCrop(image_size, mean, std, padding, settings.padding_mode, settings.hflip, composed)
    return composed


def build_eval_transform(
    image_size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    crop_pct: float = 1.0,
    interpolation: str = "bicubic",
) -> Transform:
    """Build the evaluation transform: shorter side to ``image_size / crop_pct``, centre crop, normalise.

    Args:
        image_size: Side of the square output in pixels.
        mean: Mean of each channel, of values in 0..1.
        std: Standard deviation of each channel.
        crop_pct: The crop's share of the shorter side (DeiT-III: 1.0).
        interpolation: Of resizing; see ``TrainTransform`` (not ``random``).

    Raises:
        UserError: a setting that is unknown or out of range.
    """
    _within("image_size", image_size, 1, None)
    if not 0 < crop_pct <= 1:
        raise UserError(f"crop_pct must be in (0, 1], got {crop_pct}")
    _one_of("interpolation", interpolation, tuple(name for name in INTERPOLATIONS if name != "random"))
    resized: Transform = create_transform(
        image_size, is_training=False, crop_pct=crop_pct, interpolation=interpolation, mean=mean, std=std
    )
    return SameSize(image_size, mean, std, resized) if crop_pct == 1.0 else resized


class _Normalize:
    """8-bit pixels [H, W] or [H, W, C] to a normalised float32 tensor [C, H, W] by looking up each level's value."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        levels = np.arange(256, dtype=np.float32) / np.float32(255)
        self.levels = [(levels - np.float32(m)) / np.float32(s) for m, s in zip(mean, std, strict=True)]

    def __call__(self, pixels: npt.NDArray[np.uint8]) -> Tensor:
        planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        values = np.empty(planes.shape, np.float32)
        for levels, plane, out in zip(self.levels, planes, values, strict=True):
            levels.take(plane, out=out, mode="clip")  # no level is clipped; "raise" would buffer the output
        return torch.from_numpy(values)


class SameSize:
    """Evaluation of images that mostly have the right size already: those only get normalised."""

    def __init__(self, size: int, mean: tuple[float, ...], std: tuple[float, ...], otherwise: Transform) -> None:
        self.size = size
        self.normalize = _Normalize(mean, std)
        self.otherwise = otherwise

    def __call__(self, image: Image.Image) -> Tensor:
        """PIL image to float32 [C, size, size]."""
        if image.size == (self.size, self.size):
            return self.normalize(np.asarray(image))
        return self.otherwise(image)


class SmallCrop:
    """Random crop from the padded image and random flip, for images that mostly have the right size already.

    At 8 x 8 pixels the general transforms spend their time on bookkeeping: this one takes a tenth of it.

    Args:
        size: Side of the square crop in pixels.
        mean: Mean of each channel, of values in 0..1.
        std: Standard deviation of each channel.
        padding: Pixels added on each side.
        padding_mode: ``constant`` (black), ``reflect``, ``edge``, ``symmetric``.
        hflip: Probability of a horizontal flip.
        otherwise: The transform of images of other sizes.
    """

    def __init__(
        self,
        size: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        padding: int,
        padding_mode: str,
        hflip: float,
        otherwise: Transform,
    ) -> None:
        self.size = size
        self.normalize = _Normalize(mean, std)
        self.padding = padding
        self.hflip = hflip
        self.otherwise = otherwise
        # Padding moves no values, only places: pad the places once, and each crop is one indexing.
        # Place `size` is a black border beside the image.
        border = {"constant_values": size} if padding_mode == "constant" else {}
        self.places = np.pad(np.arange(size), padding, mode=padding_mode, **border)  # type: ignore[call-overload]

    def __call__(self, image: Image.Image) -> Tensor:
        """PIL image to float32 [C, size, size]."""
        if image.size != (self.size, self.size):
            return self.otherwise(image)
        pixels = np.asarray(image)
        top, left = random.randint(0, 2 * self.padding), random.randint(0, 2 * self.padding)
        rows, columns = self.places[top : top + self.size], self.places[left : left + self.size]
        if self.hflip and random.random() < self.hflip:
            columns = columns[::-1]
        bordered = np.zeros((self.size + 1, self.size + 1, *pixels.shape[2:]), np.uint8)
        bordered[:-1, :-1] = pixels
        return self.normalize(bordered[rows[:, None], columns])


def _fixed_crop(settings: TrainTransform, size: int) -> list[Transform]:
    """The crops that timm does not have."""
    resize = transforms.Resize(size, interpolation=str_to_interp_mode(settings.interpolation))
    if settings.crop == "none":
        return [resize, transforms.CenterCrop(size)]
    crop = transforms.RandomCrop(size, padding=settings.padding, padding_mode=settings.padding_mode)
    return [resize, crop]


def _check(settings: TrainTransform, image_size: int) -> None:
    _within("image_size", image_size, 1, None)
    _one_of("crop", settings.crop, CROPS)
    _one_of("padding_mode", settings.padding_mode, PADDINGS)
    _one_of("erase_mode", settings.erase_mode, ("const", "rand", "pixel"))
    _one_of("interpolation", settings.interpolation, INTERPOLATIONS)
    for name in ("hflip", "erase_prob"):
        _within(name, getattr(settings, name), 0, 1)
    _within("color_jitter", settings.color_jitter, 0, None)
    _within("padding", settings.padding, 0, image_size - 1 if settings.padding_mode == "reflect" else None)
    _within("erase_count", settings.erase_count, 1, None)
    if settings.interpolation == "random" and settings.crop not in ("rrc", "rkrc", "rkrr"):
        raise UserError(f"interpolation 'random' needs crop rrc, rkrc or rkrr, got {settings.crop!r}")
    for name in ("scale", "ratio"):
        bounds = getattr(settings, name)
        if bounds is None:
            continue
        if not 0 < bounds[0] <= bounds[1] or (name == "scale" and bounds[1] > 1):
            raise UserError(
                f"{name} must be two rising positive numbers{', at most 1' * (name == 'scale')}, got {bounds}"
            )
    if settings.auto_augment is not None:
        check_auto_augment(settings.auto_augment)


def check_auto_augment(text: str) -> None:
    """Refuse an augmentation string that timm would not follow to the letter.

    Raises:
        UserError: naming the part that is unknown.
    """
    policy, *sections = text.split("-")
    if policy not in _AUGMENTS:
        raise UserError(f"auto_augment: unknown policy {policy!r} in {text!r}; expected one of {', '.join(_AUGMENTS)}")
    for section in sections:
        if not re.fullmatch(_AUGMENTS[policy], section):
            raise UserError(f"auto_augment: unknown part {section!r} in {text!r}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _within(name: str, value: float, low: float, high: float | None) -> None:
    if not low <= value or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in {low}..{high}"
        raise UserError(f"{name} must be {bounds}, got {value}")
