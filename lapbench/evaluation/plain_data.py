"""The images of a run as frozen backbones read them: in order, without augmentation."""

from typing import Any

import lightning.pytorch as pl

from lapbench.datamodules.images import ImageShards, Part
from lapbench.datamodules.loader import ResumableLoader


class PlainData(pl.LightningDataModule):
    """A part of image data for ``predict`` and ``validate``: each sample once, as ``(images, labels, keys)``.

    Args:
        data: The images.
        part: Which of them.
    """

    def __init__(self, data: ImageShards, part: Part) -> None:
        super().__init__()
        self.data = data
        self.part: Part = part

    def prepare_data(self) -> None:
        """Makes or fetches the data, where they are not there."""
        self.data.prepare_data()

    def setup(self, stage: str) -> None:
        """Reads what they are; a run that only evaluates has not done so yet."""
        self.data.setup()

    def predict_dataloader(self) -> ResumableLoader:
        """The part's samples of this process."""
        return self.data.plain_dataloader(self.part)

    val_dataloader = predict_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalises the images on their device."""
        return self.data.on_after_batch_transfer(batch, dataloader_idx)
