"""What measuring token geometry costs: all measures of images, a language model's analysis of variance, spectra."""

import time
from collections.abc import Iterator

from tests.benchmarks.timing import Result, paired_ratio

IMAGES, BATCH, CLASSES = 256, 32, 1000
VOCAB, CONTEXT = 65536, 2048


def results() -> Iterator[Result]:
    """On one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield _images()
        yield _language()
        yield _state()
        yield _spectra()
    finally:
        torch.set_num_threads(threads)


def _images() -> Result:
    """All measures on all layers of ViT-S/16, from the images to the numbers, against the forward pass alone."""
    import lightning.pytorch as pl
    import torch

    from lapbench.backbones import build_backbone
    from lapbench.evaluation.geometry_measures import MEASURES, Chosen, GeometryMeasures
    from lapbench.evaluation.geometry_report import report
    from lapbench.evaluation.processes import Processes

    torch.manual_seed(0)
    task = pl.LightningModule()
    task.backbone = model = build_backbone("vit_small_patch16_224", 3).eval()
    chosen = Chosen(MEASURES, tuple(range(model.num_layers)), "all", "sequence mean", 0.99)
    images, labels = torch.randn(IMAGES, 3, 224, 224), torch.randint(CLASSES, (IMAGES,))

    @torch.inference_mode()
    def forward() -> None:
        for batch in torch.split(images, BATCH):
            model(batch)

    @torch.inference_mode()
    def measure() -> None:
        measures = GeometryMeasures(task, chosen, CLASSES, IMAGES)
        for start in range(0, IMAGES, BATCH):
            rows = slice(start, start + BATCH)
            measures.update(images[rows], labels[rows], start)
        measures.start_mismatch()
        found = report(measures, Processes())
        assert set(found.figures) >= {"anova", "spectrum", "collapse", "sublayers"}, found.left_out

    # One pair: it takes minutes of CPU time, in which noise averages out.
    ratio = paired_ratio(measure, forward, 1, warmup=0, clock=time.process_time)
    detail = f"CPU time, ViT-S/16, 224 px, {IMAGES} images, {model.num_layers} layers, {CLASSES} classes"
    return Result("token geometry, all measures / forward pass", ratio, 1.5, True, detail)


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
