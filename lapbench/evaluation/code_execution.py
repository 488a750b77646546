"""Runs programs that a model wrote, each in a process of its own with little time, memory and rights.

A guard against what models write by accident: endless loops, memory hogs, forks, floods of files and output, writing
and signalling where they should not. It is no security boundary: a program that is made to break out of a Python
process may read the user's files, or make a wrong answer pass. Whoever expects such programs runs the whole evaluation
in a container or virtual machine.

The process is a fresh interpreter without site-packages, in a session and a temporary folder of its own, output thrown
away. It limits itself: CPU time, address space, size and number of files, no core dump, no further process or thread,
no new privileges, user and group "nobody" if it was root, and it ends with this process. An audit hook refuses signals,
sockets, and changes to files elsewhere. A program passes when it comes to its end: only then does the process fetch
a random proof from a pipe and send it back, so an early exit is no pass.
"""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from lapbench.errors import UserError

CPU_SECONDS = 2
WALL_SECONDS = 10.0
MEMORY = 512 << 20
_CHILD = Path(__file__).resolve().with_name("contained_child.py")
_NOBODY = 65534
_MOST_OUTPUT = 4096


class Outcome(NamedTuple):
    """Whether a program came to its end, and if not, why: an exception's name, "timeout", "killed by SIGKILL", ..."""

    passed: bool
    reason: str


def run_program(program: str, *, cpu_seconds: int = CPU_SECONDS, wall_seconds: float = WALL_SECONDS) -> Outcome:
    """Runs Python source code.

    Args:
        program: The source; what it asserts decides.
        cpu_seconds: CPU time after which it is killed.
        wall_seconds: The same of time on the clock.

    Raises:
        UserError: This machine cannot contain it. That is no fault of the program, so it is not an outcome.
    """
    proof = secrets.token_hex(16).encode()
    with ExitStack() as stack:
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="lapbench-program-", ignore_cleanup_errors=True)
        )
        if os.getuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        source = stack.enter_context(tempfile.TemporaryFile())
        source.write(program.encode("utf-8", "replace"))
        source.seek(0)
        proof_read, proof_write = os.pipe()
        result_read, result_write = os.pipe()
        for end in (proof_read, result_read):
            stack.callback(os.close, end)
        os.write(proof_write, proof)
        os.close(proof_write)
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-B", str(_CHILD)),
                    *map(str, (proof_read, result_write, MEMORY, cpu_seconds)),
                ],
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={},
                pass_fds=(proof_read, result_write),
                start_new_session=True,
            )
        finally:
            os.close(result_write)
        status = _wait(process, wall_seconds)
        os.set_blocking(result_read, False)
        output = b""
        with suppress(BlockingIOError):  # a stray process holds the pipe open; what was written is there
            while len(output) < _MOST_OUTPUT and (piece := os.read(result_read, _MOST_OUTPUT)):
                output += piece
    return _outcome(output, proof, status)


def run_programs(programs: Sequence[str], *, workers: int | None = None) -> list[Outcome]:
    """Runs programs, some at a time, and returns their outcomes in order.

    Args:
        programs: Sources.
        workers: How many run at the same time; None takes as many as this process has processors.

    Raises:
        UserError: As for ``run_program``.
    """
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(run_program, programs))


def check_containment() -> None:
    """Finds out whether programs can be run, and kept from starting processes, on this machine.

    Raises:
        UserError: They cannot.
    """
    fine = run_program("assert 1 + 1 == 2")
    if not fine.passed:
        raise UserError(f"code execution: a program that must pass failed on this machine: {fine.reason}")
    # One child at most, which ends at once.
    forks = run_program("import os\ntry:\n    os.fork() or os._exit(0)\nexcept OSError:\n    raise LookupError")
    if forks.reason != "LookupError":
        raise UserError(f"code execution: this machine does not keep programs from forking ({forks.reason})")


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    """The exit status, None after ``seconds``; what is left of the process's session is killed."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _outcome(output: bytes, proof: bytes, status: int | None) -> Outcome:
    begin, _, said = output.partition(b"\n")
    if status is None and begin == b"ready":
        return Outcome(False, "timeout")
    if begin != b"ready":
        raise UserError(
            "code execution: the limits for programs cannot be set on this machine "
            f"({'no answer in time' if status is None else f'exit status {status}'})"
        )
    if status == 0 and said == proof:
        return Outcome(True, "")
    if status is not None and status < 0:
        return Outcome(False, f"killed by {signal.Signals(-status).name}")
    return Outcome(False, said.decode("utf-8", "replace")[:100] or f"exit status {status}")
