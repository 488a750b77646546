"""``lapbench sweep`` whose runs are forks of its own process, in which the packages are imported: they start at once.

Usage: forked_sweep.py ARGUMENT...   with the arguments of ``lapbench sweep``.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

from lapbench.cli import main
from lapbench.sweeps.runner import STOP_SIGNALS, Runner

FORK = multiprocessing.get_context("fork")


def run(command: Sequence[str], log: int, environment: Mapping[str, str]) -> None:
    """What ``Runner`` asks of a new process: a session, an output and an environment of its own."""
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # the platform's, as in any process
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(environment)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    _, module, package, *arguments = command
    assert (module, package) == ("-m", "lapbench")
    sys.argv = [package, *arguments]
    sys.exit(main(arguments))


def forked(self: Runner, arguments: Sequence[str], log: IO[bytes]) -> Any:
    """Has of ``Popen`` what ``Runner`` uses: poll, returncode, terminate, kill and wait."""
    process = FORK.Process(target=run, args=(arguments, log.fileno(), self.environment))
    process.start()
    return process._popen


Runner._popen = forked
sys.exit(main(["sweep", *sys.argv[1:]]))
