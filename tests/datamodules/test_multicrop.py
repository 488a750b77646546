"""Multi-crop: sizes, what may happen to which crop, and that the draws are those of torchvision's transforms."""

import random
from dataclasses import replace

import jsonargparse
import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision import transforms as tv
from torchvision.transforms import functional

from lapbench.datamodules.builtin import Digits
from lapbench.datamodules.multicrop import MultiCrop, build_multicrop
from lapbench.datamodules.streaming import seed_sample
from lapbench.errors import UserError

PLAIN = MultiCrop(hflip=0, jitter_prob=0, grey_prob=0, blur_prob=(0, 0, 0), solarize_prob=0)
WHOLE = replace(PLAIN, local_crops=0, global_scale=(1.0, 1.0), ratio=(1.0, 1.0), interpolation="nearest")


def noise(width=50, height=40, channels=3, seed=0):
    shape = (height, width, 3) if channels == 3 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("backend", ["pil", "tensor"])
@pytest.mark.parametrize("pixels", [(50, 40), (8, 8), (3, 90)])
def test_one_tensor_for_each_resolution(channels, backend, pixels):
    settings = MultiCrop(global_crops=3, local_crops=5, local_size=16, backend=backend, enlarge=pixels == (8, 8))
    seed_sample(0)
    large, small = build_multicrop(settings, 32, channels)(noise(*pixels, channels))
    assert large.shape == (3, channels, 32, 32)
    assert small.shape == (5, channels, 16, 16)
    assert large.dtype == small.dtype == torch.uint8
    assert len(set(map(str, large.tolist()))) == 3  # each is drawn for itself
    (alone,) = build_multicrop(replace(settings, local_crops=0), 32, channels)(noise(*pixels, channels))
    assert alone.shape == large.shape


