"""A decoder with half Laplacian heads against all-attention and transformers' Llama, and generation with the cache."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tests.benchmarks.timing import Result, paired_ratio

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lapbench.backbones import Decoder

DIM, LAYERS, HEADS, VOCAB, BATCH, CONTEXT, MLP = 256, 6, 4, 4096, 8, 256, 704
# What transformers' Llama computes: as many parameters and operations.
LLAMA: dict[str, Any] = {
    "norm": "rms_weight",
    "mlp": "swiglu",
    "mlp_width": MLP,
    "qk_norm": False,
    "softcap": 0.0,
    "embed_norm": False,
    "init": "normal",
    "head_std": 0.02,
}


def decoder(laplacian_heads: int) -> "Decoder":
    """d 256, 6 layers of 4 heads, vocabulary 4096."""
    import torch

    from lapbench.backbones import build_decoder

    torch.manual_seed(0)
    shape = {"depth": LAYERS, "width": DIM, "num_heads": HEADS, "context": CONTEXT}
    return build_decoder("tiny", laplacian_heads, vocab_size=VOCAB, **shape, **LLAMA)


def llama() -> "nn.Module":
    """transformers' own of that size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=DIM,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=CONTEXT,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def step_of(model: "nn.Module", logits_of: Callable[[Any], "Tensor"]) -> Callable[[], None]:
    """A training step: forward, backward, AdamW."""
    import torch
    from torch.nn import functional as F

    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCAB, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        logits = logits_of(model(tokens[:, :-1]))
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def generated(model: "Decoder", prompts: list[list[int]], count: int) -> list[list[int]]:
    """The likeliest tokens, with the cache."""
    from lapbench.backbones.generation import generate

    return generate(model, prompts, max_new_tokens=count, temperature=0)


def generated_without_cache(model: "Decoder", prompts: list[list[int]], count: int) -> list[list[int]]:
    """The same, each token from a forward pass over all before; prompts of one length."""
    import torch

    tokens = torch.tensor(prompts)
    with torch.inference_mode():
        for _ in range(count):
            last = model.forward_features(tokens)[:, -1]
            tokens = torch.cat([tokens, model.forward_head(last).argmax(dim=-1, keepdim=True)], dim=1)
    return tokens[:, -count:].tolist()


def results() -> Iterator[Result]:
    """Training tokens/s and generation, on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _results()
    finally:
        torch.set_num_threads(threads)


def _results() -> Iterator[Result]:
    half = step_of(decoder(HEADS // 2), lambda out: out)
    rounds = 11
    detail = f"{rounds} pairs, CPU time, d {DIM} x {LAYERS}, vocabulary {VOCAB}, batch {BATCH} x {CONTEXT}"
    ratio = paired_ratio(step_of(decoder(0), lambda out: out), half, rounds, warmup=2, clock=time.process_time)
    yield Result("decoder, half Laplacian / all-attention, training tokens/s", ratio, 0.97, False, detail)
    theirs = llama()
    ours, stock = (sum(p.numel() for p in model.parameters()) for model in (decoder(0), theirs))
    assert ours == stock, f"{ours} parameters against {stock}"
    ratio = paired_ratio(step_of(theirs, lambda out: out.logits), half, rounds, warmup=2, clock=time.process_time)
    yield Result("decoder, half Laplacian / transformers Llama, training tokens/s", ratio, 1.0, False, detail)
    model, prompts = decoder(HEADS // 2), [list(range(96)), list(range(96, 192))]
    assert generated(model, prompts, 16) == generated_without_cache(model, prompts, 16)
    rounds = 2
    ratio = paired_ratio(
        lambda: generated_without_cache(model, prompts, 128), lambda: generated(model, prompts, 128), rounds, warmup=0
    )
    detail = f"{rounds} pairs, 128 tokens after 96, batch {len(prompts)}"
    yield Result("decoder, generation with / without cache, tokens/s", ratio, 4.0, False, detail)
