"""Learning-rate schedules on the optimizer-step clock."""

import math
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lapbench.errors import UserError


@dataclass
class LRSchedule:
    """Warm-up, then decay, counted in optimizer steps (not batches: accumulation does not stretch it).

    Args:
        name: "cosine" from the peak to ``min_lr``, or "constant".
        warmup_epochs: Length of the linear warm-up, in epochs.
        warmup_lr: Learning rate of the first step, absolute.
        min_lr: Learning rate after the last step, absolute.
    """

    name: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: float = 5.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-6


def learning_rate(step: int, *, peak: float, total: int, warmup: int, settings: LRSchedule) -> float:
    """The learning rate of optimizer step ``step`` (0-based) of ``total``, after ``warmup`` linear ones.

    ``learning_rate(total, ...)``, which a scheduler reaches after the last step, is ``min_lr`` for cosine.
    """
    if step < warmup:
        return settings.warmup_lr + (peak - settings.warmup_lr) * step / warmup
    if settings.name == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - warmup))
    return settings.min_lr + (peak - settings.min_lr) * (1 + math.cos(math.pi * done)) / 2


def build_scheduler(optimizer: Optimizer, settings: LRSchedule, *, total: int, warmup: int) -> LambdaLR:
    """A torch scheduler to be stepped once after each optimizer step.

    Raises:
        UserError: The warm-up is as long as the training, the peak is not above 0, or another rate is above the peak.
    """
    if not 0 <= warmup < total:
        raise UserError(f"lr_schedule.warmup_epochs: the warm-up takes {warmup} of the {total} optimizer steps")
    peak = optimizer.param_groups[0]["lr"]
    if not peak > 0:
        raise UserError(f"optimizer.lr: expected a learning rate above 0, got {peak:g}")
    for key in ("warmup_lr", "min_lr") if settings.name == "cosine" else ("warmup_lr",):
        if not 0 <= getattr(settings, key) <= peak:
            raise UserError(f"lr_schedule.{key}: expected 0..{peak:g} (the peak), got {getattr(settings, key):g}")
    return LambdaLR(
        optimizer,
        lambda step: learning_rate(step, peak=peak, total=total, warmup=warmup, settings=settings) / peak,
    )
