"""Optimizers through timm's factory, with learning rates scaled by the batch."""

import difflib
import inspect
from dataclasses import dataclass, field
from typing import Any, Literal

from timm.optim import create_optimizer_v2, get_optimizer_class, list_optimizers
from torch import nn
from torch.optim import Optimizer

from lapbench.errors import UserError
from lapbench.optim.groups import parameter_groups


@dataclass
class OptimizerSettings:
    """An optimizer and its peak learning rate.

    Args:
        name: Name in timm's factory: adamw, lamb, sgd, ...
        lr: Peak learning rate, for a batch of ``lr_batch_size`` samples if that is given.
        lr_batch_size: Batch that ``lr`` is stated for; null uses ``lr`` as it is.
        lr_scaling: How lr grows with batch / ``lr_batch_size``: "linear" or "sqrt".
        weight_decay: Weight decay of matrices; biases, norms, tokens and position embeddings have none.
        options: Further arguments of the optimizer: betas, eps, momentum, fused.
    """

    name: str = "adamw"
    lr: float = 1e-3
    lr_batch_size: int | None = None
    lr_scaling: Literal["linear", "sqrt"] = "linear"
    weight_decay: float = 0.05
    options: dict[str, Any] = field(default_factory=dict)

    def peak_lr(self, batch_size: int) -> float:
        """The peak learning rate for ``batch_size`` samples in each optimizer step, all devices together."""
        if self.lr_batch_size is None:
            return self.lr
        ratio = batch_size / self.lr_batch_size
        return self.lr * (ratio if self.lr_scaling == "linear" else ratio**0.5)


def build_optimizer(model: nn.Module, settings: OptimizerSettings, batch_size: int) -> Optimizer:
    """Builds the optimizer for ``model``'s trainable parameters.

    Args:
        model: What is trained.
        settings: Its settings.
        batch_size: Samples in each optimizer step (all devices, accumulation included).

    Raises:
        UserError: timm has no optimizer of that name, or the optimizer refuses the options.
    """
    expected = _option_names(settings.name)
    if unknown := settings.options.keys() - expected:
        raise UserError(
            f"optimizer.options: {settings.name} has no option {', '.join(sorted(unknown))}; "
            f"expected {', '.join(sorted(expected))}"
        )
    options: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.options.items()}
    try:
        optimizer: Optimizer = create_optimizer_v2(
            parameter_groups(model, settings.weight_decay),
            opt=settings.name,
            lr=settings.peak_lr(batch_size),
            weight_decay=0.0,  # each group carries its own
            **options,
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"optimizer {settings.name}: {error}; got options {settings.options}") from error
    return optimizer


def _option_names(optimizer: str) -> set[str]:
    """What ``options`` may hold. timm itself drops some of what an optimizer does not know, layer_decay among them."""
    names = list_optimizers()
    if optimizer not in names:
        near = difflib.get_close_matches(optimizer.lower(), names, n=3)
        raise UserError(
            f"optimizer.name: timm has no optimizer {optimizer!r}"
            + (f"; did you mean {', '.join(near)}?" if near else "")
        )
    try:
        factory = get_optimizer_class(optimizer, bind_defaults=False)
    except (AssertionError, ImportError) as error:  # of apex or bitsandbytes
        raise UserError(f"optimizer.name: {optimizer} cannot be used here: {error}") from error
    return set(inspect.signature(factory).parameters) - {"params", "lr", "weight_decay"}
