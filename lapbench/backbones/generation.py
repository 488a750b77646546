"""Sampling text from a decoder, many prompts at a time."""

import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lapbench.backbones.cache import KVCache
from lapbench.backbones.decoder import Decoder
from lapbench.errors import UserError


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    stop_tokens: Collection[int] = (),
    seeds: Sequence[int] | None = None,
    done: Callable[[int, Sequence[int]], bool] | None = None,
) -> list[list[int]]:
    """Continues each prompt until a stop token, ``max_new_tokens`` or the end of the model's context.

    Each row draws from a generator of its own, so that what it says depends on its prompt and seed, not on its
    neighbours (but for the last bits of matrix products, which depend on the size of the batch).

    Args:
        model: The decoder.
        prompts: Token numbers of each prompt, of any lengths from 1 to ``model.context`` - 1.
        max_new_tokens: Most new tokens of a row.
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Draws from the k likeliest tokens only.
        stop_tokens: Tokens that end a row.
        seeds: One seed for each prompt; by default drawn from torch's generator.
        done: Asked after each token with the prompt's number and its new tokens so far; true ends the row.

    Returns:
        The new tokens of each prompt, without the stop token.

    Raises:
        UserError: A prompt that is empty, too long or has tokens that the model has not, settings out of range, or
            logits that are not finite.
    """
    _check_prompts(model, prompts)
    _check_settings(max_new_tokens, temperature, top_k, seeds, len(prompts))
    device = model.embedding.weight.device
    limits = [min(max_new_tokens, model.context - len(prompt)) for prompt in prompts]
    most = max(limits, default=0)
    out: list[list[int]] = [[] for _ in prompts]
    if most == 0:
        return out
    tokens, padding = _left_padded(prompts, device)
    cache = KVCache(model, len(prompts), tokens.size(1) + most - 1, padding=padding)
    draws = _draws(seeds, len(prompts), most).to(device)
    rows = list(range(len(prompts)))  # the prompts that go on
    for step in range(most):
        features = model.forward_features(tokens, cache=cache)
        chosen = _sample(model.forward_head(features[:, -1]).float(), temperature, top_k, draws[:, step])
        kept = []
        for i, (row, token) in enumerate(zip(rows, chosen.tolist(), strict=True)):
            if token not in stop_tokens:
                out[row].append(token)
                if len(out[row]) < limits[row] and not (done is not None and done(row, out[row])):
                    kept.append(i)
        if not kept:
            break
        if len(kept) < len(rows):
            index = torch.tensor(kept, device=device)
            cache.select(index)
            chosen, draws, rows = chosen[index], draws[index], [rows[i] for i in kept]
        tokens = chosen[:, None]
    return out


def _check_prompts(model: Decoder, prompts: Sequence[Sequence[int]]) -> None:
    for i, prompt in enumerate(prompts):
        if not 1 <= len(prompt) < model.context:
            raise UserError(
                f"prompt {i}: expected 1 to {model.context - 1} tokens (the model's context is {model.context}), "
                f"got {len(prompt)}"
            )
        if not 0 <= min(prompt) <= max(prompt) < model.vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < model.vocab_size)
            raise UserError(f"prompt {i}: expected tokens in 0..{model.vocab_size - 1}, got {wrong}")


def _check_settings(
    max_new_tokens: int, temperature: float, top_k: int | None, seeds: Sequence[int] | None, prompts: int
) -> None:
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens: expected at least 0, got {max_new_tokens}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature: expected a finite number of at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise UserError(f"top_k: expected at least 1, got {top_k}")
    if seeds is not None and len(seeds) != prompts:
        raise UserError(f"seeds: expected one for each of {prompts} prompts, got {len(seeds)}")


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The prompts as one tensor [B, T], and the number of padding tokens before each, [B], or None for none."""
    longest = max(map(len, prompts))
    missing = [longest - len(prompt) for prompt in prompts]
    tokens = torch.tensor([[0] * n + list(prompt) for n, prompt in zip(missing, prompts, strict=True)], device=device)
    return tokens, torch.tensor(missing, device=device) if any(missing) else None


def _draws(seeds: Sequence[int] | None, rows: int, count: int) -> Tensor:
    """``count`` uniform numbers in [0, 1) for each row; those of a seed are the same whatever the count."""
    if seeds is None:
        seeds = torch.randint(2**62, (rows,)).tolist()
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([torch.rand(count, generator=g, dtype=torch.float64) for g in generators])


def _sample(logits: Tensor, temperature: float, top_k: int | None, draws: Tensor) -> Tensor:
    """One token for each row [B], by inversion of the cumulative distribution at ``draws`` [B].

    Args:
        logits: [B, V].
        temperature: As for ``generate``.
        top_k: As for ``generate``.
        draws: Uniform numbers in [0, 1).
    """
    if not bool(logits.isfinite().all()):
        raise UserError("generate: the model's logits are not finite; its weights are damaged or its training diverged")
    if temperature == 0:
        return logits.argmax(dim=-1)
    candidates = None
    if top_k is not None and top_k < logits.size(-1):
        logits, candidates = logits.topk(top_k, dim=-1)
    # Shifted first, so that a temperature near 0 does not divide to infinity.
    shifted = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature
    cumulative = F.softmax(shifted, dim=-1).cumsum(dim=-1)
    total = cumulative[:, -1:]
    # Below the total, so that a token of probability 0 is never the answer.
    points = (draws[:, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, points, right=True)
    return (index if candidates is None else candidates.gather(-1, index)).squeeze(-1)
