"""Training throughput."""

import time

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor


class Throughput(pl.Callback):
    """Training samples per second over all devices, waiting for data included, validation and checkpoints excluded.

    Logs train/samples_per_second after each epoch. The number for the record leaves out the first epoch of this
    process, which starts workers and compiles, unless it is the only one.
    """

    def __init__(self) -> None:
        self._epochs: list[tuple[int, float]] = []
        self._samples = 0
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def samples_per_second(self) -> float | None:
        """Mean over the epochs of this process; None before the first one ends."""
        counted = self._epochs[1:] or self._epochs
        return sum(n for n, _ in counted) / sum(s for _, s in counted) if counted else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # An epoch that is resumed in its middle has no other beginning.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._samples, self._seconds, self._since = 0, 0.0, time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: tuple[Tensor, ...],
        batch_idx: int,
    ) -> None:
        self._samples += len(batch[0]) * trainer.world_size
        if trainer.is_last_batch:
            self._pause(pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.training and not trainer.is_last_batch:
            self._since = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(pl_module)
        if self._samples:
            self._epochs.append((self._samples, self._seconds))
            pl_module.log("train/samples_per_second", self._samples / self._seconds, rank_zero_only=True)

    def _pause(self, pl_module: pl.LightningModule) -> None:
        if self._since is None:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds += time.perf_counter() - self._since
        self._since = None
