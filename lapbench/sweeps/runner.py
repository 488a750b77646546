"""Runs as processes: starts them, waits for them, and takes them down with it.

One thread only. The kernel ends a run when the thread that started it ends (`lapbench.process.die_with_parent`), and a
signal to the sweep must find nobody in the middle of anything.
"""

import os
import re
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import FrameType
from typing import IO, Any

from lapbench.errors import UserError
from lapbench.process import PARENT_VARIABLE
from lapbench.results.plan import LOG_NAME, PlannedRun
from lapbench.results.record import FILE_NAME as RECORD_FILE
from lapbench.results.record import Record
from lapbench.sweeps.progress import Display, duration, score_of
from lapbench.sweeps.reconcile import find_record
from lapbench.sweeps.stages import with_folders

AGAIN = 75
"""Exit status of a run that stopped in an orderly way and wants to be started again (EX_TEMPFAIL)."""
USER_ERROR = "lapbench: error: "
"""How a run's last line begins when it ends with status 2, for bad input."""
MOST_FRUITLESS = 3
"""Times in a row that a run may ask to be started again without having come further."""
POLL_SECONDS = 0.1
TICK_SECONDS = 1.0
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Job:
    """A run that has been started: its process, and what its folder held before."""

    run: PlannedRun
    process: "subprocess.Popen[bytes]"
    log: Path
    log_start: int
    started: float
    position_before: tuple[int, int]
    record_before: tuple[int, int] | None


@dataclass(frozen=True)
class Failure:
    """A failed run: why, in one line, and where its output is."""

    run: PlannedRun
    reason: str
    log: Path


@dataclass
class Outcome:
    """What became of the runs. ``waiting`` are later stages of failed runs; ``signal`` stopped the sweep."""

    finished: int = 0
    failures: list[Failure] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)
    signal: int | None = None


