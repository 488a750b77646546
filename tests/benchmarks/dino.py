"""A DINO step with crops batched by resolution, against one forward for each crop, and by head schedule."""

import time
from collections.abc import Callable, Iterator

from tests.benchmarks.timing import Result, paired_ratio

BATCH, GLOBAL, LOCAL, GLOBAL_SIZE, LOCAL_SIZE = 16, 2, 6, 64, 32


def step_of(laplacian_heads: int | list[int], crop_by_crop: bool = False) -> Callable[[], None]:
    """A training step (student, teacher, loss, backward, AdamW, EMA) of ViT-Ti with patches of 16 pixels."""
    import torch

    from lapbench.backbones import VisionSettings
    from lapbench.tasks import DINO
    from lapbench.tasks.dino_head import ProjectedBackbone, ProjectionHead

    torch.manual_seed(0)
    backbone = VisionSettings("vit_tiny_patch16_224", heads=laplacian_heads, img_size=GLOBAL_SIZE)
    task = DINO(backbone, ProjectionHead(out_dim=4096))
    optimizer = torch.optim.AdamW(task.student.parameters())
    crops = [
        torch.randn(BATCH, GLOBAL, 3, GLOBAL_SIZE, GLOBAL_SIZE),
        torch.randn(BATCH, LOCAL, 3, LOCAL_SIZE, LOCAL_SIZE),
    ]

    def outputs(model: ProjectedBackbone, views: list[torch.Tensor]) -> torch.Tensor:
        if not crop_by_crop:
            return model(views)
        return torch.stack([model.head(model.backbone(crop)) for images in views for crop in images.unbind(1)], dim=1)

    def step() -> None:
        with torch.no_grad():
            targets = task.loss.targets(outputs(task.teacher, crops[:1]), 0.04)
        task.loss(outputs(task.student, crops), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(list(task.teacher.parameters()), list(task.student.parameters()), 0.004)

    return step


def results() -> Iterator[Result]:
    """Speed of the step, on one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from _results()
    finally:
        torch.set_num_threads(threads)


def _results() -> Iterator[Result]:
    rounds = 25
    crops = f"{GLOBAL} x {GLOBAL_SIZE} px + {LOCAL} x {LOCAL_SIZE} px"
    what = f"{rounds} pairs, CPU time, ViT-Ti/16, {crops}, batch {BATCH}"
    ratio = paired_ratio(step_of(0, crop_by_crop=True), step_of(0), rounds, clock=time.process_time)
    yield Result("DINO step, crop by crop / by resolution", ratio, 1.3, False, what)
    # Blocks with one and with two Laplacian heads of three alternate: half of all heads.
    ratio = paired_ratio(step_of(0), step_of([1, 2] * 6), rounds, clock=time.process_time)
    yield Result("DINO step, attention / half Laplacian heads", ratio, 0.97, False, what)
