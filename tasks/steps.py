"""What all tasks do alike around an optimizer step: its schedule, its log, and the end of a run whose loss is lost."""

import math

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from lapbench.errors import UserError
from lapbench.optim import LRSchedule, OptimizerSettings, build_scheduler


class NonFiniteLossError(UserError):
    """The training loss became NaN or infinite; the weights are still those of the last optimizer step."""


def check_finite(task: pl.LightningModule, loss: Tensor, batch_idx: int) -> None:
    """Ends the run if the loss is not finite.

    Raises:
        NonFiniteLossError: On all processes, before the optimizer could spread it to the weights.
    """
    finite = bool(torch.isfinite(loss))
    # All processes stop together: one that stops alone leaves the others waiting for its gradients.
    if task.trainer.strategy.reduce_boolean_decision(finite):
        return
    what = "not finite on another process" if finite else loss.item()
    raise NonFiniteLossError(
        f"train/loss is {what} at optimizer step {task.trainer.global_step}, epoch {task.trainer.current_epoch}, "
        f"batch {batch_idx}: expected a finite number; a lower learning rate, a longer warm-up or gradient clipping "
        "may help"
    )


def is_shown(trainer: pl.Trainer) -> bool:
    """Whether anything keeps what is logged in this step: loggers take every nth, the record an epoch's last one."""
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
    # Lightning counts them from 1, and takes 0 for none.
    return trainer.is_last_batch or (every > 0 and (trainer.global_step + 1) % every == 0)


def log_step(task: pl.LightningModule, model: nn.Module, optimizer: Optimizer) -> None:
    """Logs train/grad_norm (of ``model``, before clipping) and train/lr (of the first group), when they are shown."""
    if not is_shown(task.trainer):
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    task.log("train/grad_norm", nn.utils.get_total_norm(gradients))
    task.log("train/lr", optimizer.param_groups[0]["lr"])


def window_correction(trainer: pl.Trainer, batch_idx: int) -> float:
    """What a micro-batch's mean loss is multiplied by, that each window of accumulation is a mean over its own batches.

    Lightning divides each micro-batch by the accumulation; the last window of an epoch may be shorter.
    """
    window = trainer.accumulate_grad_batches
    batches = trainer.num_training_batches
    if window == 1 or not math.isfinite(batches):
        return 1.0
    tail = int(batches) % window
    return window / tail if tail and batch_idx >= batches - tail else 1.0


def step_samples(trainer: pl.Trainer, settings: OptimizerSettings) -> int:
    """Samples in an optimizer step of all processes; 0 where there is no DataModule to say it.

    Raises:
        UserError: The learning rate goes by them, and nothing says how many they are.
    """
    data = getattr(trainer, "datamodule", None)
    if data is not None:
        return int(data.batch_size * trainer.world_size * trainer.accumulate_grad_batches)
    if settings.lr_batch_size is not None:
        raise UserError("optimizer.lr_batch_size: scaling the learning rate needs a DataModule with a batch_size")
    return 0


def optimizer_steps(trainer: pl.Trainer) -> tuple[int, int]:
    """Optimizer steps of the whole training and of an epoch.

    Raises:
        UserError: Training has no end.
    """
    trainer.fit_loop.setup_data()  # the estimate does so only where it needs the number of batches
    total = trainer.estimated_stepping_batches
    if not math.isfinite(total):
        raise UserError(
            "trainer.max_epochs: expected a number of epochs or trainer.max_steps, got training without end"
        )
    return int(total), math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)


def with_schedule(trainer: pl.Trainer, optimizer: Optimizer, settings: LRSchedule) -> OptimizerLRScheduler:
    """The optimizer with its schedule, stepped after each of its steps, for ``configure_optimizers``.

    With ``trainer.max_epochs`` 0 there are no steps, and so no schedule.

    Raises:
        UserError: Training has no end, or the schedule does not fit it.
    """
    if trainer.max_epochs == 0:
        return optimizer
    total, steps_per_epoch = optimizer_steps(trainer)
    scheduler = build_scheduler(optimizer, settings, total=total, warmup=settings.warmup(steps_per_epoch))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
