"""Rotary embedding, RMSNorm and SwiGLU with gradients of their own, which take less memory and fewer passes over it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def rotary_table(context: int, width: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position x base^(-2i / width) (RoFormer, arXiv 2104.09864, eq. 15), each [context, width / 2]."""
    frequencies = 1.0 / base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    angles = torch.arange(context, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves, clockwise: (a, b) -> (a cos + b sin, b cos - a sin).

    Args:
        x: [..., d], its halves a and b.
        cos: Broadcastable to [..., d / 2].
        sin: As ``cos``.
    """
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if torch.compiler.is_compiling():
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], dim=-1)
    if not torch.is_grad_enabled():
        return _rotated(x, cos, sin)
    rotated: Tensor = _Rotate.apply(x, cos, sin)
    return rotated


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty_like(x)
    a, b = x.chunk(2, dim=-1)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=-1)
    return out


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the rotation back; nothing of x is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        cos, sin = ctx.saved_tensors
        return rotate(grad, cos, -sin), None, None


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` (arXiv 1910.07467, eq. 4), faster and leaner on the CPU, where torch has no kernel for it.

    The gradient of its gradient is not available there.
    """

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] from [..., D]."""
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float | None) -> Tensor:
    """x / sqrt(mean(x^2) + eps), times ``weight``, over the last dimension."""
    # Half precision keeps torch's own, which sums in float32.
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or torch.compiler.is_compiling():
        return F.rms_norm(x, (x.size(-1),), weight, eps)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    if not torch.is_grad_enabled():
        normed, _ = _normed(x, eps)
        return normed if weight is None else normed.mul_(weight)
    out: Tensor = _RMSNorm.apply(x, eps) if weight is None else _WeightedRMSNorm.apply(x, weight, eps)
    return out


def _normed(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.size(-1)).add_(eps).rsqrt_()
    return x * scale, scale


class _RMSNorm(torch.autograd.Function):
    """Keeps y, which the next matrix product keeps anyway, and not x: dx = r (dy - y mean(y dy))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        y, scale = _normed(x, eps)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        y, scale = ctx.saved_tensors
        dot: Tensor = torch.linalg.vecdot(grad, y).unsqueeze(-1).div_(-y.size(-1))
        return torch.addcmul(grad, y, dot).mul_(scale), None


class _WeightedRMSNorm(torch.autograd.Function):
    """With w: dx = r (w dy - n mean(n w dy)) and dw = sum(n dy), n = r x the normalised input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _normed(x, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed.mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(dim=0)
        dot = (product @ weight).unsqueeze(-1).div_(-x.size(-1))
        grad_x: Tensor = torch.mul(grad, weight, out=product).addcmul_(normed, dot).mul_(scale)
        return grad_x, grad_weight, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) up (arXiv 2002.05202, eq. 5); the gradient of its gradient is not available."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    out: Tensor = _SwiGLU.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)
    return out


class _SwiGLU(torch.autograd.Function):
    """Keeps gate and up only, and computes silu(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        gate, up = ctx.saved_tensors
        grad_gate = grad * up
        torch.ops.aten.silu_backward.grad_input(grad_gate, gate, grad_input=grad_gate)
        return grad_gate, F.silu(gate).mul_(grad)