class Runner:
    """Runs ``runs`` in ``out``, ``jobs`` at a time: always the first one whose earlier stages have finished.

    So a chain is finished before the next one begins: results come early, and so do mistakes in a late stage's config.

    Args:
        out: folder of the sweep; each run gets ``out / run.folder``.
        runs: those that are not finished.
        command: to which ``--run.dir FOLDER`` and the run's arguments are appended.
        jobs: processes at a time, at least 1.
        done: runs that were finished before, for the counts shown.
        metric: what to show of a finished run.
    """

    def __init__(
        self,
        out: Path,
        runs: Sequence[PlannedRun],
        command: Sequence[str],
        jobs: int,
        display: Display,
        done: int = 0,
        metric: str | None = None,
    ) -> None:
        self.out, self.command, self.jobs, self.display, self.metric = out, command, jobs, display, metric
        self.pending = deque(runs)
        self.running: list[Job] = []
        self.outcome = Outcome()
        self.done, self.total = done, done + len(runs)
        self.fruitless: dict[str, int] = {}
        self.environment = child_environment(jobs)
        self.signals = 0
        self.asked = False

    def run(self) -> Outcome:
        """Run everything. On SIGINT, SIGTERM or SIGHUP: end the runs in an orderly way; a second signal kills them."""
        previous = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        next_tick = 0.0
        try:
            while self.running or (self._next() and not self.outcome.signal):
                while len(self.running) < self.jobs and not self.outcome.signal and (run := self._next()):
                    self.pending.remove(run)
                    self.running.append(self._start(run))
                self._forward_signal()
                for job in [job for job in self.running if job.process.poll() is not None]:
                    self.running.remove(job)
                    self._ended(job)
                    next_tick = 0.0
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + TICK_SECONDS
                    self.display.tick(self.done, {job.run.folder: self._record(job) for job in self.running})
                time.sleep(POLL_SECONDS)
        finally:
            for job in self.running:  # only after an error in the loop
                job.process.kill()
                job.process.wait()
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.display.close()
        left = self.outcome.unfinished if self.outcome.signal else self.outcome.waiting
        left += [run.folder for run in self.pending]
        return self.outcome

    def _next(self) -> PlannedRun | None:
        """The first run that can start: no earlier stage of it is still to be run, running, or failed."""
        unfinished = {run.folder for run in self.pending} | {job.run.folder for job in self.running}
        unfinished |= {failure.run.folder for failure in self.outcome.failures}
        return next((run for run in self.pending if unfinished.isdisjoint(run.earlier.values())), None)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.outcome.signal = self.outcome.signal or number
        self.signals += 1

    def _forward_signal(self) -> None:
        """Pass a stop on to the runs, once gently (they save and exit with 75), at a second signal for good."""
        if self.signals and self.running and not self.asked:
            self.asked = True
            name = _signal_name(self.outcome.signal or signal.SIGTERM)
            names = ", ".join(job.run.folder for job in self.running)
            self.display.say(f"{name}: waiting for {names} to save and stop (a second time kills)")
            for job in self.running:
                job.process.terminate()
        elif self.signals > 1:
            for job in self.running:
                job.process.kill()

    def _start(self, run: PlannedRun) -> Job:
        folder = self.out / run.folder
        record = find_record(folder)
        log = folder / LOG_NAME
        arguments = fit_command(self.command, self.out, run)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:
                stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
                file.write(f"\n=== {stamp} {' '.join(arguments)}\n".encode())
                file.flush()
                start = file.tell()
                # Its own session: Ctrl-C on the terminal reaches the sweep only, which then asks the runs to stop.
                process = self._popen(arguments, file)
        except OSError as error:
            raise UserError(f"cannot start {run.folder}: {error.filename or log}: {error.strerror or error}") from error
        return Job(run, process, log, start, time.monotonic(), _position(record), _version(folder))

    def _popen(self, arguments: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen(arguments, env=self.environment, start_new_session=True, **options)

    def _record(self, job: Job) -> Record | None:
        return find_record(self.out / job.run.folder)

    def _ended(self, job: Job) -> None:
        status, name = job.process.returncode, job.run.folder
        seconds = duration(time.monotonic() - job.started)
        try:
            record = self._record(job)
        except UserError as error:
            self._failed(job, str(error))
            return
        if status == 0 and record and record.status == "finished":
            self.outcome.finished += 1
            self.done += 1
            score = score_of(record, self.metric)
            self._say(name, f"finished: {score} in {seconds}" if score else f"finished in {seconds}")
        elif self.outcome.signal:
            self.outcome.unfinished.append(name)
            self.display.ended(name, f"      {name} stopped")
        elif status == AGAIN and self._came_further(job, record):
            self.display.ended(name, f"      {name} was interrupted after {seconds}: starting it again")
            self.pending.appendleft(job.run)
        else:
            self._failed(job, self._reason(job, record))

    def _came_further(self, job: Job, record: Record | None) -> bool:
        """Whether starting a run again makes sense: a run that is stopped each time before it gets anywhere loops."""
        count = 0 if _position(record) > job.position_before else self.fruitless.get(job.run.folder, 0) + 1
        self.fruitless[job.run.folder] = count
        return count < MOST_FRUITLESS

    def _failed(self, job: Job, reason: str) -> None:
        self.done += 1
        self.outcome.failures.append(Failure(job.run, reason, job.log))
        waiting = [run.stage for run in self.pending if run.stage and job.run.folder in run.earlier.values()]
        later = f"; not run, as they start from it: {', '.join(waiting)}" if waiting else ""
        self._say(job.run.folder, f"FAILED: {reason} (see {job.log}){later}")

    def _say(self, name: str, what: str) -> None:
        self.display.ended(name, f"[{self.done}/{self.total}] {name} {what}")

    def _reason(self, job: Job, record: Record | None) -> str:
        """The error in the record if this process wrote it, else how the process ended and the last line it printed."""
        status = job.process.returncode
        written = record and _version(self.out / job.run.folder) != job.record_before
        if record and written and record.status == "finished" and record.failed_evaluations:
            return "; ".join(f"evaluation {name}: {error}" for name, error in record.failed_evaluations.items())
        if record and written and record.status == "failed" and record.error:
            return " ".join(record.error.split())
        if status == AGAIN:
            how = f"interrupted {MOST_FRUITLESS} times in a row without coming further"
        elif status < 0:
            how = f"killed by {_signal_name(-status)}"
        elif status == 0:
            how = f"exit status 0, but its record says {record.status if record else 'nothing'}"
        else:
            how = f"exit status {status}"
        last = last_line(job.log, job.log_start)
        if status == 2 and last.startswith(USER_ERROR):
            return last.removeprefix(USER_ERROR)
        return f"{how}: {last}" if last else how


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _position(record: Record | None) -> tuple[int, int]:
    """How far a run has come: optimizer steps, then evaluations."""
    return (record.progress.get("step") or 0, len(record.evaluations)) if record else (0, 0)


def _version(folder: Path) -> tuple[int, int] | None:
    """Tells two versions of a record apart: a new one is another file."""
    path = folder / RECORD_FILE
    if not path.exists():
        return None
    status = path.stat()
    return status.st_mtime_ns, status.st_ino


def fit_command(command: Sequence[str], out: Path, run: PlannedRun) -> list[str]:
    """The full command line of a run of the sweep in ``out``."""
    arguments = (with_folders(argument, run.earlier, out) for argument in run.arguments)
    return [*command, "--run.dir", str(out / run.folder), *arguments]


def child_environment(jobs: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a run: how it knows its parent, and its share of the cores if several run at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = str(max(1, cores // jobs))
    threads = dict.fromkeys(THREAD_VARIABLES, share) if jobs > 1 else {}  # a single run may decide for itself
    return {"PYTHONUNBUFFERED": "1", **threads, **environment, PARENT_VARIABLE: str(os.getpid())}


def last_line(log: Path, start: int, longest: int = 300) -> str:
    """The last non-empty line of a log from byte ``start`` on, without colours and overwritten progress bars."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - 65536))
        text = file.read().decode(errors="replace")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [" ".join(line.split()) for line in re.split(r"[\r\n]+", text)]
    found = next((line for line in reversed(lines) if line), "")
    printable = "".join(character for character in found if character.isprintable())
    return printable if len(printable) <= longest else f"{printable[: longest - 3]}..."
