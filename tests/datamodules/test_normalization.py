"""Normalising 8-bit batches gives the bits of torchvision's ToTensor and Normalize."""

import numpy as np
import pytest
import torch
from torchvision import transforms

from lapbench.datamodules.builtin import CIFAR10, CIFAR100, Digits, ImageNet
from lapbench.datamodules.normalization import Normalize


@pytest.mark.parametrize("data", [Digits, CIFAR10, CIFAR100, ImageNet])
def test_every_level_has_torchvisions_bits(data):
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(data.channels, 2)
    expected = transforms.Compose([transforms.ToTensor(), transforms.Normalize(data.mean, data.std)])(levels)
    batch = torch.from_numpy(levels).permute(2, 0, 1).contiguous().expand(5, -1, -1, -1)
    normalize = Normalize(data.mean, data.std)
    for _ in range(2):
        out = normalize(batch)
        assert out.dtype == torch.float32
        assert torch.equal(out, expected.expand(5, -1, -1, -1))
    assert torch.equal(normalize(batch[0]), expected)
    assert torch.equal(batch[0, 0], torch.arange(256, dtype=torch.uint8).view(16, 16))


def test_values_follow_the_formula():
    out = Normalize((0.25, 0.5), (0.5, 2.0))(torch.tensor([[[0, 255]], [[51, 204]]], dtype=torch.uint8))
    assert out.flatten().tolist() == pytest.approx([-0.5, 1.5, -0.15, 0.15])


def test_float_images_are_normalised_already():
    images = torch.randn(2, 3, 4, 4)
    assert Normalize((0.5,) * 3, (0.5,) * 3)(images) is images


def test_the_device_is_that_of_the_batch():
    normalize = Normalize((0.5,) * 3, (0.5,) * 3)
    for device in ("meta", "cpu", "meta"):
        out = normalize(torch.zeros(2, 3, 4, 4, dtype=torch.uint8, device=device))
        assert (out.device.type, out.dtype, out.shape) == (device, torch.float32, (2, 3, 4, 4))
