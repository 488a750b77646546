"""The parts of a decoder: attention with mixed heads, MLPs, blocks.

Letters in names and comments: B sequences, T tokens in this pass, S tokens seen in all, D width, H query heads, G key
and value heads, d width of a head.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapbench.backbones.cache import KVCache
from lapbench.backbones.decoder_ops import RMSNorm, rms_norm, rotate, swiglu
from lapbench.backbones.decoder_presets import Architecture, Norm
from lapbench.heads.kinds import ATTENTION
from lapbench.heads.mixing import combine_heads, needs_average
from lapbench.heads.recompute import recomputed_in_backward, worth_recomputing
from lapbench.heads.schedule import Layer

EPS = 1e-6


def build_norm(norm: Norm, width: int) -> nn.Module:
    """A norm over the last dimension: "rms" without weight, "rms_weight" and "layer" without bias."""
    if norm == "layer":
        return nn.LayerNorm(width, bias=False)
    return RMSNorm(width, eps=EPS, elementwise_affine=norm == "rms_weight")


@dataclass(frozen=True)
class Pass:
    """What the layers share in one forward pass.

    Attributes:
        rotation: cos and sin of the positions, [B or 1, T, 1, d / 2], or None without rotary positions.
        mask: [B or 1, 1, T, S], True where a query may see a key; None where ``is_causal`` says it all.
        is_causal: Position i sees 0..i.
        counts: [B or 1, 1, T, 1], the number of tokens that a query may see; None for a plain causal pass.
        valid: [B, 1, T, 1], False at padding; None without padding.
        cache: Keys and values of earlier passes.
    """

    rotation: tuple[Tensor, Tensor] | None
    mask: Tensor | None
    is_causal: bool
    counts: Tensor | None = None
    valid: Tensor | None = None
    cache: KVCache | None = None

    def average(self, layer: int, value: Tensor) -> Tensor | None:
        """C V for the new tokens in O(T d), or None for a plain causal pass, where ``combine_heads`` does it.

        Args:
            layer: Number of the layer.
            value: V of the new tokens, [B, G, T, d].

        Returns:
            [B, G, T, d].
        """
        if self.counts is None:
            return None
        sums = value.to(torch.promote_types(value.dtype, torch.float32))
        if self.valid is not None:
            sums = sums * self.valid
        sums = sums.cumsum(dim=-2)
        if self.cache is not None:
            sums = self.cache.add_to_sums(layer, sums)
        return (sums / self.counts).to(value.dtype)


class Attention(nn.Module):
    """Causal self-attention with mixed heads, grouped-query where ``num_kv_heads`` is smaller.

    Attributes:
        kinds: One kind for each query head.
        head_coefficients: [H_learned, 3], the trainable (a, b, c) of the learned heads, or None without such heads.
        lean: Whether the backward pass recomputes a large mixture instead of keeping it. Off under gradient
            checkpointing, which keeps nothing anyway.
    """

    head_coefficients: nn.Parameter | None
    lean: bool = True

    def __init__(self, a: Architecture, kinds: Layer, layer: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = a.num_heads, a.num_kv_heads, a.head_width
        self.layer = layer
        self.kinds = kinds
        self.qk_norm = a.qk_norm
        self.q_proj = nn.Linear(a.width, a.width, bias=False)
        self.k_proj = nn.Linear(a.width, a.num_kv_heads * a.head_width, bias=False)
        self.v_proj = nn.Linear(a.width, a.num_kv_heads * a.head_width, bias=False)
        self.o_proj = nn.Linear(a.width, a.width, bias=False)
        start = [kind.coefficients for kind in kinds if kind.learned]
        self.head_coefficients = nn.Parameter(torch.tensor(start)) if start else None

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        """[B, T, D] from [B, T, D]."""
        query_BTHd = self.q_proj(x).unflatten(-1, (self.num_heads, self.head_width))
        key_BTGd = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_width))
        value_BTGd = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_width))
        if now.rotation is not None:
            query_BTHd, key_BTGd = rotate(query_BTHd, *now.rotation), rotate(key_BTGd, *now.rotation)
        if self.qk_norm:
            query_BTHd, key_BTGd = (rms_norm(t, None, EPS) for t in (query_BTHd, key_BTGd))
        query, key, value = (t.transpose(1, 2) for t in (query_BTHd, key_BTGd, value_BTGd))
        keys, values = (key, value) if now.cache is None else now.cache.append(self.layer, key, value)
        attended = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=now.mask,
            is_causal=now.is_causal,
            enable_gqa=self.num_kv_heads < self.num_heads,
        )
        return self._project(attended, value, now)

    def _project(self, attended: Tensor, value: Tensor, now: Pass) -> Tensor:
        """The output projection of the mixed heads, from P V [B, H, T, d] and V [B, G, T, d] of the new tokens."""
        if all(kind == ATTENTION for kind in self.kinds):
            out: Tensor = self.o_proj(_merged(attended))
            return out
        average = now.average(self.layer, value) if needs_average(self.kinds) else None
        mixed = self._mix(attended, value, average)
        if not self.lean or not worth_recomputing(mixed):
            out = self.o_proj(_merged(mixed))
            return out
        # Autograd keeps P V for the attention's gradient; it would keep the mixture too, for the projection's.
        remix = partial(self._mix, attended.detach(), value.detach(), None if average is None else average.detach())
        with recomputed_in_backward(mixed, remix):
            out = self.o_proj(_merged(mixed))
        return out

    def _mix(self, attended: Tensor, value: Tensor, average: Tensor | None) -> Tensor:
        return combine_heads(
            attended,
            self._of_query_heads(value),
            self.kinds,
            learned=self.head_coefficients,
            is_causal=True,
            average=None if average is None else self._of_query_heads(average),
        )

    def _of_query_heads(self, x: Tensor) -> Tensor:
        """[B, G, T, d] -> [B, H, T, d]: a query head has the values of its group."""
        group = self.num_heads // self.num_kv_heads
        return x if group == 1 else x.repeat_interleave(group, dim=1)


def _merged(x: Tensor) -> Tensor:
    """[B, H, T, d] -> [B, T, D]."""
    return x.transpose(1, 2).flatten(2)


class MLP(nn.Module):
    """Two matrices with ReLU^2 (Primer, arXiv 2109.08668) or GELU between."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.squared_relu = a.mlp == "relu2"
        self.fc1 = nn.Linear(a.width, a.mlp_width, bias=False)
        self.fc2 = nn.Linear(a.mlp_width, a.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] from [B, T, D]."""
        hidden = self.fc1(x)
        hidden = F.relu(hidden).square() if self.squared_relu else F.gelu(hidden)
        out: Tensor = self.fc2(hidden)
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) up(x)) (arXiv 2002.05202, eq. 6)."""

    def __init__(self, a: Architecture) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(a.width, a.mlp_width, bias=False)
        self.up_proj = nn.Linear(a.width, a.mlp_width, bias=False)
        self.down_proj = nn.Linear(a.mlp_width, a.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] from [B, T, D]."""
        out: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each with its residual sum; ``post_norm`` normalises the sums, else the sublayers' inputs."""

    def __init__(self, a: Architecture, kinds: Layer, layer: int) -> None:
        super().__init__()
        self.post_norm = a.norm_position == "post"
        self.norm1 = build_norm(a.norm, a.width)
        self.attn = Attention(a, kinds, layer)
        self.norm2 = build_norm(a.norm, a.width)
        self.mlp = SwiGLU(a) if a.mlp == "swiglu" else MLP(a)

    def forward(self, x: Tensor, now: Pass) -> Tensor:
        """[B, T, D] from [B, T, D]."""
        if self.post_norm:
            x = self.norm1(x + self.attn(x, now))
            return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return]
        x = x + self.attn(self.norm1(x), now)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]
