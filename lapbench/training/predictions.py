"""Predictions as a CSV file."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BasePredictionWriter

from lapbench.errors import UserError


class PredictionWriter(BasePredictionWriter):
    """Writes key, label, predicted class and its probability for each sample, batch by batch.

    The file appears under its name only when it is complete.

    Args:
        file: The CSV file.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(write_interval="batch")
        self.file = file
        self.count = 0
        self._stream: IO[str] | None = None

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Opens the file."""
        if trainer.world_size > 1:
            raise UserError(
                f"lapbench predict writes one file from one process; got {trainer.world_size} (--trainer.devices 1)"
            )
        self._stream = self._temporary.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._stream)
        self._writer.writerow(["key", "label", "prediction", "probability"])

    def write_on_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        prediction: dict[str, Any],
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Writes a batch."""
        probability, predicted = prediction["probabilities"].max(dim=-1)
        rows = zip(
            prediction["keys"], prediction["labels"].tolist(), predicted.tolist(), probability.tolist(), strict=True
        )
        for key, label, prediction_, p in rows:
            self._writer.writerow([key, label, prediction_, f"{p:.6f}"])
            self.count += 1

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives the complete file its name."""
        assert self._stream is not None
        self._stream.close()
        self._temporary.replace(self.file)

    @property
    def _temporary(self) -> Path:
        return self.file.with_suffix(".tmp")
