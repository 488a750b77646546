"""Muon for the matrices of a decoder's blocks, AdamW for everything else, as one optimizer."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import timm.optim.muon
import torch
from torch import nn
from torch.optim import Optimizer

from lapbench.errors import UserError

REFERENCE_WIDTH = 768


@dataclass
class MuonSettings:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) with AdamW, in nanochat's division of parameters.

    Args:
        lr: Peak learning rate of Muon: of the weights of all linear layers in blocks.
        momentum: Muon's momentum (Nesterov's).
        momentum_start: Momentum of the first step, from where it grows linearly.
        momentum_warmup: Optimizer steps until it is ``momentum``.
        ns_steps: Newton-Schulz iterations.
        weight_decay: Decoupled decay of Muon's matrices; the others have none.
        embedding_lr: AdamW's peak learning rate of the token embedding, at width 768: it goes with width^-0.5.
        head_lr: That of the output matrix, at width 768; also of an embedding that is tied to it.
        other_lr: That of norm weights, learned positions and learned head coefficients, at any width.
        betas: AdamW's averages of gradients and of their squares.
        eps: AdamW's epsilon.
        lr_scale: Factor of all learning rates, below 1 for fine-tuning.
    """

    lr: float = 0.02
    momentum: float = 0.95
    momentum_start: float = 0.85
    momentum_warmup: int = 300
    ns_steps: int = 5
    weight_decay: float = 0.0
    embedding_lr: float = 0.2
    head_lr: float = 0.004
    other_lr: float = 0.004
    betas: tuple[float, float] = (0.8, 0.95)
    eps: float = 1e-10
    lr_scale: float = 1.0

    def momentum_at(self, step: int) -> float:
        """Muon's momentum in optimizer step ``step`` (0-based)."""
        done = min(1.0, step / self.momentum_warmup) if self.momentum_warmup else 1.0
        return (1 - done) * self.momentum_start + done * self.momentum


class Muon(timm.optim.muon.Muon):  # type: ignore[misc]  # timm is not typed
    """timm's, with Newton-Schulz in float32 for parameters on a CPU.

    timm computes it in bfloat16 whatever the device. Most CPUs only emulate that: a step of a small decoder then takes
    three times as long as its gradient.
    """

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; see `torch.optim.Optimizer.step`."""
        if any(p.device.type != "cpu" for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        exact = partial(timm.optim.muon.zeropower_via_newtonschulz, dtype=torch.float32)
        with mock.patch.object(timm.optim.muon, "zeropower_via_newtonschulz", exact):
            return super().step(closure)


def build_muon(decoder: nn.Module, settings: MuonSettings) -> Optimizer:
    """timm's Muon over the trainable parameters of a decoder, each in exactly one group.

    The first group is Muon's, and ``set_momentum`` moves its momentum. The update of an m x n matrix is scaled by
    sqrt(max(1, m / n)).

    Args:
        decoder: A model with ``blocks``, ``embedding``, ``head`` and ``embed_dim``.
        settings: Learning rates and the rest.

    Raises:
        UserError: A setting out of range.
    """
    _check(settings)
    blocks: Any = decoder.blocks
    hidden = [m.weight for m in blocks.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    width = (decoder.embed_dim / REFERENCE_WIDTH) ** -0.5  # type: ignore[operator]
    embedding, head = decoder.embedding.weight, decoder.head.weight  # type: ignore[union-attr]
    tied = embedding is head
    own = {id(p) for p in (*hidden, embedding, head)}
    other = [p for p in decoder.parameters() if id(p) not in own and p.requires_grad]
    # Nesterov's momentum on a fallback group would make it NAdamW.
    muon = {"use_muon": True, "nesterov": True, "weight_decay": settings.weight_decay}
    adamw = {"use_fallback": True, "nesterov": False, "eps": settings.eps, "weight_decay": 0.0}
    groups: list[dict[str, Any]] = [
        {"params": hidden, "lr": settings.lr, **muon},
        {"params": [] if tied else [embedding], "lr": settings.embedding_lr * width, **adamw},
        {"params": [head], "lr": settings.head_lr * width, **adamw},
        {"params": other, "lr": settings.other_lr, **adamw},
    ]
    groups = [{**group, "lr": group["lr"] * settings.lr_scale} for group in groups]
    return Muon(
        [group for group in groups if any(p.requires_grad for p in group["params"])],
        lr=settings.lr * settings.lr_scale,
        momentum=settings.momentum_at(0),
        ns_steps=settings.ns_steps,
        ns_coefficients="original",
        adjust_lr_fn="original",
        betas=tuple(settings.betas),
    )


def set_momentum(optimizer: Optimizer, settings: MuonSettings, step: int) -> None:
    """Gives Muon the momentum of optimizer step ``step``."""
    optimizer.param_groups[0]["momentum"] = settings.momentum_at(step)


def _check(settings: MuonSettings) -> None:
    for name in ("lr", "embedding_lr", "head_lr", "other_lr", "lr_scale", "eps"):
        if not getattr(settings, name) > 0:
            raise UserError(f"muon.{name}: expected a number above 0, got {getattr(settings, name):g}")
    for name in ("momentum", "momentum_start"):
        if not 0 <= getattr(settings, name) < 1:
            raise UserError(f"muon.{name}: expected 0 <= value < 1, got {getattr(settings, name):g}")
    for name, least in (("ns_steps", 1), ("momentum_warmup", 0), ("weight_decay", 0)):
        if not getattr(settings, name) >= least:
            raise UserError(f"muon.{name}: expected at least {least}, got {getattr(settings, name):g}")
    if len(settings.betas) != 2 or not all(0 <= beta < 1 for beta in settings.betas):
        raise UserError(f"muon.betas: expected two numbers in 0 <= value < 1, got {settings.betas}")
