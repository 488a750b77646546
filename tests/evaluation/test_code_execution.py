"""Programs that a model may write: right ones pass; whatever others do is contained, and a failure."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lapbench.errors import UserError
from lapbench.evaluation import code_execution
from lapbench.evaluation.code_execution import check_containment, run_program, run_programs

RIGHT = "def add(a, b):\n    return a + b\nassert add(2, 3) == 5\n"


def processes() -> set[str]:
    """The command lines of this machine's processes."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                found.add(entry.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue
    return found


def test_a_right_program_passes() -> None:
    assert run_program(RIGHT) == (True, "")
    check_containment()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 2 + 2 == 5", "AssertionError"),
        ("def f(:\n", "SyntaxError"),
        ("raise ValueError('x')", "ValueError"),
        # Python before 3.11.4 calls it a wrong value.
        ("\0", "SyntaxError" if sys.version_info >= (3, 11, 4) else "ValueError"),
        ("import sys; sys.exit(0)\nassert False", "SystemExit"),
        ("import os; os._exit(0)\nassert False", "exit status 0"),
        ("while True: pass", "killed by SIGKILL"),
        ("while True:\n    try:\n        pass\n    except BaseException:\n        pass", "killed by SIGKILL"),
        ("import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "killed by SIGKILL"),
        ("x = bytearray(2 << 30)", "MemoryError"),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "MemoryError"),
        ("def f(): return f()\nf()", "RecursionError"),
        ("import threading\nthreading.Thread(target=print).start()", "RuntimeError"),
        ("import numpy", "ModuleNotFoundError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import os; os.setuid(0)", "PermissionError"),
        ("import os; os.system('true')", "PermissionError"),
        ("import socket; socket.socket().connect(('127.0.0.1', 9))", "PermissionError"),
        ("open('/tmp/lapbench-escaped', 'w')", "PermissionError"),
        ("open('big', 'wb').write(bytes(2 << 20))", "OSError"),
        ("files = [open(str(i), 'w') for i in range(100)]", "OSError"),
        ("class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E", "E"),
    ],
)
def test_a_wrong_program_fails(program: str, reason: str) -> None:
    assert run_program(program, cpu_seconds=1) == (False, reason)
    assert not Path("/tmp/lapbench-escaped").exists()


def test_forks_do_not_happen_and_fail_the_program() -> None:
    """Eight at most, so that a broken guard does no harm."""
    count = "import os\nfor _ in range(3):\n    try:\n        os.fork()\n    except BlockingIOError:\n        pass\n"
    assert run_program(count + "open('alone', 'x')") == (False, "tried os.fork")
    assert run_program("import os\nfor _ in range(3): os.fork()") == (False, "BlockingIOError")


def test_a_process_in_a_session_of_its_own_does_not_survive() -> None:
    mark = "600.123456"
    for start in (
        f"import os\nif os.fork() == 0:\n    os.setsid()\n    os.execvp('sleep', ['sleep', '{mark}'])",
        f"import subprocess; subprocess.Popen(['sleep', '{mark}'], start_new_session=True)",
        f"import os; os.posix_spawn('/bin/sleep', ['sleep', '{mark}'], {{}}, setsid=True)",
    ):
        assert not run_program(start).passed
    assert not any(mark in line for line in processes())


def test_sleeping_ends_at_the_wall_time_and_a_stubborn_one_too() -> None:
    begin = time.monotonic()
    assert run_program("import time; time.sleep(60)", wall_seconds=2) == (False, "timeout")
    stubborn = "import signal, time\nfor s in (1, 2, 3, 15): signal.signal(s, signal.SIG_IGN)\ntime.sleep(60)"
    assert run_program(stubborn, wall_seconds=2) == (False, "timeout")
    assert time.monotonic() - begin < 20


def test_floods_are_thrown_away() -> None:
    assert run_program("for _ in range(300): print('x' * 100000)") == (True, "")
    flood = (
        "import os\nfor fd in range(3, 500):\n    try:\n"
        "        while True: os.write(fd, b'x' * 65536)\n    except OSError: pass"
    )
    assert not run_program(flood, wall_seconds=3).passed
    files = "for i in range(10**9):\n    with open(str(i), 'w') as f: f.write('x' * 1000)"
    before = set(os.listdir("/tmp"))
    assert run_program(files, cpu_seconds=1) == (False, "killed by SIGKILL")
    assert not {name for name in set(os.listdir("/tmp")) - before if name.startswith("lapbench-program")}


@pytest.mark.parametrize(
    "program",
    [
        "import sys, os\nsys.stdin.seek(0)\nassert False",
        "import os\nfor fd in range(3, 500):\n    try: os.write(fd, b'0' * 32)\n    except OSError: pass\nos._exit(0)",
        "import os\nfor fd in range(3, 500):\n    try: os.write(fd, b'ready\\n')\n"
        "    except OSError: pass\nos._exit(0)",
        "import sys, os, gc\nfound = [o for o in gc.get_objects() if isinstance(o, bytes) and len(o) == 32]\n"
        "f = sys._getframe()\nwhile f:\n    found += [v for v in f.f_locals.values() if isinstance(v, bytes)]\n"
        "    f = f.f_back\n"
        "for fd in range(3, 500):\n    for o in found:\n        try: os.write(fd, o)\n"
        "        except OSError: pass\nos._exit(0)",
    ],
)
def test_a_program_cannot_pass_by_ending_early(program: str) -> None:
    assert not run_program(program).passed


def test_others_go_on_after_a_failure_and_keep_their_order() -> None:
    programs = ["while True: pass", RIGHT, "x = bytearray(2 << 30)", "assert False", RIGHT]
    assert [outcome.passed for outcome in run_programs(programs, workers=2)] == [False, True, False, False, True]
    assert threading.active_count() < 10


def test_a_program_ends_when_the_evaluation_is_killed() -> None:
    run = (  # by its file: the package imports torch
        f"import runpy; module = runpy.run_path({code_execution.__file__!r})\n"
        "print('go', flush=True); module['run_program']('import time; time.sleep(50)', wall_seconds=60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent:
        assert parent.stdout.readline() == b"go\n"
        children: list[str] = []
        deadline = time.monotonic() + 10
        while not children and time.monotonic() < deadline:
            children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        time.sleep(0.5)
        parent.kill()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{child}").exists() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_a_machine_that_cannot_contain_programs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "child.py"
    broken.write_text("import sys; sys.exit(3)")
    monkeypatch.setattr(code_execution, "_CHILD", broken)
    with pytest.raises(UserError, match=r"limits for programs cannot be set .*exit status 3"):
        run_program(RIGHT)
