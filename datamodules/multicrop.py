"""Multi-crop augmentation of self-supervised training: several crops of each image, large and small.

It is DINO's (https://arxiv.org/abs/2104.14294, appendix A and C; crops: SwAV, https://arxiv.org/abs/2006.09882;
colours: BYOL, https://arxiv.org/abs/2006.07733, appendix B).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image, ImageFilter
from timm.data.transforms import RandomResizedCropAndInterpolation, str_to_interp_mode
from torch import Tensor
from torchvision.transforms import Resize, functional

from lapbench.datamodules.crops import ResizedCrop
from lapbench.datamodules.decoding import Pixels
from lapbench.datamodules.sharded import check_at_least
from lapbench.datamodules.transforms import BACKENDS, FIXED_INTERPOLATIONS, check_bounds, check_one_of, check_within
from lapbench.errors import UserError

# A change of an image and its probability.
Stage = tuple[float, Callable[[Image.Image], Image.Image]]


@dataclass(frozen=True)
class MultiCrop:
    """How training images become crops. The defaults are DINO's; all is drawn anew for each crop.

    Args:
        global_crops: Large crops of an image, at the image size of the data.
        local_crops: Small crops of an image; 0 makes none.
        local_size: Side of the small crops in pixels.
        global_scale: Area of a large crop as a fraction of the image.
        local_scale: Area of a small crop as a fraction of the image.
        ratio: Aspect ratio of the crops, drawn so that its logarithm is uniform.
        interpolation: Of resizing: ``bilinear``, ``bicubic``, ``nearest``, ``lanczos``, ``box`` or ``hamming``.
        enlarge: Enlarge an image whose shorter side is below the image size to it before cropping: crops of tiny images
            then start between their pixels.
        backend: ``pil`` resizes with Pillow, ``tensor`` with torch's 8-bit kernels (bilinear and bicubic).
        hflip: Probability of a horizontal flip.
        jitter_prob: Probability of colour jitter.
        color_jitter: Its strength in brightness, contrast, saturation and hue, in random order; grey images take the
            first two.
        grey_prob: Probability that colours become grey.
        blur_prob: Probability of Gaussian blur: first large crop, other large crops, small crops.
        blur_radius: Bounds of its radius in pixels.
        solarize_prob: Probability that levels from 128 on are inverted; in large crops but the first.
        intensity_scale: Bounds of a factor on the levels; (1, 1) changes nothing.
        intensity_shift: Bounds of what is added after that, levels being 0..1; (0, 0) changes nothing.
    """

    global_crops: int = 2
    local_crops: int = 8
    local_size: int = 96
    global_scale: tuple[float, float] = (0.4, 1.0)
    local_scale: tuple[float, float] = (0.05, 0.4)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: str = "bicubic"
    enlarge: bool = False
    backend: str = "pil"
    hflip: float = 0.5
    jitter_prob: float = 0.8
    color_jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.2, 0.1)
    grey_prob: float = 0.2
    blur_prob: tuple[float, float, float] = (1.0, 0.1, 0.5)
    blur_radius: tuple[float, float] = (0.1, 2.0)
    solarize_prob: float = 0.2
    intensity_scale: tuple[float, float] = (1.0, 1.0)
    intensity_shift: tuple[float, float] = (0.0, 0.0)


def build_multicrop(settings: MultiCrop, image_size: int, channels: int) -> Callable[[Pixels], list[Tensor]]:
    """Build the transform: uint8 [H, W] or [H, W, 3] -> the global crops uint8 [V, C, S, S], then the local ones.

    Args:
        settings: The augmentation.
        image_size: Side S of the global crops in pixels.
        channels: 3 (RGB) or 1 (grey).

    Raises:
        UserError: a setting that is unknown or out of range.
    """
    _check(settings)
    first, others, local = settings.blur_prob
    large = [
        _stages(settings, channels, first, 0.0),
        *[_stages(settings, channels, others, settings.solarize_prob)] * (settings.global_crops - 1),
    ]
    small = [_stages(settings, channels, local, 0.0)] * settings.local_crops
    views = [_Views(settings, image_size, settings.global_scale, large)]
    if small:
        views.append(_Views(settings, settings.local_size, settings.local_scale, small))
    return _Resolutions(views, image_size if settings.enlarge else 0, settings.interpolation)


def _stages(settings: MultiCrop, channels: int, blur_prob: float, solarize_prob: float) -> list[Stage]:
    """What may happen to a crop's colours, in order; what never happens is left out."""
    stages: list[Stage] = [
        (settings.jitter_prob, _Jitter(settings.color_jitter, channels)),
        (settings.grey_prob if channels == 3 else 0.0, partial(functional.to_grayscale, num_output_channels=3)),
        (blur_prob, partial(_blur, settings.blur_radius)),
        (solarize_prob, partial(functional.solarize, threshold=128)),
    ]
    return [stage for stage in stages if stage[0]]


