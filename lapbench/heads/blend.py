"""a V + b P V for fixed a and b, in as few passes over memory as it takes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Groups = Sequence[tuple[float, float, int]]


def blend(attended: Tensor, value: Tensor, groups: Groups, overwrite: bool = False) -> Tensor:
    """a V + b P V, differentiable any number of times.

    Args:
        attended: P V, [B, H, T, d_h].
        value: V, [B, H, T, d_h].
        groups: (a, b, number of heads) for each run of heads, H heads in all.
        overwrite: Whether ``attended`` may be overwritten where gradients are off.

    Returns:
        [B, H, T, d_h], in the memory layout of [B, T, H, d_h].
    """
    if torch.compiler.is_compiling():
        return _blend_pointwise(attended, value, groups)
    if not torch.is_grad_enabled():  # what apply does besides takes longer than the heads of a few tokens
        in_place = overwrite and attended.transpose(1, 2).is_contiguous()
        return _blend_(attended if in_place else _copy(attended), value, groups)
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
        return _blend_(_copy(attended), value, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.groups = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        groups: Groups = ctx.groups
        return _scaled(grad, [(b, n) for _, b, n in groups]), _scaled(grad, [(a, n) for a, _, n in groups]), None


def _copy(x: Tensor) -> Tensor:
    """x [B, H, T, d_h] in the memory layout of [B, T, H, d_h]."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)


def _blend_(attended: Tensor, value: Tensor, groups: Groups) -> Tensor:
    """In place where heads are no attention heads: few and long loops, and torch.vmap takes no ``out=``."""
    first = 0
    for a, b, n in groups:
        if (a, b) != (0, 1):
            part = _scale_(attended.narrow(1, first, n), b)
            if a:
                part.add_(value.narrow(1, first, n), alpha=a)
        first += n
    return attended


def _scaled(x: Tensor, groups: Sequence[tuple[float, int]]) -> Tensor:
    """x [B, H, T, d_h], each run of heads multiplied by its number; x itself where nothing changes."""
    if all(factor == 1 for factor, _ in groups):
        return x
    out = x.clone()  # no view: autograd adds to it in place
    first = 0
    for factor, n in groups:
        if factor != 1:
            _scale_(out.narrow(1, first, n), factor)
        first += n
    return out


def _scale_(x: Tensor, factor: float) -> Tensor:
    return x.zero_() if factor == 0 else x.neg_() if factor == -1 else x.mul_(factor)
