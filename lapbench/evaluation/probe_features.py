"""What the heads of a linear probe see: parts read off a frozen backbone, streamed or kept in memory."""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lapbench.backbones import VisionBackbone
from lapbench.datamodules.images import ImageShards
from lapbench.datamodules.plan import mixed
from lapbench.evaluation.features import AT_ONCE, has_class_token, image_token, last_tokens, mean_patch_token
from lapbench.evaluation.probe_head import Part
from lapbench.evaluation.processes import Processes


class Features:
    """Reads parts off a backbone; no module, so that checkpoints, optimizers and DDP do not see the backbone.

    Args:
        backbone: In evaluation mode.
        parts: What to read.
    """

    def __init__(self, backbone: VisionBackbone, parts: Sequence[Part]) -> None:
        self.backbone = backbone
        self.parts = parts
        self._blocks = max(block for _, block in parts)

    def __call__(self, images: Tensor) -> Tensor:
        """The parts [B, P, D] of images [B, C, H, W], float32, without gradients.

        An image's parts are the same to the bit in any batch.
        """
        return torch.cat([self._of(piece) for piece in torch.split(images, AT_ONCE)])

    def dim(self, data: ImageShards, device: torch.device) -> int:
        """Width D of each part, for images of these data."""
        blank = torch.zeros(1, data.channels, data.image_size, data.image_size, device=device)
        return self(blank).size(2)

    def _of(self, images: Tensor) -> Tensor:
        taken = last_tokens(self.backbone, images, self._blocks)
        return torch.stack([self._part(kind, taken[-block]) for kind, block in self.parts], dim=1).float()

    def _part(self, kind: str, tokens: Tensor) -> Tensor:
        if kind == "avg" and has_class_token(self.backbone):
            return mean_patch_token(self.backbone, tokens)
        return image_token(self.backbone, tokens)


class CachedFeatures(pl.LightningDataModule):
    """Features and labels in memory; each epoch takes them in an order of its own, the same on any number of processes.

    Args:
        features: [N, P, D], those of all processes, on each of them.
        labels: [N].
        batch_size: Samples in a batch of one process.
        seed: Seed of the orders.
        processes: This process among the others.
    """

    def __init__(self, features: Tensor, labels: Tensor, batch_size: int, seed: int, processes: Processes) -> None:
        super().__init__()
        self.features = features
        self.labels = labels
        self.batch_size = batch_size
        self.seed = seed
        self.processes = processes

    def train_dataloader(self) -> "CachedFeatures":
        """Itself: Lightning iterates over it once an epoch."""
        return self

    def val_dataloader(self) -> list[Any]:
        """Nothing: training does not validate."""
        return []

    def __len__(self) -> int:
        """Full batches of an epoch on each process."""
        return len(self.labels) // (self.batch_size * self.processes.count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of this process in the epoch that the trainer is in."""
        assert self.trainer is not None
        generator = torch.Generator().manual_seed(mixed("probe", self.seed, self.trainer.current_epoch))
        order = torch.randperm(len(self.labels), generator=generator)
        for step in range(len(self)):
            first = (step * self.processes.count + self.processes.rank) * self.batch_size
            rows = order[first : first + self.batch_size]
            yield self.features[rows], self.labels[rows]
