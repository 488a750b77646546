"""Training and evaluation transforms: settings for timm's, with short cuts where few steps do.

They give 8-bit pixels: ``normalization.Normalize`` makes them float32 on the device of the batch. Random erasing draws
in normalised values, so transforms that erase normalise themselves.

timm's ``3a`` is DeiT-III's 3-Augment: one of solarize (threshold 128), grey and Gaussian blur (radius 0.1 to 2) for
each image, with colour jitter after it (https://arxiv.org/abs/2204.07118).
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image
from timm.data.transforms import str_to_interp_mode
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision import transforms

from lapbench.datamodules.crops import ResizedCrop, SameSize, SmallCrop, planes
from lapbench.datamodules.decoding import Pixels
from lapbench.errors import UserError

Transform = Callable[[Pixels], Tensor]

CROPS = ("rrc", "rkrc", "rkrr", "src", "none")
INTERPOLATIONS = ("bilinear", "bicubic", "nearest", "lanczos", "box", "hamming", "random")
FIXED_INTERPOLATIONS = tuple(name for name in INTERPOLATIONS if name != "random")
BACKENDS = ("pil", "tensor")
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
        erase_prob: Probability of random erasing. With it the workers normalise, and send four times the bytes.
        erase_mode: ``const`` (zeros), ``rand`` (one random colour) or ``pixel`` (noise).
        erase_count: Most rectangles erased in one image.
        interpolation: Of resizing: ``bilinear``, ``bicubic``, ``nearest``, ``lanczos``, ``box``, ``hamming``, or
            ``random`` (bilinear or bicubic; ``rrc``, ``rkrc`` and ``rkrr`` only).
        backend: What resizes the crop of ``rrc``: ``pil`` (Pillow, as published recipes do), or ``tensor`` (torch's
            8-bit kernels; bilinear and bicubic), about 1.5 times as fast on 500 x 375 JPEGs. Measured on these, 0.4 %
            of the levels differ from Pillow's by 1 of 255, and one in a million by 2.
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
    backend: str = "pil"


def build_train_transform(
    settings: TrainTransform, image_size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Transform:
    """Build the training transform: uint8 [H, W] or [H, W, 3] -> uint8 [C, size, size], or float32 if it erases.

    Args:
        settings: The augmentation.
        image_size: Side of the square output in pixels.
        mean: Mean of each channel, of values in 0..1; its length is the number of channels.
        std: Standard deviation of each channel.

    Raises:
        UserError: a setting that is unknown or out of range.
    """
    _check(settings, image_size)
    plain = not (settings.auto_augment or settings.color_jitter or settings.erase_prob)
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
    rest = [secondary, final if settings.erase_prob else planes]
    composed: Transform
    if settings.crop == "rrc":
        crop = ResizedCrop(primary.transforms[0], settings.hflip, settings.backend)
        composed = transforms.Compose([crop, planes] if plain else [crop, Image.fromarray, *rest])
    elif timm_crop is not None:
        composed = transforms.Compose([Image.fromarray, primary, *rest])
    else:
        flip = transforms.RandomHorizontalFlip(settings.hflip)
        composed = transforms.Compose([Image.fromarray, *_fixed_crop(settings, image_size), flip, *rest])
        if plain:
            padding = settings.padding if settings.crop == "src" else 0
            return SmallCrop(image_size, padding, settings.padding_mode, settings.hflip, composed)
    return composed


def build_eval_transform(image_size: int, crop_pct: float = 1.0, interpolation: str = "bicubic") -> Transform:
    """Build the evaluation transform: shorter side to ``image_size / crop_pct``, centre crop; uint8 in and out.

    Args:
        image_size: Side of the square output in pixels.
        crop_pct: The crop's share of the shorter side (DeiT-III: 1.0).
        interpolation: Of resizing; see ``TrainTransform`` (not ``random``).

    Raises:
        UserError: a setting that is unknown or out of range.
    """
    check_within("image_size", image_size, 1, None)
    if not 0 < crop_pct <= 1:
        raise UserError(f"crop_pct must be in (0, 1], got {crop_pct}")
    check_one_of("interpolation", interpolation, FIXED_INTERPOLATIONS)
    shorter = math.floor(image_size / crop_pct)
    resized: Transform = transforms.Compose([Image.fromarray, *_centre(shorter, image_size, interpolation), planes])
    return SameSize(image_size, resized) if crop_pct == 1.0 else resized


def _centre(shorter: int, size: int, interpolation: str) -> list[Transform]:
    return [transforms.Resize(shorter, str_to_interp_mode(interpolation)), transforms.CenterCrop(size)]


def _fixed_crop(settings: TrainTransform, size: int) -> list[Transform]:
    """The crops that timm does not have."""
    resize, centre = _centre(size, size, settings.interpolation)
    if settings.crop == "none":
        return [resize, centre]
    return [resize, transforms.RandomCrop(size, padding=settings.padding, padding_mode=settings.padding_mode)]


def _check(settings: TrainTransform, image_size: int) -> None:
    check_within("image_size", image_size, 1, None)
    check_one_of("crop", settings.crop, CROPS)
    check_one_of("padding_mode", settings.padding_mode, PADDINGS)
    check_one_of("erase_mode", settings.erase_mode, ("const", "rand", "pixel"))
    check_one_of("interpolation", settings.interpolation, INTERPOLATIONS)
    check_one_of("backend", settings.backend, BACKENDS)
    for name in ("hflip", "erase_prob"):
        check_within(name, getattr(settings, name), 0, 1)
    check_within("color_jitter", settings.color_jitter, 0, None)
    check_within("padding", settings.padding, 0, image_size - 1 if settings.padding_mode == "reflect" else None)
    check_within("erase_count", settings.erase_count, 1, None)
    if settings.interpolation == "random" and settings.crop not in ("rrc", "rkrc", "rkrr"):
        raise UserError(f"interpolation 'random' needs crop rrc, rkrc or rkrr, got {settings.crop!r}")
    if settings.backend == "tensor":
        if settings.crop != "rrc":
            raise UserError(f"backend 'tensor' needs crop rrc, got {settings.crop!r}")
        if settings.interpolation not in ("bilinear", "bicubic", "random"):
            raise UserError(
                f"backend 'tensor' needs interpolation bilinear, bicubic or random, got {settings.interpolation!r}"
            )
    check_bounds("scale", settings.scale, 1)
    check_bounds("ratio", settings.ratio, None)
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


def check_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """UserError if the setting ``name`` is not among ``choices``."""
    if value not in choices:
        raise UserError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_within(name: str, value: float, low: float, high: float | None) -> None:
    """UserError if the setting ``name`` is below ``low`` or above ``high``."""
    if not low <= value or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"in {low}..{high}"
        raise UserError(f"{name} must be {bounds}, got {value}")


def check_bounds(name: str, bounds: tuple[float, float] | None, high: float | None) -> None:
    """UserError if the setting ``name`` is given and not two rising positive numbers, at most ``high``."""
    if bounds is not None and (not 0 < bounds[0] <= bounds[1] or (high is not None and bounds[1] > high)):
        limit = "" if high is None else f", at most {high}"
        raise UserError(f"{name} must be two rising positive numbers{limit}, got {bounds}")