class _Jitter:
    """torchvision's ``ColorJitter``, drawn from Python's generator: torch's takes as long as jittering a small crop."""

    def __init__(self, strengths: tuple[float, float, float, float], channels: int) -> None:
        brightness, contrast, saturation, hue = strengths
        steps = [
            (functional.adjust_brightness, max(0, 1 - brightness), 1 + brightness),
            (functional.adjust_contrast, max(0, 1 - contrast), 1 + contrast),
            (functional.adjust_saturation, max(0, 1 - saturation), 1 + saturation),
            (functional.adjust_hue, -hue, hue),
        ]
        self.steps = [step for step in steps[: 4 if channels == 3 else 2] if step[1] < step[2]]

    def __call__(self, image: Image.Image) -> Image.Image:
        for adjust, low, high in random.sample(self.steps, len(self.steps)):
            image = adjust(image, random.uniform(low, high))
        return image


def _blur(radius: tuple[float, float], image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(random.uniform(*radius)))


class _Views:
    """The crops of one resolution: uint8 [H, W] or [H, W, 3] to uint8 [V, C, S, S]."""

    def __init__(self, settings: MultiCrop, size: int, scale: tuple[float, float], views: list[list[Stage]]) -> None:
        drawn = RandomResizedCropAndInterpolation(size, scale, settings.ratio, settings.interpolation)
        self.crop = ResizedCrop(drawn, settings.hflip, settings.backend)
        self.views = views
        self.scale = settings.intensity_scale
        self.shift = settings.intensity_shift
        self.keeps_intensity = (self.scale, self.shift) == ((1, 1), (0, 0))

    def __call__(self, pixels: Pixels) -> Tensor:
        crops = np.stack([self._augmented(self.crop(pixels), stages) for stages in self.views])
        channels_first = crops[:, None] if crops.ndim == 3 else crops.transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(channels_first))

    def _augmented(self, crop: Pixels, stages: list[Stage]) -> Pixels:
        if stages:
            image = Image.fromarray(crop)
            for probability, stage in stages:
                if random.random() < probability:
                    image = stage(image)
            crop = np.asarray(image)
        if self.keeps_intensity:
            return crop
        levels = np.arange(256) * random.uniform(*self.scale) + 255 * random.uniform(*self.shift)
        changed: Pixels = levels.round().clip(0, 255).astype(np.uint8)[crop]
        return changed


class _Resolutions:
    """All crops of an image."""

    def __init__(self, views: list[_Views], least: int, interpolation: str) -> None:
        self.views = views
        self.least = least
        self.enlarged = Resize(least, str_to_interp_mode(interpolation)) if least else None

    def __call__(self, pixels: Pixels) -> list[Tensor]:
        """uint8 [H, W] or [H, W, 3] to a tensor for each resolution."""
        if self.enlarged is not None and min(pixels.shape[:2]) < self.least:
            pixels = np.asarray(self.enlarged(Image.fromarray(pixels)))
        return [views(pixels) for views in self.views]


def _check(settings: MultiCrop) -> None:
    check_at_least("multicrop.global_crops", settings.global_crops, 1)
    check_at_least("multicrop.local_crops", settings.local_crops, 0)
    check_at_least("multicrop.local_size", settings.local_size, 1)
    check_one_of("multicrop.interpolation", settings.interpolation, FIXED_INTERPOLATIONS)
    check_one_of("multicrop.backend", settings.backend, BACKENDS)
    if settings.backend == "tensor":
        check_one_of("multicrop.interpolation of backend tensor", settings.interpolation, ("bilinear", "bicubic"))
    for name in ("global_scale", "local_scale"):
        check_bounds(f"multicrop.{name}", getattr(settings, name), 1)
    for name in ("ratio", "blur_radius", "intensity_scale"):
        check_bounds(f"multicrop.{name}", getattr(settings, name), None)
    for name in ("hflip", "jitter_prob", "grey_prob", "solarize_prob"):
        check_within(f"multicrop.{name}", getattr(settings, name), 0, 1)
    for probability in settings.blur_prob:
        check_within("multicrop.blur_prob", probability, 0, 1)
    for strength in settings.color_jitter:
        check_within("multicrop.color_jitter", strength, 0, None)
    check_within("multicrop.color_jitter's hue", settings.color_jitter[3], 0, 0.5)
    low, high = settings.intensity_shift
    if not -1 <= low <= high <= 1:
        raise UserError(
            f"multicrop.intensity_shift must be two rising numbers in -1..1, got {settings.intensity_shift}"
        )
