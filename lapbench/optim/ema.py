"""Exponential moving average of the weights."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.trainer.states import TrainerFn


class EMA(EMAWeightAveraging):
    """Lightning's EMA: validation, testing and the checkpoint's ``state_dict`` use the averaged weights.

    Training resumes from the raw ones. Before the first optimizer step both are the same.
    """

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restores the raw weights for training only: Lightning's callback would also put them back for testing."""
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
