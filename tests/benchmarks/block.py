"""A ViT-B block with half Laplacian heads against stock timm: time and peak memory of a training step."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.benchmarks.timing import Result, paired_ratio

DIM, HEADS, TOKENS, BATCH = 768, 12, 197, 8


def step_of(laplacian_heads: int, compiled: bool = False) -> Callable[[], None]:
    """A training step (forward, backward, AdamW) of one block of DeiT-III ViT-B."""
    import torch
    from timm.models.vision_transformer import Block

    from lapbench.backbones.attention import set_head_kinds
    from lapbench.heads import HeadSchedule

    torch.manual_seed(0)
    block = Block(DIM, HEADS, qkv_bias=True, init_values=1e-6)
    set_head_kinds(block.attn, HeadSchedule.parse(laplacian_heads, 1, HEADS).layers[0])
    optimizer = torch.optim.AdamW(block.parameters())
    if compiled:
        block.compile(fullgraph=True)
    images = torch.randn(BATCH, TOKENS, DIM)

    def step() -> None:
        block(images).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def peak_bytes(laplacian_heads: int) -> int:
    """Peak resident memory that three training steps add to an idle process, measured in a process of its own."""
    code = f"from tests.benchmarks.block import report_peak; report_peak({laplacian_heads})"
    # Freed tensors go back to the system at once, so that the peak is that of live memory.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def report_peak(laplacian_heads: int) -> None:
    """Runs in the child of ``peak_bytes``."""
    import torch

    torch.set_num_threads(1)
    step_of(0), step_of(6)  # imports and lazy initialisation of both
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # restarts the high-water mark
    step = step_of(laplacian_heads)
    for _ in range(3):
        step()
    print(json.dumps(_status("VmHWM") - before))


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def results() -> Iterator[Result]:
    """Time eager and compiled, and memory."""
    for compiled, bound, rounds in ((False, 1.03, 25), (True, 1.02, 25)):
        mode = "compiled" if compiled else "eager"
        ratio = paired_ratio(step_of(6, compiled), step_of(0, compiled), rounds, warmup=3)
        yield Result(f"ViT-B block, 6 of 12 Laplacian / stock timm, {mode} step", ratio, bound, True, f"{rounds} pairs")
    ours, theirs = peak_bytes(6), peak_bytes(0)
    detail = f"{ours / 1e6:.1f} / {theirs / 1e6:.1f} MB"
    yield Result("ViT-B block, 6 of 12 Laplacian / stock timm, peak memory", ours / theirs, 1.02, True, detail)
