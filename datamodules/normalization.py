"""8-bit images to what the models see: on the device of the batch, so that workers send a quarter of the bytes."""

import torch
from torch import Tensor


class Normalize:
    """Batches ``(pixels / 255 - mean) / std`` in float32, the same bits as torchvision's ToTensor and Normalize.

    Images that are float32 already were normalised where they were made (random erasing draws in normalised values)
    and stay as they are.

    Args:
        mean: Mean of each channel, of values in 0..1.
        std: Standard deviation of each channel.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        # By a tensor of 255: a GPU multiplies by the reciprocal when it divides by a number, which rounds otherwise.
        self._steps = tuple(torch.tensor(values).view(-1, 1, 1) for values in ((255.0,), mean, std))
        self._on: dict[torch.device, tuple[Tensor, ...]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """uint8 [..., C, H, W] to float32 of the same shape on the same device."""
        if images.dtype == torch.float32:
            return images
        device = images.device
        if device not in self._on:
            self._on[device] = tuple(step.to(device) for step in self._steps)
        full, mean, std = self._on[device]
        return images.float().div_(full).sub_(mean).div_(std)
