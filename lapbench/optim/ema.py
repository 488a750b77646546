"""Exponential moving average of the weights."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn


class EMA(EMAWeightAveraging):
    """Lightning's EMA: validation, testing and the checkpoint's ``state_dict`` use the averaged weights.

    Training resumes from the raw ones. Before the first optimizer step both are the same.
    """

    _exchanged = False  # whether the model holds the averaged weights, and the average the raw ones

    def _swap_models(self, pl_module: pl.LightningModule) -> None:
        super()._swap_models(pl_module)
        self._exchanged = not self._exchanged

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """As Lightning's, but right also in the middle of validation."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        if self._exchanged:
            averaged, raw = checkpoint["current_model_state"], checkpoint["state_dict"]
            checkpoint |= {"state_dict": averaged, "current_model_state": raw}

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores the raw weights for training only: Lightning's callback would also put them back for testing."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
