"""Worker processes and the signals that ask a run to stop."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lapbench import process
from lapbench.process import PARENT_VARIABLE, children_die_with_this_process, outlive_stop_signals


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(7)
    return pid


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT], ids=lambda number: number.name)
def test_a_worker_outlives_a_stop_signal(number: signal.Signals) -> None:
    def work() -> None:
        outlive_stop_signals(0)
        os.kill(os.getpid(), number)

    assert ended(forked(work)) == 7


def test_a_worker_ends_some_time_after_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "WORKER_GRACE_SECONDS", 1)

    def work() -> None:
        outlive_stop_signals(0)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    started = time.monotonic()
    assert ended(forked(work)) == -signal.SIGALRM
    assert time.monotonic() - started < 30


def test_children_know_their_parent_only_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PARENT_VARIABLE, raising=False)
    with children_die_with_this_process():
        assert os.environ[PARENT_VARIABLE] == str(os.getpid())
    assert PARENT_VARIABLE not in os.environ
    monkeypatch.setenv(PARENT_VARIABLE, "1")
    with children_die_with_this_process():
        assert os.environ[PARENT_VARIABLE] == str(os.getpid())
    assert os.environ[PARENT_VARIABLE] == "1"


def test_the_processes_of_a_run_end_with_its_first() -> None:
    child = "from lapbench.process import die_with_parent; die_with_parent(); print('up', flush=True); input()"
    parent = (
        "import subprocess, sys; from lapbench.process import children_die_with_this_process as together\n"
        f"with together(): p = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        "print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        lines = {running.stdout.readline().strip(), running.stdout.readline().strip()}
        (pid,) = (int(line) for line in lines if line != "up")
        running.kill()
        # The pipe closes when the child is gone as well.
        assert running.stdout.read() == ""
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and time.monotonic() < until:
        time.sleep(0.05)  # dead, but not yet waited for by init
    assert time.monotonic() < until


def test_a_worker_ends_at_once_with_its_main_process() -> None:
    reading, writing = os.pipe()

    def work() -> None:
        def load() -> None:
            outlive_stop_signals(0)
            os.write(writing, b"up")
            time.sleep(60)

        forked(load)
        time.sleep(60)

    main = forked(work)
    os.close(writing)
    assert os.read(reading, 2) == b"up"
    started = time.monotonic()
    os.kill(main, signal.SIGKILL)
    assert ended(main) == -signal.SIGKILL
    assert os.read(reading, 1) == b""  # nobody is left to write
    assert time.monotonic() - started < 4
    os.close(reading)
