"""Checkpoints between two steps: every n of them, and when a signal asks the run to stop."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Checkpoint

from lapbench.training.stop_signals import Interrupted, StopSignals


class StepCheckpoint(Checkpoint):
    """Writes the checkpoint that a run resumes from before the next batch, when one is due.

    Only after an optimizer step, as gradients that are being accumulated are in no checkpoint, and not after an
    epoch's last step, as the epoch's own checkpoint follows. Everything of the finished step, its logged values
    included, is done by then.

    A stop signal on any process stops all of them after the same step.

    Args:
        file: The checkpoint.
        signals: The run's stop signals.
        every_n_steps: Optimizer steps between checkpoints; None for none but those that signals ask for.
    """

    def __init__(self, file: Path, signals: StopSignals, every_n_steps: int | None = None) -> None:
        self.file = file
        self.signals = signals
        self.every_n_steps = every_n_steps
        self._vote: _Vote | None = None
        self._seen = 0
        self._validated = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on signals wait for a step to end."""
        self._vote = _Vote(trainer.world_size)
        self._seen = trainer.global_step
        self.signals.deferring = True
        self.signals.install()
        # Lightning would otherwise end training at the next epoch's end, for a signal that came since its own handler.
        connector: Any = trainer._signal_connector
        self.signals.noted |= connector.received_sigterm
        connector.received_sigterm = False

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Saves, if the step before this batch calls for it.

        Raises:
            Interrupted: A signal arrived and the checkpoint is written.
        """
        if batch_idx == 0 or trainer.global_step == self._seen:
            return
        self._seen = trainer.global_step
        stop = self._agreed()
        if stop or (self.every_n_steps and trainer.global_step % self.every_n_steps == 0):
            trainer.save_checkpoint(self.file)
        if stop:
            raise Interrupted(together=True)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Notes that no validation has followed this batch yet."""
        self._validated = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Notes that one has."""
        self._validated = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leaves, if a signal arrived; this callback comes after the one that wrote the epoch's checkpoint."""
        self._seen = trainer.global_step
        if self._agreed():
            raise Interrupted(together=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """From here on signals act at once."""
        stop = self._agreed()
        self.signals.deferring = False
        if stop:
            raise Interrupted(together=True)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes the batch that was announced but not begun out of Lightning's counters."""
        loops = checkpoint["loops"]["fit_loop"]
        progress = loops["epoch_loop.batch_progress"]
        if progress["total"]["ready"] == progress["total"]["started"]:
            return
        progress["is_last_batch"] = False
        for counter in (progress["total"], progress["current"]):
            counter["ready"] = counter["started"]
        if self._validated:
            # A run that goes on after a validation does not repeat it, but counts its step once more.
            loops["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1

    def _agreed(self) -> bool:
        assert self._vote is not None
        return self._vote(self.signals.noted)


class _Vote:
    """Whether any process noted a signal: the same answer on all of them.

    Over the CPU, so that no accelerator has to be waited for.
    """

    def __init__(self, world_size: int) -> None:
        self._group: Any = dist.new_group(backend="gloo") if world_size > 1 else None

    def __call__(self, mine: bool) -> bool:
        if self._group is None:
            return mine
        flag = torch.tensor([mine], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag.item())
