"""a V + b P V for fixed a and b, in as few passes over memory as it takes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[tuple[float, float, int]]


def blend(attended: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """a V + b P V, differentiable any number of times.

    Args:
        attended: P V, [B, H, T, d_h].
        value: V, [B, H, T, d_h].
        groups: (a, b, number of heads) for each run of heads, H heads in all.

    Returns:
        [B, H, T, d_h], in the memory layout of [B, T, H, d_h].
    """
    if torch.compiler.is_compiling():
        return _blend_pointwise(attended, value, groups)
    if not torch.is_grad_enabled():  # what apply does besides takes longer than the heads of a few tokens
        return _Blend.forward(attended, value, groups)
    blended: Tensor = _Blend.apply(attended, value, tuple(groups))
    return blended


def _blend_pointwise(attended: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """For the compiler, which makes one kernel of it, forward and backward; in eager mode it would take many passes."""
    head = torch.arange(value.size(1), device=value.device)[:, None, None]
    first = 0
    out = attended
    for a, b, n in groups:
        part = attended if b == 1 else -attended if b == -1 else b * attended
        if a:
            part = part + (value if a == 1 else a * value)
        out = torch.where(head >= first, part, out)
        first += n
    return out


class _Blend(torch.autograd.Function):
    """Autograd's own rule would pad, concatenate and add for each slice of heads."""

    generate_vmap_rule = True

    @staticmethod
    def forward(attended: Tensor, value: Tensor, groups: Groups) -> Tensor:
        # In the memory layout of [B, T, H, d_h]; torch.vmap takes no out=.
        out = torch.empty_like(attended.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        sizes = [n for *_, n in groups]
        for (a, b, _), *parts in zip(
            groups, *(torch.split(t, sizes, dim=1) for t in (out, attended, value)), strict=True
        ):
            part, from_attended, from_value = parts
            if a == 1 and b != 0:
                part.copy_(from_value).add_(from_attended, alpha=b)
            else:
                _scale(from_attended, b, part)
                if a:
                    part.add_(from_value, alpha=a)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.groups = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        groups: Groups = ctx.groups
        return _scaled(grad, [(b, n) for _, b, n in groups]), _scaled(grad, [(a, n) for a, _, n in groups]), None


def _scaled(x: Tensor, groups: Sequence[tuple[float, int]]) -> Tensor:
    """x [B, H, T, d_h], each run of heads multiplied by its number; x itself where nothing changes."""
    if all(factor == 1 for factor, _ in groups):
        return x
    out = torch.empty_like(x)  # no view of another tensor, so that autograd adds the other gradient in place
    sizes = [n for _, n in groups]
    for (factor, _), part, scaled in zip(groups, *(torch.split(t, sizes, dim=1) for t in (x, out)), strict=True):
        _scale(part, factor, scaled)
    return out


def _scale(x: Tensor, factor: float, out: Tensor) -> None:
    if factor == 0:
        out.zero_()
    elif factor == 1:
        out.copy_(x)
    else:
        out.copy_(x).mul_(factor)
