"""Transforms: what timm's settings do, and that 8-bit pixels normalised later equal timm's float transforms."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from timm.data.transforms_factory import create_transform
from torchvision import transforms as tv

from lapbench.datamodules.crops import SmallCrop
from lapbench.datamodules.normalization import Normalize
from lapbench.datamodules.streaming import seed_sample
from lapbench.datamodules.transforms import (
    CROPS,
    TrainTransform,
    build_eval_transform,
    build_train_transform,
    check_auto_augment,
)
from lapbench.errors import UserError

RGB = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
GREY = {"mean": (0.3,), "std": (0.4,)}
RAW = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
PLAIN = {"hflip": 0.0, "crop": "none"}


def noise(seed, width=48, height=40, channels=3):
    shape = (height, width, 3) if channels == 3 else (height, width)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def normalized(transform, statistics):
    """The transform of a PIL image, and what a batch goes through after it."""
    normalize = Normalize(**statistics)
    return lambda image: normalize(transform(np.asarray(image)))


def train(settings, size, statistics):
    return normalized(build_train_transform(settings, size, **statistics), statistics)


def next_draws():
    return random.random(), np.random.random(), torch.rand(()).item()  # noqa: NPY002


def reference(settings, size, statistics):
    """The same settings as one chain of timm's and torchvision's transforms: PIL image to normalised float32."""
    timm_crop = settings.crop if settings.crop in ("rrc", "rkrc", "rkrr") else None
    primary, *rest = create_transform(
        size,
        is_training=True,
        train_crop_mode=timm_crop,
        scale=settings.scale,
        ratio=settings.ratio,
        hflip=settings.hflip,
        color_jitter=settings.color_jitter or None,
        auto_augment=settings.auto_augment,
        interpolation=settings.interpolation,
        re_prob=settings.erase_prob,
        re_mode=settings.erase_mode,
        re_count=settings.erase_count,
        separate=True,
        **statistics,
    )
    if timm_crop is None:
        padded = tv.RandomCrop(size, padding=settings.padding, padding_mode=settings.padding_mode)
        crop = tv.CenterCrop(size) if settings.crop == "none" else padded
        primary = tv.Compose(
            [tv.Resize(size, tv.InterpolationMode.BICUBIC), crop, tv.RandomHorizontalFlip(settings.hflip)]
        )
    return tv.Compose([primary, *rest])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize(
    "augment",
    [
        {},
        {"hflip": 0.0},
        {"color_jitter": 0.3},
        {"auto_augment": "3a", "color_jitter": 0.3},
        {"auto_augment": "rand-m9-mstd0.5-inc1"},
        {"auto_augment": "3a", "erase_prob": 0.7, "erase_mode": "pixel", "erase_count": 3},
        {"erase_prob": 0.7},
    ],
)
def test_training_pixels_are_those_of_float_transforms(channels, crop, augment):
    # The same bits from the same seeds: the same crops, flips, augmentations and erased rectangles.
    statistics = RGB if channels == 3 else GREY
    settings = TrainTransform(crop=crop, **augment)
    ours = build_train_transform(settings, 24, **statistics)
    normalize, expected = Normalize(**statistics), reference(settings, 24, statistics)
    for seed, size in enumerate([(48, 40), (25, 60), (70, 24), (31, 31), (20, 90), (10, 9), (1, 1), (300, 200)]):
        image = noise(seed, *size, channels)
        seed_sample(seed)
        out, ours_next = ours(np.asarray(image)), next_draws()
        assert out.dtype == (torch.float32 if "erase_prob" in augment else torch.uint8)
        assert out.is_contiguous()
        seed_sample(seed)
        assert torch.equal(normalize(out), expected(image)), (size, seed)
        assert ours_next == next_draws()


@pytest.mark.parametrize("interpolation", ["bilinear", "nearest", "lanczos", "box", "hamming", "random"])
def test_every_interpolation_is_the_float_transforms(interpolation):
    settings = TrainTransform(interpolation=interpolation)
    ours, expected = train(settings, 24, RGB), reference(settings, 24, RGB)
    for seed in range(8):
        seed_sample(seed)
        out = ours(noise(seed))
        seed_sample(seed)
        assert torch.equal(out, expected(noise(seed)))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "random"])
def test_the_tensor_backend_draws_the_same_and_differs_little(interpolation, channels):
    statistics = RGB if channels == 3 else GREY
    settings = {"interpolation": interpolation, "hflip": 0.5}
    ours = build_train_transform(TrainTransform(**settings, backend="tensor"), 32, **statistics)
    pillow = build_train_transform(TrainTransform(**settings), 32, **statistics)
    differing = []
    for seed, size in enumerate([(48, 40), (25, 60), (70, 24), (20, 90), (10, 9), (1, 1), (300, 200)] * 3):
        pixels = np.asarray(noise(seed, *size, channels))
        seed_sample(seed)
        out = ours(pixels).int()
        seed_sample(seed)
        differing.append((out - pillow(pixels).int()).abs().float())
        assert out.shape == (channels, 32, 32)
        assert differing[-1].max() <= 2
    assert torch.stack(differing).mean() < 0.02


def test_the_tensor_backend_goes_with_augmentation_and_erasing():
    settings = {"auto_augment": "rand-m9-mstd0.5-inc1", "erase_prob": 0.5}
    ours = build_train_transform(TrainTransform(**settings, backend="tensor"), 32, **RGB)
    pillow = build_train_transform(TrainTransform(**settings), 32, **RGB)
    flat = np.full((40, 50, 3), 77, np.uint8)  # resizing gives the same levels, whoever does it
    for seed in range(10):
        seed_sample(seed)
        out = ours(flat)
        seed_sample(seed)
        assert torch.equal(out, pillow(flat))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "augment", ["rand-m9-mstd0.5-inc1", "rand-m10-n4-p1-mstd101", "3a", "augmix-m3", "original", "v0"]
)
def test_augmentations_survive_many_images(augment, channels):
    settings = TrainTransform(auto_augment=augment, color_jitter=0.3, erase_prob=0.25, erase_mode="pixel")
    transform = train(settings, 24, RGB if channels == 3 else GREY)
    seed_sample(0)
    means = set()
    for seed in range(120):
        out = transform(noise(seed, *random.choice([(48, 40), (24, 24), (3, 70), (1, 1)]), channels))
        assert out.shape == (channels, 24, 24)
        assert out.dtype == torch.float32
        assert torch.isfinite(out).all()
        means.add(out.mean().item())
    assert len(means) > 100


def test_three_augment_is_one_of_grey_solarize_blur():
    # 3-Augment of DeiT-III: exactly one of the three for each image, with a third of the probability each.
    transform = train(TrainTransform(auto_augment="3a", **PLAIN), 32, RAW)
    image = noise(0, 32, 32)

    def tensor(which):
        return np.asarray(which.convert("RGB"), np.float32).transpose(2, 0, 1) / 255

    grey, solarized = tensor(image.convert("L")), tensor(ImageOps.solarize(image, 128))
    least, most = (tensor(image.filter(ImageFilter.GaussianBlur(radius))) for radius in (0.1, 2.0))
    seed_sample(3)
    seen = Counter()
    for _ in range(300):
        out = transform(image).numpy()
        if np.abs(out - grey).max() < 1.1 / 255:
            seen["grey"] += 1
        elif np.allclose(out, solarized):
            seen["solarize"] += 1
        else:
            assert most.std() - 1e-6 <= out.std() <= least.std() + 1e-6
            seen["blur"] += 1
    assert all(70 <= count <= 130 for count in seen.values()), seen
    assert len(seen) == 3


def test_rand_augment_switches_jitter_off_and_three_augment_does_not():
    image = noise(0, 32, 32)

    def outputs(**settings):
        transform = train(TrainTransform(**PLAIN, **settings), 32, RAW)
        seed_sample(1)
        return torch.stack([transform(image) for _ in range(8)])

    rand = {"auto_augment": "rand-m9-mstd0.5-inc1"}
    assert torch.equal(outputs(**rand), outputs(**rand, color_jitter=0.4))
    assert not torch.equal(outputs(auto_augment="3a"), outputs(auto_augment="3a", color_jitter=0.4))
    assert not torch.equal(outputs(), outputs(color_jitter=0.4))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["constant", "reflect", "edge", "symmetric"])
def test_small_crop_is_a_crop_of_the_padded_image(mode, channels):
    size, padding = 8, 2
    statistics = RGB if channels == 3 else GREY
    settings = TrainTransform(crop="src", padding=padding, padding_mode=mode, hflip=0.5)
    small = build_train_transform(settings, size, **statistics)
    assert isinstance(small, SmallCrop)
    transform = normalized(small, statistics)
    image = noise(5, size, size, channels)
    pad = tv.Pad(padding, padding_mode=mode)(image)
    finish = tv.Compose([tv.ToTensor(), tv.Normalize(**statistics)])
    whole = finish(pad)
    allowed = {}
    for top in range(2 * padding + 1):
        for left in range(2 * padding + 1):
            crop = whole[:, top : top + size, left : left + size]
            allowed[crop.numpy().tobytes()] = (top, left, False)
            allowed[crop.flip(-1).numpy().tobytes()] = (top, left, True)
    seed_sample(0)
    found = Counter(allowed[transform(image).contiguous().numpy().tobytes()] for _ in range(1000))
    assert set(found) == set(allowed.values())
    assert all(count < 60 for count in found.values())  # 20 expected of each of the 50
    for seed in range(10):
        random.seed(seed)
        drawn = random.randint(0, 2 * padding), random.randint(0, 2 * padding), random.random() < 0.5
        seed_sample(seed)
        assert allowed[transform(image).numpy().tobytes()] == drawn


def test_small_crop_falls_back_for_other_sizes():
    transform = train(TrainTransform(crop="src", padding=0, hflip=0), 8, RGB)
    torch.manual_seed(0)
    assert transform(noise(0, 30, 20)).shape == (3, 8, 8)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("width", "height"), [(32, 32), (50, 40), (20, 31), (64, 64)])
def test_evaluation_equals_torchvision(width, height, channels):
    statistics = RGB if channels == 3 else GREY
    image = noise(2, width, height, channels)
    expected = tv.Compose(
        [
            tv.Resize(32, tv.InterpolationMode.BICUBIC),
            tv.CenterCrop(32),
            tv.ToTensor(),
            tv.Normalize(**statistics),
        ]
    )(image)
    assert build_eval_transform(32)(np.asarray(image)).dtype == torch.uint8
    transform = normalized(build_eval_transform(32), statistics)
    assert torch.equal(transform(image), expected)
    assert torch.equal(transform(image), transform(image))


def test_evaluation_crop_ratio():
    image = noise(3, 64, 64)  # 32 / 0.875 is 36.57
    expected = tv.Compose([tv.Resize(36, tv.InterpolationMode.BILINEAR), tv.CenterCrop(32), tv.ToTensor()])(image)
    transform = build_eval_transform(32, crop_pct=0.875, interpolation="bilinear")
    assert torch.equal(normalized(transform, RAW)(image), expected)
    timm = create_transform(32, crop_pct=0.875, interpolation="bilinear", **RGB)
    assert torch.equal(normalized(transform, RGB)(image), timm(image))


def test_src_is_deit_simple_random_crop():
    settings = TrainTransform(crop="src", padding=4, padding_mode="reflect", hflip=0.5, auto_augment="3a")
    text = repr(build_train_transform(settings, 192, **RGB))
    assert "Resize(size=192" in text
    assert "RandomCrop(size=(192, 192), padding=4)" in text
    assert "RandomHorizontalFlip(p=0.5)" in text
    assert text.index("Resize") < text.index("RandomCrop") < text.index("Flip") < text.index("AutoAugment")


@pytest.mark.parametrize("crop", ["rrc", "rkrc", "rkrr", "src", "none"])
def test_every_crop_gives_the_size(crop):
    transform = train(TrainTransform(crop=crop, auto_augment="3a"), 16, RGB)
    seed_sample(0)
    outputs = [transform(noise(0, 40, 30)) for _ in range(6)]
    assert {out.shape for out in outputs} == {(3, 16, 16)}
    assert len({out.sum().item() for out in outputs}) > 1


def test_random_resized_crop_respects_its_scale():
    gradient = Image.fromarray(np.tile(np.arange(256, dtype=np.uint8), (256, 1))).convert("RGB")
    transform = train(TrainTransform(scale=(0.25, 0.25), ratio=(1.0, 1.0), hflip=0), 32, RAW)
    seed_sample(0)
    for _ in range(20):
        row = transform(gradient)[0, 16] * 255
        # A quarter of the area is half of the width: 128 levels over 32 pixels.
        assert row[-1] - row[0] == pytest.approx(31 * 4, abs=6)


def test_erasing():
    transform = train(TrainTransform(**PLAIN, erase_prob=1.0), 32, RAW)
    image = Image.new("RGB", (32, 32), "white")
    seed_sample(0)
    shares = [(transform(image) == 0).float().mean().item() for _ in range(50)]
    assert all(0.01 < share < 0.4 for share in shares)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"crop": "random"}, r"crop must be one of rrc, rkrc, rkrr, src, none, got 'random'"),
        ({"auto_augment": "trivial"}, "auto_augment: unknown policy 'trivial'"),
        ({"auto_augment": "rand-m9-x1"}, "auto_augment: unknown part 'x1' in 'rand-m9-x1'"),
        ({"auto_augment": "rand-m"}, "unknown part 'm'"),
        ({"auto_augment": "rand-tstrong"}, "unknown part 'tstrong'"),
        ({"auto_augment": ""}, "unknown policy ''"),
        ({"interpolation": "cubic"}, "interpolation must be one of bilinear, bicubic"),
        ({"interpolation": "random", "crop": "src"}, "interpolation 'random' needs crop rrc, rkrc or rkrr, got 'src'"),
        ({"backend": "gpu"}, "backend must be one of pil, tensor, got 'gpu'"),
        ({"backend": "tensor", "crop": "src"}, "backend 'tensor' needs crop rrc, got 'src'"),
        (
            {"backend": "tensor", "interpolation": "lanczos"},
            "backend 'tensor' needs interpolation bilinear, bicubic or random, got 'lanczos'",
        ),
        ({"hflip": 1.5}, r"hflip must be in 0..1, got 1.5"),
        ({"erase_prob": -0.1}, r"erase_prob must be in 0..1, got -0.1"),
        ({"erase_mode": "black"}, "erase_mode must be one of const, rand, pixel, got 'black'"),
        ({"erase_count": 0}, "erase_count must be at least 1, got 0"),
        ({"padding": -1}, r"padding must be in 0..31, got -1"),
        ({"padding": 32}, r"padding must be in 0..31, got 32"),
        ({"padding_mode": "wrap"}, "padding_mode must be one of constant, reflect, edge, symmetric, got 'wrap'"),
        ({"color_jitter": -1}, "color_jitter must be at least 0, got -1"),
        ({"scale": (0.5, 1.2)}, r"scale must be two rising positive numbers, at most 1, got \(0.5, 1.2\)"),
        ({"scale": (0.0, 1.0)}, "scale must be two rising positive numbers"),
        ({"ratio": (2.0, 1.0)}, r"ratio must be two rising positive numbers, got \(2.0, 1.0\)"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        build_train_transform(TrainTransform(**settings), 32, **RGB)


@pytest.mark.parametrize(
    "text",
    ["rand-m9-mstd0.5-inc1", "rand", "rand-mstdinf-n3-p0.5-mmax20-tweights", "3a", "augmix-m5-w4-d2", "v0r-mstd0.5"],
)
def test_known_augmentations_pass(text):
    check_auto_augment(text)


@pytest.mark.parametrize("crop_pct", [0, -1, 1.1, float("nan")])
def test_bad_crop_ratio(crop_pct):
    with pytest.raises(UserError, match="crop_pct must be in"):
        build_eval_transform(32, crop_pct=crop_pct)
