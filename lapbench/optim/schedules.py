"""Schedules on the optimizer-step clock."""

import math
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lapbench.errors import UserError


@dataclass
class LRSchedule:
    """Warm-up, then decay, counted in optimizer steps (not batches: accumulation does not stretch it).

    Where an optimizer's groups have several peaks, these rates are the first one's, and the others go in proportion.

    Args:
        name: "cosine" or "linear" from the peak to ``min_lr``, "constant", or "trapezoid": constant, then linear to
            ``final_fraction`` of the peak over the last steps (arXiv 2405.18392).
        warmup_epochs: Length of the linear warm-up, in epochs.
        warmup_steps: Its length in optimizer steps; null goes by ``warmup_epochs``.
        warmup_lr: Learning rate of the first step of a warm-up, absolute.
        min_lr: Learning rate after the last step of "cosine" and "linear", absolute.
        warmdown: Share of all steps that the linear decay of "trapezoid" takes.
        final_fraction: Learning rate after the last step of "trapezoid", in peaks.
    """

    name: Literal["cosine", "linear", "constant", "trapezoid"] = "cosine"
    warmup_epochs: float = 5.0
    warmup_steps: int | None = None
    warmup_lr: float = 1e-6
    min_lr: float = 1e-6
    warmdown: float = 0.2
    final_fraction: float = 0.0

    def warmup(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the warm-up."""
        return round(self.warmup_epochs * steps_per_epoch) if self.warmup_steps is None else self.warmup_steps


def learning_rate(step: int, *, peak: float, total: int, warmup: int, settings: LRSchedule) -> float:
    """The learning rate of optimizer step ``step`` (0-based) of ``total``, after ``warmup`` linear ones.

    ``learning_rate(total, ...)``, which a scheduler reaches after the last step, is ``min_lr`` for cosine and linear,
    and ``final_fraction`` peaks for trapezoid.
    """
    if step < warmup:
        return settings.warmup_lr + (peak - settings.warmup_lr) * step / warmup
    if settings.name == "constant":
        return peak
    if settings.name == "trapezoid":
        left = min(1.0, max(0, total - step) / max(1, _warmdown(settings, total)))
        return peak * (left + (1 - left) * settings.final_fraction)
    if settings.name == "linear":
        done = min(1.0, (step - warmup) / max(1, total - warmup))
        return peak + (settings.min_lr - peak) * done
    return cosine(step - warmup, start=peak, end=settings.min_lr, total=total - warmup)


def cosine(step: int, *, start: float, end: float, total: int) -> float:
    """A value that goes from ``start`` in step 0 to ``end`` after ``total`` steps on half a cosine wave."""
    done = min(1.0, step / max(1, total))
    return end + (start - end) * (1 + math.cos(math.pi * done)) / 2


def build_scheduler(optimizer: Optimizer, settings: LRSchedule, *, total: int, warmup: int) -> LambdaLR:
    """A torch scheduler to be stepped once after each optimizer step; all groups go by one factor of their own peaks.

    Raises:
        UserError: Warm-up and warm-down do not fit into the training, the peak is not above 0, or another rate is above
            the peak.
    """
    if not 0 <= warmup < total:
        key = "warmup_epochs" if settings.warmup_steps is None else "warmup_steps"
        raise UserError(f"lr_schedule.{key}: the warm-up takes {warmup} of the {total} optimizer steps")
    peak = optimizer.param_groups[0]["lr"]
    if not peak > 0:
        raise UserError(f"optimizer.lr: expected a learning rate above 0, got {peak:g}")
    for key in ("warmup_lr", "min_lr") if settings.name in ("cosine", "linear") else ("warmup_lr",):
        if not 0 <= getattr(settings, key) <= peak:
            raise UserError(f"lr_schedule.{key}: expected 0..{peak:g} (the peak), got {getattr(settings, key):g}")
    if settings.name == "trapezoid":
        for key in ("warmdown", "final_fraction"):
            if not 0 <= getattr(settings, key) <= 1:
                raise UserError(f"lr_schedule.{key}: expected 0..1, got {getattr(settings, key):g}")
        if warmup + (down := _warmdown(settings, total)) > total:
            raise UserError(
                f"lr_schedule: the warm-up takes {warmup} and the warm-down {down} of the {total} optimizer steps"
            )
    return LambdaLR(
        optimizer,
        lambda step: learning_rate(step, peak=peak, total=total, warmup=warmup, settings=settings) / peak,
    )


def _warmdown(settings: LRSchedule, total: int) -> int:
    return round(settings.warmdown * total)
