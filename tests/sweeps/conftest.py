"""Shared by the tests of the launcher: sweeps of the fake trainer as processes of their own, ended from outside."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _start_sweep(sweep: Path, out: Path, jobs: int) -> "subprocess.Popen[str]":
    code = (
        "import sys, pathlib; from lapbench.sweeps.grid import load_sweep; from lapbench.sweeps.launch import launch;"
        "sys.exit(launch(load_sweep(sys.argv[1]).plan(), pathlib.Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))"
    )
    command = [
        sys.executable,
        "-c",
        code,
        str(sweep),
        str(out),
        str(jobs),
        sys.executable,
        str(Path(__file__).with_name("fake_fit.py")),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _wait_until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


@pytest.fixture(scope="session")
def start_sweep() -> Callable[[Path, Path, int], "subprocess.Popen[str]"]:
    """Starts a sweep file in a folder with a number of jobs."""
    return _start_sweep


@pytest.fixture(scope="session")
def is_alive() -> Callable[[int], bool]:
    """Whether there is a process of that id."""
    return _is_alive


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Polls a condition."""
    return _wait_until
