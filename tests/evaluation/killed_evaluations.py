"""Runs ``lapbench fit`` in a process of its own for each moment of death given, and dies there by SIGKILL.

Usage: killed_evaluations.py MOMENTS FOLDER ARGUMENT...   with MOMENTS such as probe-1,step-4,save-2: the run of each in
FOLDER/MOMENT. Only the first one trains; the others, and FOLDER/whole, which is left alone, start from what it left.
A checkpoint's death ("save") comes when it is written, before it gets its name.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import fakes
import torch

import lapbench.training.commands  # noqa: F401  imported once, before the processes part
from lapbench.cli import main
from lapbench.evaluation import linear_probe
from lapbench.training.recording import RecordWriter


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
    if what == "save":
        die_at(os, "replace", int(number), lambda source, target: Path(target).parent.name == "linear")
    else:
        owner, name = {
            "probe": (linear_probe.LinearProbe, "evaluate"),
            "step": (linear_probe._Probe, "training_step"),
            "score": (linear_probe._Probe, "validation_step"),
            "draws": (fakes.Draws, "evaluate"),
            "finish": (RecordWriter, "finish"),
        }[what]
        die_at(owner, name, int(number))
    os._exit(main(arguments))


torch.set_num_threads(1)
first, *others = sys.argv[1].split(",")
folder = Path(sys.argv[2])
for moment in (first, *others):
    pid = os.fork()
    if pid == 0:
        child(moment, [*sys.argv[3:], "--run.dir", str(folder / moment)])
    _, status = os.waitpid(pid, 0)
    if not os.WIFSIGNALED(status):
        sys.exit(f"{moment}: the run ended by itself: {status}")
    if moment == first:
        for name in (*others, "whole"):
            shutil.copytree(folder / first, folder / name)
