"""Cached logits against those of the whole sequence at once."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lapbench.backbones import Decoder, build_decoder
from lapbench.backbones.cache import KVCache

KINDS = ["attention", "laplacian", "deescalated(0.5)", "shaped", "highpass(0.5)", "learned(laplacian)"]
HEADS = [*({kind: 4} for kind in KINDS), [["attention", "laplacian", "shaped", "learned(shaped)"], 2]]
T = 24


def model_of(heads: Any, num_kv_heads: int, **settings: Any) -> Decoder:
    torch.manual_seed(0)
    model = build_decoder(
        "tiny",
        heads,
        vocab_size=61,
        depth=2,
        width=32,
        context=32,
        num_kv_heads=num_kv_heads,
        **{"init": "normal", "init_std": 0.2, "head_std": 0.2, **settings},
    )
    for block in model.blocks:
        if block.attn.head_coefficients is not None:
            block.attn.head_coefficients.data += 0.1 * torch.randn_like(block.attn.head_coefficients)
    return model.eval()


def tokens_of(batch: int) -> Tensor:
    return torch.randint(61, (batch, T), generator=torch.Generator().manual_seed(1))


def cached(model: Decoder, tokens: Tensor, chunks: Sequence[int], padding: Tensor | None) -> Tensor:
    cache = KVCache(model, len(tokens), tokens.size(1), padding=padding)
    parts, lengths = [], []
    for part in tokens.split(list(chunks), dim=1):
        parts.append(model(part, cache=cache))
        lengths.append(cache.length)
    assert lengths == [sum(chunks[: i + 1]) for i in range(len(chunks))]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("padded", [False, True], ids=["full", "left padded"])
@pytest.mark.parametrize("chunks", [[T], [10] + [1] * 14, [3, 1, 8, 1, 11], [1] * T], ids=str)
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@torch.no_grad()
def test_cached_logits_equal_uncached_ones(heads: Any, num_kv_heads: int, chunks: list[int], padded: bool) -> None:
    model, tokens = model_of(heads, num_kv_heads), tokens_of(3)
    missing = [5, 0, 12] if padded else [0, 0, 0]
    logits = cached(model, tokens, chunks, torch.tensor(missing) if padded else None)
    for row, n in enumerate(missing):
        # Each sequence alone and without padding.
        torch.testing.assert_close(logits[row, n:], model(tokens[row : row + 1, n:])[0], rtol=0, atol=1e-5)
    assert logits.isfinite().all()


@pytest.mark.parametrize("settings", [{"positions": "learned"}, {"norm_position": "post", "norm": "layer"}], ids=str)
@torch.no_grad()
def test_other_architectures(settings: dict[str, Any]) -> None:
    model, tokens = model_of({"shaped": 2}, 2, **settings), tokens_of(2)
    logits = cached(model, tokens, [7, 1, 16], torch.tensor([0, 3]))
    for row, n in enumerate((0, 3)):
        torch.testing.assert_close(logits[row, n:], model(tokens[row : row + 1, n:])[0], rtol=0, atol=1e-5)


@torch.no_grad()
def test_selected_rows_go_on() -> None:
    model, tokens = model_of(HEADS[-1], 2), tokens_of(3)
    cache = KVCache(model, 3, T, padding=torch.tensor([0, 6, 4]))
    model(tokens[:, :20], cache=cache)
    cache.select(torch.tensor([2, 1]))
    assert cache.least_padding == 4
    logits = model(tokens[[2, 1], 20:], cache=cache)
    for i, (row, n) in enumerate([(2, 4), (1, 6)]):
        torch.testing.assert_close(logits[i], model(tokens[row : row + 1, n:])[0, 20 - n :], rtol=0, atol=1e-5)


@torch.no_grad()
def test_running_sums_are_float32_in_half_precision() -> None:
    """A bfloat16 sum of ones would stop at 256; the mean of the values is exact."""
    model = build_decoder("tiny", {"deescalated(1)": 4}, vocab_size=8, depth=1, width=32, context=1024).bfloat16()
    cache = KVCache(model, 1, 1024)
    ones = torch.ones(1, 4, 1000, 8, dtype=torch.bfloat16)
    sums = cache.add_to_sums(0, ones.float().cumsum(dim=-2))
    assert (sums.dtype, sums[0, 0, -1, 0].item()) == (torch.float32, 1000)
    assert cache.add_to_sums(0, ones[:, :, :1].float())[0, 0, -1, 0] == 1001


@torch.no_grad()
def test_under_autocast_the_cache_is_in_its_type() -> None:
    model, tokens = model_of(HEADS[-1], 2), tokens_of(2)
    with torch.autocast("cpu", torch.bfloat16):
        cache = KVCache(model, 2, T)
        logits = torch.cat([model(part, cache=cache) for part in tokens.split([20, 1, 3], dim=1)], dim=1)
    assert cache.append(0, *(torch.zeros(2, 2, 0, 8) for _ in "kv"))[0].dtype == torch.bfloat16
    torch.testing.assert_close(logits, model(tokens), rtol=0.1, atol=0.3)


def test_mistakes_in_code() -> None:
    model, tokens = model_of(0, 4), tokens_of(2)
    with pytest.raises(ValueError, match="cache: it has room for 20 tokens, got 24"):
        model(tokens, cache=KVCache(model, 2, 20))
    with pytest.raises(ValueError, match="padding: with a cache"):
        model(tokens, cache=KVCache(model, 2, T), padding=torch.tensor([0, 1]))
