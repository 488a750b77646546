"""Gradient clipping of each parameter by itself."""

from collections.abc import Iterable

import torch
from torch import nn


@torch.no_grad()
def clip_each_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scales the gradient of each parameter down to ``max_norm``, without waiting for an accelerator.

    The same as ``torch.nn.utils.clip_grad_norm_`` called for each parameter alone: DINO's clipping. The gradients are
    on one device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    norms = torch.stack(torch._foreach_norm(gradients))
    factors = (max_norm / (norms + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, list(factors.unbind()))
