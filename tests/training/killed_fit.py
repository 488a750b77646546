"""Runs ``lapbench fit`` in a process of its own for each moment of death given, and dies there by SIGKILL.

Usage: killed_fit.py MOMENTS FOLDER ARGUMENT...   with MOMENTS such as batch-15,checkpoint-2,test-1: the run of each in
FOLDER/MOMENT. A checkpoint's death comes when it is written, before it gets its name.
"""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import lapbench.training.commands  # noqa: F401  imported once, before the processes part
from lapbench.cli import main
from lapbench.tasks import ImageClassification


def die_at(owner: Any, name: str, which: int, when: Any = lambda *arguments: True) -> None:
    original, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += when(*arguments)
        if calls == which:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)

    setattr(owner, name, counted)


def child(moment: str, arguments: list[str]) -> None:
    what, number = moment.split("-")
    if what == "checkpoint":
        die_at(os, "replace", int(number), lambda source, target: Path(target).name == "last.ckpt")
    else:
        die_at(ImageClassification, {"batch": "training_step", "test": "test_step"}[what], int(number))
    os._exit(main(arguments))


torch.set_num_threads(1)
assert threading.active_count() == 1
for moment in sys.argv[1].split(","):
    pid = os.fork()
    if pid == 0:
        child(moment, [*sys.argv[3:], "--run.dir", str(Path(sys.argv[2], moment))])
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(f"{moment}: the run ended by itself: {status}")
