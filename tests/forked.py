"""Runs as ``python ARGUMENT...`` would, in a process in which the packages are imported: ``Forked`` of conftest.py.

Its caller sets the names ARGUMENTS, ENVIRONMENT, FOLDER, OUT and ERR.
"""

import multiprocessing
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_only


def prepare(environment: dict[str, str], folder: str, *outputs: str) -> None:
    """What a new process has from its parent, what importing takes from there, and one thread."""
    os.setsid()  # its caller ends what it has started together with it
    multiprocessing.set_start_method(None, force=True)  # the platform's, as in any process
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(outputs, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    rank_zero_only.rank = int(environment.get("RANK", 0))
    torch.set_num_threads(1)


def run(first: str, *arguments: str) -> None:
    """A script, ``-m`` and a module, or ``-c`` and a text, with their arguments."""
    if first == "-m":
        sys.argv = [*arguments]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        exec(compile(arguments[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = [first, *arguments]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")


given: dict[str, Any] = globals()
prepare(given["ENVIRONMENT"], given["FOLDER"], given["OUT"], given["ERR"])
run(*given["ARGUMENTS"])
