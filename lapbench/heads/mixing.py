"""The one function that every backbone mixes its heads with: a V + b P V + c C V."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lapbench.heads.blend import blend
from lapbench.heads.kinds import ATTENTION, HeadKind


def mix_heads(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kinds: Sequence[HeadKind],
    *,
    learned: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention whose heads output (a I + b P + c C) V (arXiv 2602.09297, eq. 3, and the kinds of ``heads.kinds``).

    P comes from the fused ``scaled_dot_product_attention`` and is never materialised. Terms whose coefficient is 0
    are not computed; with attention heads only, this is ``scaled_dot_product_attention`` itself.

    Args:
        query: [B, H, T, d_h].
        key: [B, H, T, d_h].
        value: [B, H, T, d_h].
        kinds: H kinds, one for each head.
        learned: [H_learned, 3], the current (a, b, c) of the learned heads in order.
        attn_mask: As ``scaled_dot_product_attention`` takes it: boolean (True is allowed) or additive.
        is_causal: Position i sees 0..i only, in P and in C.
        dropout_p: Dropout on P.
        scale: Scale of the scores; 1/sqrt(d_h) by default.

    Returns:
        [B, H, T, d_h]. With mixed heads, in the memory layout of [B, T, H, d_h], so that merging heads is a view.
    """
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )
    return combine_heads(out, value, kinds, learned=learned, attn_mask=attn_mask, is_causal=is_causal)


def combine_heads(
    attended: Tensor,
    value: Tensor,
    kinds: Sequence[HeadKind],
    *,
    learned: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    average: Tensor | None = None,
) -> Tensor:
    """The second half of ``mix_heads``: a V + b P V + c C V from P V.

    Args:
        attended: P V, [B, H, T, d_h].
        value: V, [B, H, T, d_h].
        kinds: As for ``mix_heads``, like the other arguments and the result.
        average: C V, [B, H, T, d_h], where the caller knows it (see ``needs_average``); else it comes from the mask.
    """
    groups = _group(kinds)
    if all(kind == ATTENTION for kind, _ in groups):
        return attended
    sizes = [n for _, n in groups]
    if not needs_average(kinds):
        return blend(attended, value, [(kind.a, kind.b, n) for kind, n in groups])
    # Splits rather than slices: their gradient is one concatenation, not a zero-filled copy for each group.
    # Work on [B, T, H, d_h], the layout in which the fused kernels write, so that the result needs no transposing copy.
    attended_parts = torch.split(attended.transpose(1, 2), sizes, dim=2)
    value_parts = torch.split(value.transpose(1, 2), sizes, dim=2)
    average_parts = [None] * len(sizes) if average is None else torch.split(average.transpose(1, 2), sizes, dim=2)
    mixed = []
    next_head = next_learned = 0
    parts = zip(groups, attended_parts, value_parts, average_parts, strict=True)
    for (kind, n), attended_BTHd, value_BTHd, average_BTHd in parts:
        a: float | Tensor
        b: float | Tensor
        c: float | Tensor
        a, b, c = kind.coefficients
        if kind.learned:
            if learned is None:
                raise ValueError("learned kinds need their coefficients: pass `learned`, [H_learned, 3]")
            rows = learned[next_learned : next_learned + n].to(value.dtype)
            a, b, c = rows.T[:, :, None]
            next_learned += n
        if average_BTHd is None and not _is(c, 0.0):
            mask = _of_heads(attn_mask, next_head, n)
            mean = uniform_average(value_BTHd.transpose(1, 2), attn_mask=mask, is_causal=is_causal)
            average_BTHd = mean.transpose(1, 2)
        next_head += n
        mixed.append(_combine(a, b, c, value_BTHd, attended_BTHd, average_BTHd))
    merged = torch.cat(mixed, dim=2) if len(mixed) > 1 else mixed[0].contiguous()
    return merged.transpose(1, 2)


def needs_average(kinds: Sequence[HeadKind]) -> bool:
    """Whether ``combine_heads`` needs C V for these kinds."""
    return any(kind.learned or kind.c for kind in kinds)


def _group(kinds: Sequence[HeadKind]) -> list[tuple[HeadKind, int]]:
    """Runs of equal kinds: (kind, number of heads)."""
    groups: list[tuple[HeadKind, int]] = []
    for kind in kinds:
        if groups and groups[-1][0] == kind:
            groups[-1] = (kind, groups[-1][1] + 1)
        else:
            groups.append((kind, 1))
    return groups


def _of_heads(attn_mask: Tensor | None, start: int, n: int) -> Tensor | None:
    """The part of a mask that concerns ``n`` heads; a mask for all heads alike is returned as it is."""
    if attn_mask is None or attn_mask.ndim < 3 or attn_mask.size(-3) == 1:
        return attn_mask
    return attn_mask.narrow(-3, start, n)


def _combine(
    a: float | Tensor,
    b: float | Tensor,
    c: float | Tensor,
    value_BTHd: Tensor,
    attended_BTHd: Tensor,
    average_BTHd: Tensor | None,
) -> Tensor:
    terms = []
    if not _is(b, 0.0):
        terms.append(attended_BTHd if _is(b, 1.0) else b * attended_BTHd)
    if not _is(a, 0.0):
        terms.append(value_BTHd if _is(a, 1.0) else a * value_BTHd)
    if not _is(c, 0.0):
        assert average_BTHd is not None
        terms.append(c * average_BTHd)
    total = terms[0] if terms else torch.zeros_like(value_BTHd)
    for term in terms[1:]:
        total = total + term
    return total.expand_as(value_BTHd)


def _is(coefficient: float | Tensor, number: float) -> bool:
    return not isinstance(coefficient, Tensor) and coefficient == number


def uniform_average(value: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """C V: the mean of the values over the positions that the mask allows each query to see.

    O(T d) without a mask, for causal masks and for masks that are the same for every query (padding); O(T^2 d) for a
    general mask. Sums run in float32 at least.

    Args:
        value: [B, H, T, d_h].
        attn_mask: Boolean (True is allowed) or additive (-inf is not), broadcastable to [B, H, T, T].
        is_causal: Query i averages 0..i.

    Returns:
        [B, H, T, d_h], or [B, H, 1, d_h] where every query sees the same positions; 0 where none is allowed.
    """
    dtype = value.dtype if value.dtype == torch.float64 else torch.float32
    wide = value.to(dtype)
    if is_causal:
        length = value.size(-2)
        counts = torch.arange(1, length + 1, device=value.device, dtype=dtype)
        return (wide.cumsum(dim=-2) / counts[:, None]).to(value.dtype)
    if attn_mask is None:
        return wide.mean(dim=-2, keepdim=True).to(value.dtype)
    allowed = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf
    weights = allowed.expand(*allowed.shape[:-1], value.size(-2)).to(dtype)
    counts = weights.sum(dim=-1, keepdim=True).clamp(min=1)
    return ((weights @ wide) / counts).to(value.dtype)
