"""Processes that belong together: a child that dies with its parent, and a folder that only one process works in."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from lapbench.errors import UserError

PARENT_VARIABLE = "LAPBENCH_PARENT_PID"
WORKER_GRACE_SECONDS = 30
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the process that started it dies, if ``LAPBENCH_PARENT_PID`` asks for it.

    ``lapbench sweep`` sets the variable to its own process id for the runs that it starts. When the sweep is killed
    in a way that no handler sees (SIGKILL, out of memory), its runs must not go on writing into folders that the next
    sweep will use. SIGKILL and not SIGTERM: a run that takes its time to save would still be there when the next sweep
    starts it again. The variable is then set to this process's id, so that the same holds for processes started by it.

    Does nothing without the variable. Only Linux offers this; elsewhere it only checks that the
    parent is still there.
    """
    expected = os.environ.get(PARENT_VARIABLE)
    if not expected:
        return
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    _ask_for_death_signal()
    # The parent may have died before the request above: then nothing would ever send the signal.
    if str(os.getppid()) != expected:
        raise SystemExit(f"lapbench: the process that started this one ({PARENT_VARIABLE}={expected}) is gone")


def _ask_for_death_signal() -> None:
    """Have the kernel send SIGKILL to this process when the thread that started it ends; only Linux offers this."""
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


@contextmanager
def children_die_with_this_process() -> Iterator[None]:
    """Ask ``die_with_parent`` of the lapbench processes that are started meanwhile."""
    before = os.environ.get(PARENT_VARIABLE)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARENT_VARIABLE]
        else:
            os.environ[PARENT_VARIABLE] = before


def outlive_stop_signals(worker: int = 0) -> None:
    """Have a data loader's worker process ignore the signals that ask a run to stop, and end with the main process.

    Schedulers send them to every process of a job: the workers must go on until the main process has come to the end
    of its step. After SIGTERM they have ``WORKER_GRACE_SECONDS``. When the main process is killed they end at once:
    torch's own workers notice only after some seconds, in which they hold the locks that they inherited.

    Args:
        worker: the worker's number, as ``DataLoader`` gives it to its ``worker_init_fn``.
    """
    _ask_for_death_signal()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(WORKER_GRACE_SECONDS))


def lock_folder(folder: Path, user: str) -> IO[str]:
    """Take ``folder/.lock`` for this process until the returned file is closed or the process ends, however it ends.

    Args:
        folder: an existing folder.
        user: what the lock is for, as the error names it: "another `lapbench sweep`".

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    import fcntl  # not on Windows, where the rest of lapbench.process imports

    path = folder / ".lock"
    try:
        file = path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write in {folder}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise UserError(f"{user} is at work in {folder} (it holds {path}): wait for it or stop it first") from error
    except OSError as error:
        file.close()
        raise UserError(f"cannot lock {path}: {error.strerror}") from error
    return file
