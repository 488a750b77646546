"""What measuring token geometry costs: analysis of variance of a language model's tokens, and spectra."""

import time
from collections.abc import Iterator

from tests.benchmarks.timing import Result, paired_ratio

VOCAB, CONTEXT = 65536, 2048


def results() -> Iterator[Result]:
    """On one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield _language()
        yield _state()
        yield _spectra()
    finally:
        torch.set_num_threads(threads)


def _language() -> Result:
    """Two-level analysis of the last layer's tokens against the forward pass that makes them."""
    import torch

    from lapbench.analysis.anova import TokenANOVA
    from lapbench.backbones import build_decoder

    torch.manual_seed(0)
    model = build_decoder("d8", vocab_size=VOCAB).eval()
    # Targets are half frequent words, half rare ones: nearly as many classes as tokens.
    frequent, rare = torch.randint(100, (1, CONTEXT + 1)), torch.randint(VOCAB, (1, CONTEXT + 1))
    text = torch.where(torch.rand(1, CONTEXT + 1) < 0.5, frequent, rare)

    @torch.inference_mode()
    def forward() -> torch.Tensor:
        features: torch.Tensor = model.forward_features(text[:, :-1])
        model.forward_head(features)
        return features

    tokens = forward()
    metric = TokenANOVA(VOCAB, tokens.size(-1))
    rounds = 3
    ratio = paired_ratio(lambda: metric.update(tokens, text[:, 1:]), forward, rounds, clock=time.process_time)
    detail = f"{rounds} pairs, CPU time, {VOCAB} classes, {CONTEXT} tokens, width {tokens.size(-1)}"
    return Result("language ANOVA, update / forward pass of d8", ratio, 0.1, True, detail)


def _state() -> Result:
    """All that a metric holds, in gigabytes."""
    import torch
    from torch.utils._pytree import tree_leaves

    from lapbench.analysis.anova import TokenANOVA

    metric = TokenANOVA(VOCAB, 1280)
    metric.update(torch.randn(1, 64, 1280), torch.randint(VOCAB, (1, 64)))
    held = [value for value in tree_leaves(vars(metric)) if isinstance(value, torch.Tensor)]
    gigabytes = sum({value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in held}.values()) / 1e9
    return Result("language ANOVA, state, GB", gigabytes, 1.0, True, f"{VOCAB} classes, width 1280")


def _spectra() -> Result:
    """Of sequences shorter than they are wide, through T x T against D x D."""
    import torch

    from lapbench.analysis.spectrum import TokenSpectrum

    length, width, batch, rounds = 64, 768, 4, 5
    tokens = torch.randn(batch, length, width)
    metric = TokenSpectrum(min(length, width))

    def wide() -> torch.Tensor:
        centred = tokens.double() - tokens.double().mean(dim=1, keepdim=True)
        return torch.linalg.eigvalsh(centred.mT @ centred)

    ratio = paired_ratio(wide, lambda: metric.update(tokens), rounds, clock=time.process_time)
    detail = f"{rounds} pairs, CPU time, T {length}, D {width}, batch {batch}"
    return Result("spectra, through D x D / the smaller Gram matrix", ratio, 5.0, False, detail)
