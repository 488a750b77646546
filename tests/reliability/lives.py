"""Trains one run in many lives: each is ended by a signal at a random moment, until the run is finished.

Usage: lives.py SIGNALS LIVES PROCESSES SEED LOG ARGUMENT...   with SIGNALS such as SIGKILL or SIGTERM,SIGUSR1, of which
each life gets one, or NONE for one whole life.
Prints the number of lives that were cut short. The moments are counted in steps of the first process (training,
validation and test steps) and a few milliseconds more, some from the process's start, so that they do not depend on
the speed of a machine.

The packages are imported once and the processes of a run are forks, started as torchrun starts its own.
"""

import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only
from timm.layers import PatchEmbed
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import lapbench.training.commands  # noqa: F401  imported once, before the processes part
from lapbench.cli import main
from lapbench.tasks import ImageClassification


class NormalizedPatches(PatchEmbed):
    """Patches of images that a batch norm has gone over: a model with running statistics."""

    def __init__(self, *arguments: Any, in_chans: int = 3, **settings: Any) -> None:
        super().__init__(*arguments, in_chans=in_chans, **settings)
        self.input_norm = nn.BatchNorm2d(in_chans)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.input_norm(x))


@register_model
def vit_with_batch_norm(pretrained: bool = False, **settings: Any) -> VisionTransformer:
    for name in ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"):
        settings.pop(name, None)
    return VisionTransformer(embed_layer=NormalizedPatches, **settings)


def announce(pipe: int, cls: type, name: str) -> None:
    """Write a byte to the pipe at each call of a step."""
    original = getattr(cls, name)

    def step(self: Any, *arguments: Any) -> Any:
        os.write(pipe, b".")
        return original(self, *arguments)

    setattr(cls, name, step)


def start(arguments: list[str], log: str, rank: int, ranks: int, port: int, pipe: int | None) -> int:
    """Fork one process of the run; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if ranks > 1:
            rank_zero_only.rank = rank
            os.environ |= {
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
                "GROUP_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "lives",
            }
        if pipe is not None:
            for name in ("training_step", "validation_step", "test_step"):
                announce(pipe, ImageClassification, name)
        status = main(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        if (error := sys.exc_info()[1]) is not None:
            traceback.print_exception(error)
        os._exit(status)


def life(arguments: list[str], log: str, ranks: int, number: signal.Signals | None, rng: random.Random) -> bool:
    """One life of the run; returns whether it was cut short."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reading, writing = os.pipe()
    pids = [start(arguments, log, rank, ranks, port, writing if rank == 0 else None) for rank in range(ranks)]
    os.close(writing)
    if number is not None:
        if rng.random() < 0.15:
            time.sleep(rng.uniform(0, 1.5))
        else:
            left = rng.randint(1, 6)
            while left and (steps := os.read(reading, left)):
                left -= len(steps)
            time.sleep(rng.uniform(0, 0.01))
        for pid in pids:
            os.kill(pid, number)  # one that has ended is still there to be waited for
    expected = {None: {0}, signal.SIGKILL: {0, -9}}.get(number, {0, 75, -number} if number else {0})
    statuses: list[int] = []
    while len(statuses) < ranks:
        pid, status = os.wait()
        pids.remove(pid)
        statuses.append(os.waitstatus_to_exitcode(status))
        if statuses[-1] not in expected:
            for other in pids:  # which may be waiting for this one
                os.kill(other, signal.SIGKILL)
    os.close(reading)  # which has room for all steps
    if not set(statuses) <= expected:
        sys.exit(f"expected exit status {expected}, got {statuses}:\n{Path(log).read_text()[-3000:]}")
    return set(statuses) != {0}


def run() -> None:
    names, lives, ranks, seed, log, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    numbers = [signal.Signals[name] for name in names.split(",") if name != "NONE"]
    rng = random.Random(int(seed))
    cut = 0
    while numbers and cut < int(lives):
        if not life(arguments, log, int(ranks), rng.choice(numbers), rng):
            sys.exit(f"the run was finished after {cut} lives that were cut short")
        cut += 1
    if life(arguments, log, int(ranks), None, rng):
        sys.exit(f"the last life did not finish the run:\n{Path(log).read_text()[-3000:]}")
    sys.stdout.write(f"{cut}\n")


if __name__ == "__main__":
    run()
