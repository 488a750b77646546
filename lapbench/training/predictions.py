"""Predictions as a CSV file."""

import csv
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl

from lapbench.errors import UserError


class PredictionWriter(pl.Callback):
    """Writes key, label, predicted class and its probability for each sample, batch by batch.

    The file appears under its name only when it is complete.

    Args:
        file: The CSV file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.count = 0
        self._temporary = file.with_suffix(".tmp")
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

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: dict[str, Any],
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Writes a batch."""
        probability, predicted = outputs["probabilities"].max(dim=-1)
        columns = (outputs["keys"], outputs["labels"].tolist(), predicted.tolist(), probability.tolist())
        for key, label, choice, p in zip(*columns, strict=True):
            self._writer.writerow([key, label, choice, f"{p:.6f}"])
            self.count += 1

    def on_predict_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gives the complete file its name."""
        assert self._stream is not None
        self._stream.close()
        self._temporary.replace(self.file)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leaves nothing half written."""
        if self._stream is not None:
            self._stream.close()
            self._temporary.unlink(missing_ok=True)
