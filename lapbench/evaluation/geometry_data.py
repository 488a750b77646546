"""What token geometry is measured on: the first samples of a split, each once, and where each batch begins in it."""

from dataclasses import replace
from typing import Any, Literal

import lightning.pytorch as pl

from lapbench.backbones import Decoder
from lapbench.datamodules.images import ImageShards
from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.orders import StreamOrder
from lapbench.errors import UserError

Split = Literal["val", "test"]


class GeometryData(pl.LightningDataModule):
    """The first samples of a split of a run's data for ``predict``, shared by its processes in equal parts.

    Batches are ``(images, labels, keys)`` of images and ``(inputs, targets)`` of text.

    Args:
        data: Images with labels, or text.
        split: "val" or "test".
        max_samples: How many of the first samples to take; None for all.
    """

    def __init__(self, data: pl.LightningDataModule, split: Split, max_samples: int | None) -> None:
        super().__init__()
        self.data = data
        self.split: Split = split
        self.max_samples = max_samples

    def prepare_data(self) -> None:
        """Makes or fetches the data, where they are not there."""
        self.data.prepare_data()

    def setup(self, stage: str | None = None) -> None:
        """Reads what they are; a run that only evaluates has not done so yet."""
        self.data.setup()  # type: ignore[call-arg]

    def predict_dataloader(self) -> ResumableLoader:
        """The samples of this process.

        Raises:
            UserError: No such split, or more processes than samples.
        """
        loader = _loader(self.data, self.split)
        if self.max_samples is not None:
            order: Any = loader.stream.order
            counts = _first(order.plan.counts, self.max_samples)
            loader.stream.order = replace(order, plan=replace(order.plan, counts=counts))
        return loader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalises images on their device."""
        return self.data.on_after_batch_transfer(batch, dataloader_idx)


def check_data(data: Any, backbone: object, where: str) -> None:
    """UserError if a backbone cannot read the data, or they have no labels."""
    if isinstance(backbone, Decoder):
        if not hasattr(data, "token_bytes"):
            raise UserError(f"{where}: expected text for a language model, got {type(data).__name__}")
    elif not isinstance(data, ImageShards):
        raise UserError(f"{where}: expected images with labels, got {type(data).__name__}")


def choose_split(data: Any, split: Literal["auto", "val", "test"], where: str) -> Split:
    """The split to measure: of "auto" the validation split, or the test split of data without one.

    Raises:
        UserError: There is no validation split.
    """
    if split == "test" or has_validation(data):
        return "test" if split == "test" else "val"
    if split == "val":
        raise UserError(f"{where}.split val: {type(data).__name__} has no validation split: measure split test")
    return "test"


def has_validation(data: Any) -> bool:
    """Whether the data have a validation split."""
    if isinstance(data, ImageShards):
        return data.val_fraction > 0 or data.val_split is not None
    loader = data.val_dataloader()
    return not isinstance(loader, list)


def batch_starts(loader: ResumableLoader) -> list[int]:
    """The place in the whole split of the first sample of each batch of this process, in the order of the loader.

    Index readers hand out a process's samples in order; each worker of a stream has a contiguous part of them.
    """
    plan, order = loader.stream.plan, loader.stream.order
    workers = max(1, loader.num_workers) if isinstance(order, StreamOrder) else 1
    starts, place = [0] * len(plan.sizes), plan.span[0]
    for slot in range(workers):
        for number in range(slot, len(plan.sizes), workers):
            starts[number] = place
            place += plan.sizes[number]
    return starts


def _loader(data: Any, split: Split) -> ResumableLoader:
    if isinstance(data, ImageShards):
        return data.plain_dataloader(split)
    loader: ResumableLoader = data.val_dataloader() if split == "val" else data.test_dataloader()
    return loader


def _first(counts: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Counts of each shard, of the first ``total`` samples."""
    kept = []
    for count in counts:
        kept.append(min(count, total))
        total -= kept[-1]
    return tuple(kept)
