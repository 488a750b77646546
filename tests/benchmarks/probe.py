"""A linear probe's grid of 52 heads against one of them, on the same features: time of a training step."""

import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.timing import Result, paired_ratio

CLASSES, BATCH, PIXELS = 1000, 32, 224


def steps(features: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of dinov2's grid and one of its widest head alone, on what ``features`` gives."""
    import torch

    from lapbench.evaluation.probe_head import Head, HeadGrid, grid, parts_of
    from lapbench.evaluation.probe_settings import DINOV2_BLOCKS, DINOV2_LRS

    heads = grid(DINOV2_LRS, DINOV2_BLOCKS, ("token", "token+avg"))
    labels = torch.randint(CLASSES, (BATCH,))

    def step_of(some: list[Head]) -> Callable[[], None]:
        model = HeadGrid(some, 384, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), model.lr, momentum=0.9)

        def step() -> None:
            model.loss(features(parts_of(some)), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return step_of(heads), step_of(heads[-1:])


def results() -> Iterator[Result]:
    """With the backbone's forward pass, and on features that are there already."""
    import torch

    from lapbench.backbones import build_backbone
    from lapbench.evaluation.probe_features import Features

    torch.manual_seed(0)
    backbone = build_backbone("vit_small_patch16_224", 3, num_classes=0).eval()
    images, kept = torch.randn(BATCH, 3, PIXELS, PIXELS), torch.randn(BATCH, 5, 384)
    for what, features, bound, rounds in (
        (f"with the ViT-S/16 forward pass at {PIXELS} px", lambda parts: Features(backbone, parts)(images), 1.5, 3),
        ("on cached features", lambda parts: kept[:, : len(parts)], 52.0, 5),
    ):
        ours, one = steps(features)
        ratio = paired_ratio(ours, one, rounds, clock=time.process_time)
        yield Result(f"linear probe, 52 heads / one, {what}", ratio, bound, True, f"{rounds} pairs, {CLASSES} classes")
