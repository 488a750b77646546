"""The process that runs one program of `lapbench.evaluation.code_execution`; nothing else imports it.

Started as ``python -I -S -B contained_child.py PROOF_FD RESULT_FD MEMORY CPU_SECONDS``, the program in stdin. It writes
"ready" when all limits hold, then what became of the program: the proof, if the program came to its end. The proof
stays in its pipe until then, so that no object of this process holds it while the program runs.
"""

import os
import sys

# Nothing more can be read once root's rights are given up, as Python may be in a folder of root's: what a program names
# of these is imported before. All of them would take 100 ms.
_LIBRARY = (
    "_strptime abc array ast base64 bisect calendar cmath collections contextlib copy csv dataclasses datetime decimal "
    "difflib enum fractions functools hashlib heapq io itertools json locale math numbers operator pprint queue random "
    "re secrets signal socket statistics string struct textwrap threading time traceback typing types unicodedata uuid"
)
_NOBODY = 65534
_MEGABYTE = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_SIGKILL = 9
# What no answer to a question about a function has to do, by the names of Python's audit events.
_FORBIDDEN = (
    "ctypes.dlopen os.chflags os.chmod os.chown os.exec os.fork os.forkpty os.kill os.killpg os.link os.posix_spawn "
    "os.remove os.rename os.rmdir os.setxattr os.spawn os.symlink os.system os.truncate os.utime pty.spawn "
    "shutil.chown shutil.move shutil.rmtree signal.pthread_kill socket.bind socket.connect socket.sendto "
    "subprocess.Popen"
)
# The kernel refuses these; the audit hook only takes note.
_FORKS = ("os.fork", "os.forkpty")


def _limit(memory: int, cpu_seconds: int) -> None:
    """Limits that this process cannot raise again, and no rights to get around them."""
    import ctypes
    import resource

    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() == 0:  # root may fork in spite of the limit
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    for option, value in ((_PR_SET_PDEATHSIG, _SIGKILL), (_PR_SET_NO_NEW_PRIVS, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")
    for name, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, _MEGABYTE),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(name, (most, most))


def _main() -> None:
    proof, result, memory, cpu_seconds = map(int, sys.argv[1:])
    program = sys.stdin.buffer.read()
    for name in _LIBRARY.split():
        if name.strip("_").encode() in program:
            __import__(name)
    _limit(memory, cpu_seconds)
    here = os.getcwd()
    forbidden = frozenset(_FORBIDDEN.split())
    refused: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in forbidden:
            refused.append(event)
            if event not in _FORKS:
                raise PermissionError(f"{event} is not allowed here")
        elif event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                inside = not isinstance(path, int) and os.path.realpath(os.fsdecode(path)).startswith(here)  # type: ignore[arg-type]
                if not inside:
                    refused.append(event)
                    raise PermissionError("files can be written in the working folder only")

    # The program may put something else into these modules.
    read, write, leave, name_of, text = os.read, os.write, os._exit, type, str
    write(result, b"ready\n")
    sys.argv[1:] = []
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.addaudithook(watch)
    try:
        exec(compile(program, "<program>", "exec"), space)
    except BaseException as error:  # noqa: BLE001  SystemExit and KeyboardInterrupt are no way to pass either
        write(result, text(name_of(error).__name__)[:100].encode("utf-8", "replace"))
        leave(1)
    if refused:
        write(result, f"tried {refused[0]}".encode())
        leave(1)
    write(result, read(proof, 64))
    leave(0)


if __name__ == "__main__":
    _main()
