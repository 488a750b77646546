"""Head kinds inside timm's attention modules, without rewriting those modules.

A module keeps its class's own ``forward``; only the result of its one call of ``scaled_dot_product_attention`` is
mixed. So projections, QK-norm, rotary embeddings, gates, dropout and state-dict keys stay timm's, whatever the version.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lapbench.errors import UserError
from lapbench.heads.kinds import ATTENTION
from lapbench.heads.mixing import combine_heads
from lapbench.heads.recompute import recomputed_in_backward, shares_memory, worth_recomputing
from lapbench.heads.schedule import Layer


class _AnswerAttention(TorchFunctionMode):
    """Inside this context, ``scaled_dot_product_attention`` computes the given kinds."""

    def __init__(self, kinds: Layer, learned: Tensor | None, lean: bool) -> None:
        super().__init__()
        self.kinds = kinds
        self.learned = learned
        self.lean = lean
        self.calls = 0
        self.mixed: Tensor | None = None
        self.remix: Callable[[], Tensor] | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            query, key, value = args  # all else comes by name
            return self._attend(query, key, value, **(kwargs or {}))
        if (
            func is F.linear
            and self.mixed is not None
            and self.remix is not None
            and shares_memory(args[0], self.mixed)
        ):
            with recomputed_in_backward(self.mixed, self.remix):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **others: Any,
    ) -> Tensor:
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **others)
        mix = partial(combine_heads, kinds=self.kinds, learned=self.learned, attn_mask=attn_mask, is_causal=is_causal)
        mixed = mix(attended, value)
        if self.lean and worth_recomputing(mixed):
            # Autograd keeps P V for the attention's gradient; it would keep the mixture too, for the projection's.
            self.mixed = mixed
            self.remix = partial(mix, attended.detach(), value.detach())
        return mixed


class MixedHeads(nn.Module):
    """Mixed in before a timm attention class: the heads of that module have the kinds ``kinds``.

    Attributes:
        kinds: One kind for each head.
        head_coefficients: [H_learned, 3], the trainable (a, b, c) of the learned heads, or None without such heads.
        lean: Whether the backward pass recomputes a large mixture instead of keeping it. Off under gradient
            checkpointing, which keeps nothing anyway.
    """

    kinds: Layer
    head_coefficients: nn.Parameter | None
    lean: bool = True

    def set_kinds(self, kinds: Layer) -> None:
        """Fixes the kinds and creates the coefficients of the learned ones."""
        self.kinds = kinds
        start = [kind.coefficients for kind in kinds if kind.learned]
        self.head_coefficients = nn.Parameter(torch.tensor(start)) if start else None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's own forward, its attention mixed."""
        answer = _AnswerAttention(self.kinds, self.head_coefficients, self.lean)
        with answer:
            out: Tensor = super().forward(*args, **kwargs)
        if answer.calls != 1:
            raise RuntimeError(
                f"{type(self).__name__}: expected one call of scaled_dot_product_attention, saw {answer.calls}; "
                "this timm version computes attention in another way"
            )
        return out


class MixedAttention(MixedHeads, Attention):
    """``timm.layers.Attention`` (ViT, DeiT-III, DINOv2) with mixed heads."""


class MixedAttentionRope(MixedHeads, AttentionRope):
    """``timm.layers.AttentionRope`` (EVA and DINOv3 families with ``attn_type='rope'``) with mixed heads."""


class MixedEvaAttention(MixedHeads, EvaAttention):
    """``timm.models.eva.EvaAttention`` (EVA, DINOv3) with mixed heads."""


MIXED: dict[type[nn.Module], type[MixedHeads]] = {
    Attention: MixedAttention,
    AttentionRope: MixedAttentionRope,
    EvaAttention: MixedEvaAttention,
}


def attention_of(block: nn.Module, where: str) -> nn.Module:
    """The attention module of a transformer block.

    Raises:
        UserError: The block has none, or one of a type that cannot have mixed heads.
    """
    attention = getattr(block, "attn", None)
    if type(attention) in MIXED or isinstance(attention, MixedHeads):
        assert isinstance(attention, nn.Module)
        return attention
    got = type(block).__name__ if attention is None else type(attention).__name__
    raise UserError(f"{where}: expected attention of type {', '.join(t.__name__ for t in MIXED)}, got {got}")


def set_head_kinds(attention: nn.Module, kinds: Layer) -> None:
    """Gives a timm attention module its head kinds, in place. A module with attention heads only stays stock timm."""
    if all(kind == ATTENTION for kind in kinds):
        return
    attention.__class__ = MIXED[type(attention)]
    assert isinstance(attention, MixedHeads)
    # timm computes P explicitly when TIMM_FUSED_ATTN=0; mixed heads never do.
    attention.fused_attn = True  # type: ignore[assignment]
    attention.set_kinds(kinds)