def test_a_seed_decides_everything():
    transform = build_multicrop(MultiCrop(local_size=16, intensity_shift=(-0.2, 0.2)), 32, 3)

    def crops(seed):
        seed_sample(seed)
        return transform(noise())

    assert all(torch.equal(a, b) for a, b in zip(crops(3), crops(3), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(crops(3), crops(4), strict=True))


def reference(size, scale, blur_prob, solarize_prob):
    """The published augmentation as one chain of torchvision's transforms."""
    blur = tv.Lambda(lambda image: image.filter(ImageFilter.GaussianBlur(random.uniform(0.1, 2.0))))
    return tv.Compose(
        [
            tv.RandomResizedCrop(size, scale=scale, interpolation=tv.InterpolationMode.BICUBIC),
            tv.RandomHorizontalFlip(0.5),
            tv.RandomApply([tv.ColorJitter(0.4, 0.4, 0.2, 0.1)], 0.8),
            tv.RandomGrayscale(0.2),
            tv.RandomApply([blur], blur_prob),
            tv.RandomSolarize(128, solarize_prob),
            tv.PILToTensor(),
        ]
    )


def statistics(crop):
    """Of a crop [3, S, S]: levels, where they lie, colourfulness, contrast and sharpness."""
    levels = crop.double()
    grey = levels.mean(0)
    return [
        *levels.mean((1, 2)).tolist(),
        (grey[:, : len(grey) // 2].mean() - grey[:, len(grey) // 2 :].mean()).item(),
        (grey[: len(grey) // 2].mean() - grey[len(grey) // 2 :].mean()).item(),
        (levels.amax(0) - levels.amin(0)).mean().item(),
        (levels[0] - levels[1]).mean().item(),
        (levels[1] - levels[2]).mean().item(),
        grey.std().item(),
        grey.diff(dim=1).abs().mean().item(),
    ]


def test_the_defaults_are_the_published_augmentation():
    """Two-sample Kolmogorov-Smirnov distances of each kind of crop to the chain above."""
    rows, columns = np.mgrid[:48, :64] / 64
    waves = np.stack([0.7 * columns, rows, 0.3 + 0.5 * np.sin(9 * columns) * rows], -1)
    pixels = (255 * waves * (0.8 + 0.2 * np.sin(40 * rows + 30 * columns))[..., None]).clip(0, 255).astype(np.uint8)
    photograph, draws = Image.fromarray(pixels), 200
    transform = build_multicrop(MultiCrop(local_crops=1, local_size=12), 24, 3)
    chains = [
        reference(24, (0.4, 1.0), 1.0, 0.0),
        reference(24, (0.4, 1.0), 0.1, 0.2),
        reference(12, (0.05, 0.4), 0.5, 0.0),
    ]
    seed_sample(1)
    ours, theirs = [], []
    for _ in range(draws):
        large, small = transform(pixels)
        ours.append([statistics(crop) for crop in (*large, *small)])
        theirs.append([statistics(chain(photograph)) for chain in chains])
    a, b = np.sort(ours, axis=0), np.sort(theirs, axis=0)
    limit = 1.95 * np.sqrt(2 / draws)  # passed by one in a thousand
    for kind, statistic in np.ndindex(a.shape[1:]):
        x, y = a[:, kind, statistic], b[:, kind, statistic]
        both = np.concatenate([x, y])
        distance = np.abs(np.searchsorted(x, both, "right") - np.searchsorted(y, both, "right")).max() / draws
        assert distance < limit, (kind, statistic)


@pytest.mark.parametrize(
    ("settings", "changed", "expected"),
    [
        ({"hflip": 1.0}, (0, 1, 2), ImageOps.mirror),
        ({"grey_prob": 1.0}, (0, 1, 2), lambda image: image.convert("L").convert("RGB")),
        ({"solarize_prob": 1.0}, (1,), ImageOps.solarize),
        ({"blur_prob": (1, 0, 0)}, (0,), lambda image: image.filter(ImageFilter.GaussianBlur(1.5))),
        ({"blur_prob": (0, 1, 0)}, (1,), lambda image: image.filter(ImageFilter.GaussianBlur(1.5))),
        ({"blur_prob": (0, 0, 1)}, (2,), lambda image: image.filter(ImageFilter.GaussianBlur(1.5))),
    ],
)
def test_what_happens_to_which_crop(settings, changed, expected):
    whole = {"global_scale": (1.0, 1.0), "local_scale": (1.0, 1.0), "ratio": (1.0, 1.0), "blur_radius": (1.5, 1.5)}
    pixels = noise(24, 24)
    transform = build_multicrop(replace(PLAIN, **whole, **settings, local_crops=1, local_size=24), 24, 3)
    large, small = transform(pixels)
    for place, crop in enumerate((*large, *small)):
        wanted = expected(Image.fromarray(pixels)) if place in changed else pixels
        assert np.array_equal(crop.permute(1, 2, 0).numpy(), wanted), place


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue"])
def test_bounds_of_colour_jitter(monkeypatch, name):
    """Each strength alone, at both ends of torchvision's range for it."""
    strengths = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0) | {name: 0.3}
    settings = replace(WHOLE, jitter_prob=1.0, color_jitter=tuple(strengths.values()))
    transform, pixels = build_multicrop(settings, 24, 3), noise(24, 24)
    for end, factor in enumerate(getattr(tv.ColorJitter(**strengths), name)):
        monkeypatch.setattr(random, "uniform", lambda *bounds, end=end: bounds[end])
        expected = getattr(functional, f"adjust_{name}")(Image.fromarray(pixels), factor)
        assert np.array_equal(transform(pixels)[0][0].permute(1, 2, 0).numpy(), expected)


def test_grey_images_take_brightness_and_contrast_alone():
    pixels = noise(24, 24, 1)
    color = replace(WHOLE, jitter_prob=1.0, grey_prob=1.0, color_jitter=(0, 0, 0.4, 0.1))
    assert torch.equal(build_multicrop(color, 24, 1)(pixels)[0], torch.from_numpy(pixels).expand(2, 1, 24, 24))
    flat = np.full((24, 24), 100, np.uint8)
    brightness = build_multicrop(replace(WHOLE, jitter_prob=1.0), 24, 1)
    seed_sample(0)
    levels = torch.cat([brightness(flat)[0][:, 0, 0, 0] for _ in range(150)])
    assert 60 <= levels.min() < 64
    assert 136 < levels.max() <= 140


def test_intensity():
    pixels = noise(24, 24, 1)
    for scale, shift in ((1.4, -0.3), (0.6, 0.4), (1.0, 0.2)):
        settings = replace(WHOLE, intensity_scale=(scale, scale), intensity_shift=(shift, shift))
        (crops,) = build_multicrop(settings, 24, 1)(pixels)
        expected = (pixels / 255 * scale + shift).clip(0, 1)
        assert np.abs(crops[0, 0].numpy() / 255 - expected).max() <= 0.5001 / 255
    settings = replace(WHOLE, intensity_scale=(0.6, 1.4), intensity_shift=(-0.4, 0.4))
    transform, flat = build_multicrop(settings, 24, 1), np.full((24, 24), 128, np.uint8)
    seed_sample(0)
    levels = torch.cat([transform(flat)[0][:, 0, 0, 0] for _ in range(400)]) / 255
    assert levels.mean().item() == pytest.approx(0.5, abs=0.04)
    variance = (0.8 * 0.5) ** 2 / 12 + 0.8**2 / 12  # no level is clipped at 0.5 but the few beyond 0 and 1
    assert levels.std().item() == pytest.approx(variance**0.5, rel=0.08)


def test_tiny_images_are_enlarged_before_cropping():
    """An 8 x 8 image gives crops that start between its pixels: more than the 9 of 6 x 6 whole pixels."""
    pixels = noise(8, 8, 1)
    settings = replace(PLAIN, local_crops=0, global_crops=1, interpolation="bilinear", ratio=(1.0, 1.0))
    settings = replace(settings, global_scale=(0.5, 0.5))
    crops = {}
    for enlarge in (False, True):
        transform = build_multicrop(replace(settings, enlarge=enlarge), 32, 1)
        seed_sample(0)
        crops[enlarge] = {str(transform(pixels)[0].tolist()) for _ in range(60)}
    assert len(crops[False]) <= 9 < 30 < len(crops[True])
    whole = build_multicrop(replace(settings, global_scale=(1.0, 1.0), enlarge=True), 32, 1)
    expected = Image.fromarray(pixels).resize((32, 32), Image.Resampling.BILINEAR)
    assert np.array_equal(whole(pixels)[0][0, 0].numpy(), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"global_crops": 0}, "multicrop.global_crops must be at least 1, got 0"),
        ({"local_crops": -1}, "multicrop.local_crops must be at least 0, got -1"),
        ({"local_size": 0}, "multicrop.local_size must be at least 1, got 0"),
        ({"global_scale": (0.0, 1.0)}, "multicrop.global_scale must be two rising positive numbers, at most 1"),
        ({"local_scale": (0.4, 0.05)}, "multicrop.local_scale must be two rising positive numbers, at most 1"),
        ({"ratio": (2.0, 1.0)}, r"multicrop.ratio must be two rising positive numbers, got \(2.0, 1.0\)"),
        ({"interpolation": "random"}, "multicrop.interpolation must be one of bilinear, .* got 'random'"),
        ({"backend": "gpu"}, "multicrop.backend must be one of pil, tensor, got 'gpu'"),
        ({"backend": "tensor", "interpolation": "box"}, "multicrop.interpolation of backend tensor must be one of"),
        ({"hflip": 1.5}, r"multicrop.hflip must be in 0..1, got 1.5"),
        ({"blur_prob": (1.0, 2.0, 0.5)}, "multicrop.blur_prob must be in 0..1, got 2.0"),
        ({"color_jitter": (-0.1, 0.4, 0.2, 0.1)}, "multicrop.color_jitter must be at least 0, got -0.1"),
        ({"color_jitter": (0.4, 0.4, 0.2, 0.6)}, "multicrop.color_jitter's hue must be in 0..0.5, got 0.6"),
        ({"intensity_shift": (0.4, -0.4)}, "multicrop.intensity_shift must be two rising numbers in -1..1"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message) as error:
        Digits(multicrop=MultiCrop(**settings))
    assert "\n" not in str(error.value)


def test_yaml_settings_change_only_what_they_name():
    parser = jsonargparse.ArgumentParser()
    parser.add_subclass_arguments(Digits, "data")
    for text, crops in (("{local_crops: 4, blur_prob: [0, 0, 0]}", (2, 4)), ("null", None)):
        data = parser.instantiate(
            parser.parse_string(f"data: {{class_path: lapbench.datamodules.Digits, init_args: {{multicrop: {text}}}}}")
        ).data
        assert crops == (data._multicrop and tuple(len(views.views) for views in data._multicrop.views))
