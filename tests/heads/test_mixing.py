"""Mixing against a naive rewrite that builds P and C, and the identities of the family M = a I + b P + c C."""

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lapbench.heads import HeadKind
from lapbench.heads.mixing import combine_heads, mix_heads, needs_average, uniform_average

B, H, T, D = 2, 6, 7, 5
ALL_KINDS = ("attention", "laplacian", "deescalated(1)", "shaped", "highpass(0.5)", "learned(laplacian)")
SCHEDULES = [
    *((spec,) * H for spec in ALL_KINDS),
    ("deescalated(-0.3)",) * H,
    ("highpass(0)",) * H,
    ALL_KINDS,
    ("laplacian", "attention", "laplacian", "learned(shaped)", "shaped", "learned(shaped)"),
    ("learned(attention)", "learned(shaped)", "attention", "laplacian", "laplacian", "learned(deescalated(2))"),
]
MASKS = ("none", "causal", "padding", "general", "by head", "by query", "matrix", "additive", "additive by head")


def kinds_of(specs: Sequence[str]) -> list[HeadKind]:
    return [HeadKind.parse(spec) for spec in specs]


def tensors(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the layout that a fused projection gives: slices of [B, T, 3, H, d]."""
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(B, T, 3, H, D, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def mask_of(name: str) -> tuple[Tensor | None, bool, Tensor, Tensor]:
    """(attn_mask, is_causal) for the function; (allowed, bias), [B, H, T, T], for the naive one."""
    generator = torch.Generator().manual_seed(1)
    yes, zero = torch.ones(B, H, T, T, dtype=torch.bool), torch.zeros(B, H, T, T, dtype=torch.float64)
    if name == "none":
        return None, False, yes, zero
    if name == "causal":
        return None, True, yes.tril(), zero
    if name == "padding":
        keys = torch.arange(T) < torch.tensor([T, 3])[:, None]
        return keys[:, None, None, :], False, keys[:, None, None, :].expand(B, H, T, T), zero
    if name == "by query":  # broadcast over the keys: all of them, or none
        queries = torch.ones(B, 1, T, 1, dtype=torch.bool)
        return queries, False, yes, zero
    shape = {"general": (B, 1, T, T), "additive": (B, 1, T, T), "matrix": (T, T)}.get(name, (B, H, T, T))
    allowed = torch.rand(shape, generator=generator) < 0.6
    allowed |= torch.eye(T, dtype=torch.bool)
    if not name.startswith("additive"):
        return allowed, False, allowed.expand(B, H, T, T), zero
    bias = torch.randn(shape, generator=generator, dtype=torch.float64)
    return bias.masked_fill(~allowed, -math.inf), False, allowed.expand(B, H, T, T), bias.expand(B, H, T, T)


def coefficients_of(kinds: Sequence[HeadKind], learned: Tensor | None) -> Tensor:
    """[H, 3], the learned rows put in place."""
    rows, next_learned = [], 0
    for kind in kinds:
        if kind.learned:
            assert learned is not None
            rows.append(learned[next_learned])
            next_learned += 1
        else:
            rows.append(torch.tensor(kind.coefficients, dtype=torch.float64))
    return torch.stack(rows)


def naive(q: Tensor, k: Tensor, v: Tensor, coefficients: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1)) + bias
    attention = scores.masked_fill(~allowed, -math.inf).softmax(dim=-1)
    average = allowed.double() / allowed.sum(dim=-1, keepdim=True)
    a, b, c = coefficients.T[:, :, None, None]
    out: Tensor = (a * torch.eye(v.size(-2), dtype=v.dtype) + b * attention + c * average) @ v
    return out


def learned_of(kinds: Sequence[HeadKind]) -> Tensor | None:
    """The start of the learned heads, moved away from it: it is the current value that counts."""
    start = [kind.coefficients for kind in kinds if kind.learned]
    if not start:
        return None
    table = torch.tensor(start, dtype=torch.float64)
    return table + 0.1 * torch.arange(table.numel(), dtype=torch.float64).view_as(table)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("specs", SCHEDULES, ids=lambda specs: "-".join(HeadKind.parse(s).code for s in specs))
def test_output_and_gradients_equal_the_naive_rewrite(specs: Sequence[str], mask: str) -> None:
    kinds = kinds_of(specs)
    attn_mask, is_causal, allowed, bias = mask_of(mask)
    direction = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for which in ("fast", "naive"):
        leaves = [t.clone().requires_grad_() for t in tensors()]
        learned = learned_of(kinds)
        if learned is not None:
            leaves.append(learned.requires_grad_())
        q, k, v = leaves[:3]
        if which == "fast":
            out = mix_heads(q, k, v, kinds, learned=learned, attn_mask=attn_mask, is_causal=is_causal)
        else:
            out = naive(q, k, v, coefficients_of(kinds, learned), allowed, bias)
        # Without P in it, an output does not depend on q and k.
        grads = torch.autograd.grad((out * direction).sum(), leaves, allow_unused=True)
        results.append([out, *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))])
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-10)


def test_gradcheck_of_learned_coefficients() -> None:
    kinds = kinds_of(("learned(laplacian)", "attention", "learned(shaped)"))
    inputs = [torch.randn(1, 3, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    learned = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def run(q: Tensor, k: Tensor, v: Tensor, learned: Tensor) -> Tensor:
        return mix_heads(q, k, v, kinds, learned=learned, is_causal=True)

    assert torch.autograd.gradcheck(run, (*inputs, learned))


@pytest.mark.parametrize("mask", MASKS)
def test_constant_values_are_scaled_by_the_sum_of_the_coefficients(mask: str) -> None:
    """M 1 = (a + b + c) 1, so Laplacian heads send a constant to 0."""
    kinds = kinds_of(ALL_KINDS)
    learned = learned_of(kinds)
    attn_mask, is_causal, _, _ = mask_of(mask)
    q, k, _ = tensors()
    row = torch.randn(B, H, 1, D, dtype=torch.float64)
    out = mix_heads(q, k, row.expand(B, H, T, D), kinds, learned=learned, attn_mask=attn_mask, is_causal=is_causal)
    sums = coefficients_of(kinds, learned).sum(dim=1)
    torch.testing.assert_close(out, (sums[:, None, None] * row).expand_as(out), rtol=0, atol=1e-12)
    assert out[:, 1].abs().max() < 1e-12  # laplacian
    assert out[:, 2].abs().max() < 1e-12  # deescalated(1)


@pytest.mark.parametrize("prefix", [1, 3, 6])
def test_causal_kinds_never_see_the_future(prefix: int) -> None:
    kinds = kinds_of(ALL_KINDS)
    q, k, v = (t.clone() for t in tensors())
    before = mix_heads(q, k, v, kinds, learned=learned_of(kinds), is_causal=True)
    for t in (q, k, v):
        t[:, :, prefix:] = torch.randn(B, H, T - prefix, D, dtype=torch.float64) * 1e6
    after = mix_heads(q, k, v, kinds, learned=learned_of(kinds), is_causal=True)
    assert torch.equal(before[:, :, :prefix], after[:, :, :prefix])
    assert not torch.equal(before, after)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_kind_is_the_fused_kernel_bit_for_bit(mask: str, dtype: torch.dtype) -> None:
    attn_mask, is_causal, _, _ = mask_of(mask)
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(dtype)
    q, k, v = tensors(dtype=dtype)
    stock = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal)
    assert torch.equal(mix_heads(q, k, v, kinds_of(["attention"] * H), attn_mask=attn_mask, is_causal=is_causal), stock)
    mixed = mix_heads(q, k, v, kinds_of(["attention"] * 4 + ["shaped"] * 2), attn_mask=attn_mask, is_causal=is_causal)
    assert torch.equal(mixed[:, :4], stock[:, :4])


def test_padded_tokens_do_not_reach_the_others() -> None:
    attn_mask, _, _, _ = mask_of("padding")
    kinds = kinds_of(ALL_KINDS)
    q, k, v = (t.clone() for t in tensors())
    before = mix_heads(q, k, v, kinds, learned=learned_of(kinds), attn_mask=attn_mask)
    for t in (q, k, v):
        t[1, :, 3:] = 1e6
    after = mix_heads(q, k, v, kinds, learned=learned_of(kinds), attn_mask=attn_mask)
    assert torch.equal(before[1, :, :3], after[1, :, :3])


def test_a_query_that_may_see_nothing_averages_nothing() -> None:
    _, _, v = tensors()
    allowed = torch.ones(T, T, dtype=torch.bool)
    allowed[2] = False
    average = uniform_average(v, attn_mask=allowed)
    assert torch.equal(average[:, :, 2], torch.zeros(B, H, D, dtype=torch.float64))
    assert average.isfinite().all()
    out = mix_heads(*tensors(), kinds_of(["shaped"] * H), attn_mask=allowed)
    torch.testing.assert_close(out[:, :, 2], v[:, :, 2])  # V + 0 - 0


def test_uniform_average_costs_no_row_for_each_query_without_a_mask() -> None:
    _, _, v = tensors()
    padding, _, _, _ = mask_of("padding")
    assert uniform_average(v).shape == (B, H, 1, D)
    assert uniform_average(v, attn_mask=padding).shape == (B, H, 1, D)
    assert uniform_average(v, is_causal=True).shape == (B, H, T, D)


def test_sums_of_half_precision_values_are_exact_enough() -> None:
    """A running bfloat16 sum of 4096 ones would stop at 256."""
    ones = torch.ones(1, 1, 4096, 1, dtype=torch.bfloat16)
    for mask, is_causal in ((None, False), (None, True), (torch.ones(1, 4096, dtype=torch.bool), False)):
        assert torch.equal(uniform_average(ones, attn_mask=mask, is_causal=is_causal).expand_as(ones), ones)


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("specs", SCHEDULES, ids=lambda specs: "-".join(HeadKind.parse(s).code for s in specs))
def test_bfloat16_is_close(specs: Sequence[str], mask: str) -> None:
    kinds = kinds_of(specs)
    attn_mask, is_causal, allowed, bias = mask_of(mask)
    q, k, v = tensors(dtype=torch.bfloat16)
    learned = learned_of(kinds)
    out = mix_heads(q, k, v, kinds, learned=learned, attn_mask=attn_mask, is_causal=is_causal)
    assert out.dtype == torch.bfloat16
    exact = naive(q.double(), k.double(), v.double(), coefficients_of(kinds, learned), allowed, bias)
    torch.testing.assert_close(out.double(), exact, rtol=0.03, atol=0.06)


@pytest.mark.parametrize("contiguous", [False, True], ids=["fused projection", "contiguous"])
@pytest.mark.parametrize("specs", [s for s in SCHEDULES if set(s) != {"attention"}], ids=str)
def test_merging_heads_is_a_view(specs: Sequence[str], contiguous: bool) -> None:
    kinds = kinds_of(specs)
    q, k, v = (t.contiguous() if contiguous else t for t in tensors(dtype=torch.float32))
    learned = learned_of(kinds)
    out = mix_heads(q, k, v, kinds, learned=None if learned is None else learned.float())
    merged = out.transpose(1, 2).reshape(B, T, H * D)
    assert merged.data_ptr() == out.data_ptr()
    assert out.transpose(1, 2).is_contiguous()


def test_dropout_acts_on_attention_only() -> None:
    torch.manual_seed(0)
    q, k, v = tensors()
    kept = mix_heads(q, k, v, kinds_of(["laplacian"] * H), dropout_p=1.0 - 1e-12)
    torch.testing.assert_close(kept, v)  # P dropped altogether: V - 0


def test_scale_is_passed_on() -> None:
    q, k, v = tensors()
    flat = mix_heads(q, k, v, kinds_of(["laplacian"] * H), scale=0.0)  # uniform attention
    torch.testing.assert_close(flat, v - v.mean(dim=-2, keepdim=True))


def test_learned_heads_without_coefficients_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="learned kinds need their coefficients"):
        mix_heads(*tensors(), kinds_of(["learned(shaped)"] * H))


@pytest.mark.parametrize("specs", SCHEDULES, ids=lambda specs: "-".join(HeadKind.parse(s).code for s in specs))
def test_a_known_average_is_taken_as_it_is(specs: Sequence[str]) -> None:
    kinds = kinds_of(specs)
    q, k, v = tensors()
    average = torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    attended = F.scaled_dot_product_attention(q, k, v)
    learned = learned_of(kinds)
    out = combine_heads(attended, v, kinds, learned=learned, is_causal=True, average=average)
    a, b, c = coefficients_of(kinds, learned).T[:, :, None, None]
    torch.testing.assert_close(out, a * v + b * attended + c * average, rtol=0, atol=1e-12)
    assert needs_average(kinds) == (
        not torch.equal(out, combine_heads(attended, v, kinds, average=2 * average, learned=learned))
    )


def test_vmap_with_and_without_gradients() -> None:
    kinds = kinds_of(["attention", "laplacian", "laplacian"])
    attended, value = torch.randn(2, 4, 2, 3, 5, 8, dtype=torch.float64)
    mix = partial(combine_heads, kinds=kinds)
    expected = torch.stack([mix(a, v) for a, v in zip(attended, value, strict=True)])
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert torch.equal(torch.vmap(mix)(attended, value), expected)


@pytest.mark.parametrize("specs", SCHEDULES, ids=lambda specs: "-".join(HeadKind.parse(s).code for s in specs))
def test_inference_mode_changes_nothing(specs: Sequence[str]) -> None:
    kinds = kinds_of(specs)
    plain = mix_heads(*tensors(), kinds, learned=learned_of(kinds), is_causal=True)
    with torch.inference_mode():
        inferred = mix_heads(*tensors(), kinds, learned=learned_of(kinds), is_causal=True)
    assert torch.equal(plain, inferred)
    assert plain.stride() == inferred.stride()
