"""Head kinds inside timm's attention modules, without rewriting those modules.

A module keeps its class's own ``forward``; only its one call of ``scaled_dot_product_attention`` is answered by
``mix_heads``. So projections, QK-norm, rotary embeddings, gates, dropout and state-dict keys stay timm's, whatever the
version.
"""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lapbench.errors import UserError
from lapbench.heads.kinds import ATTENTION
from lapbench.heads.mixing import mix_heads
from lapbench.heads.schedule import Layer


class _AnswerAttention(TorchFunctionMode):
    """Inside this context, ``scaled_dot_product_attention`` computes the given kinds."""

    def __init__(self, kinds: Layer, learned: Tensor | None) -> None:
        super().__init__()
        self.kinds = kinds
        self.learned = learned
        self.calls = 0

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
            return mix_heads(query, key, value, self.kinds, learned=self.learned, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class MixedHeads(nn.Module):
    """Mixed in before a timm attention class: the heads of that module have the kinds ``kinds``.

    Attributes:
        kinds: One kind for each head.
        head_coefficients: [H_learned, 3], the trainable (a, b, c) of the learned heads, or None without such heads.
    """

    kinds: Layer
    head_coefficients: nn.Parameter | None

    def set_kinds(self, kinds: Layer) -> None:
        """Fixes the kinds and creates the coefficients of the learned ones."""
        self.kinds = kinds
        start = [kind.coefficients for kind in kinds if kind.learned]
        self.head_coefficients = nn.Parameter(torch.tensor(start)) if start else None

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The module's own forward, its attention answered by ``mix_heads``."""
        answer = _AnswerAttention(self.kinds, self.head_coefficients)
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
