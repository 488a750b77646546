"""What a sweep tells its user while it runs: a live display on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from lapbench.results.formats import emit
from lapbench.results.metrics import DEFAULTS, show_metrics
from lapbench.results.record import Record

if TYPE_CHECKING:
    from rich.progress import TaskID

HEARTBEAT_SECONDS = 30.0


class Display(Protocol):
    """Gets each event of a sweep; ``tick`` about once a second with the records of the runs that are running."""

    def say(self, line: str) -> None: ...
    def ended(self, name: str, line: str) -> None: ...
    def tick(self, done: int, running: Mapping[str, Record | None]) -> None: ...
    def close(self) -> None: ...


class Lines:
    """For logs and pipes: a line for each event, and one for each running run every 30 seconds."""

    def __init__(self, total: int, metric: str | None) -> None:
        self.total, self.metric = total, metric
        self.begin = self.last = self.latest_end = time.monotonic()
        self.ends = 0

    def say(self, line: str) -> None:
        emit(f"{line}\n")

    def ended(self, name: str, line: str) -> None:
        self.ends += 1
        self.latest_end = time.monotonic()
        self.say(line)

    def tick(self, done: int, running: Mapping[str, Record | None]) -> None:
        now = time.monotonic()
        if now - self.last < HEARTBEAT_SECONDS:
            return
        self.last = now
        left = ""
        if self.ends:  # as fast as so far, counted from the latest end
            seconds = (self.latest_end - self.begin) / self.ends * (self.total - done) - (now - self.latest_end)
            left = f", about {duration(seconds)} left" if seconds > 0 else ""
        for name, record in running.items():
            self.say(f"  {name}: {describe(record, self.metric)} ({done}/{self.total} runs done{left})")

    def close(self) -> None:
        pass


class Live:
    """For terminals: a bar for the sweep and one for each running run, with plain lines scrolling above."""

    def __init__(self, total: int, metric: str | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.metric = metric
        # Refreshed by `tick`, not by a thread: a run dies with the thread that started it, so there is only one.
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]} {task.fields[score]}", markup=False),
            TimeElapsedColumn(),
            console=Console(highlight=False),
            auto_refresh=False,
            transient=True,
        )
        self.sweep = self.progress.add_task("sweep", total=total, unit="runs", score="")
        self.tasks: dict[str, TaskID] = {}
        self.progress.start()

    def say(self, line: str) -> None:
        self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
        self.progress.refresh()

    def ended(self, name: str, line: str) -> None:
        if name in self.tasks:
            self.progress.remove_task(self.tasks.pop(name))
        self.say(line)

    def tick(self, done: int, running: Mapping[str, Record | None]) -> None:
        self.progress.update(self.sweep, completed=done)
        for name, record in running.items():
            if name not in self.tasks:
                self.tasks[name] = self.progress.add_task(name, total=None, unit="epochs", score="")
            epoch, epochs = _epochs(record)
            self.progress.update(
                self.tasks[name], completed=epoch or 0, total=epochs, score=score_of(record, self.metric)
            )
        self.progress.refresh()

    def close(self) -> None:
        self.progress.stop()


def open_display(total: int, metric: str | None) -> Display:
    """The display for this process's stdout; ``metric`` is the sweep's first."""
    return Live(total, metric) if sys.stdout.isatty() else Lines(total, metric)


def _epochs(record: Record | None) -> tuple[int | None, int | None]:
    return (record.progress.get("epoch"), record.progress.get("max_epochs")) if record else (None, None)


def score_of(record: Record | None, metric: str | None) -> str:
    """The most telling metric of a record: the sweep's, else its counterpart on validation, else a default one."""
    if record is None:
        return ""
    wanted = [metric, f"val/{metric.rpartition('/')[2]}"] if metric else []
    name = next((name for name in (*wanted, *DEFAULTS) if name in record.metrics), None)
    return show_metrics(record.metrics, name) if name else ""


def describe(record: Record | None, metric: str | None) -> str:
    """ "epoch 12/60, val/top1 91.20 %"."""
    epoch, epochs = _epochs(record)
    parts = [] if epoch is None else [f"epoch {epoch}/{epochs}" if epochs else f"epoch {epoch}"]
    parts += [score] if (score := score_of(record, metric)) else []
    return ", ".join(parts) or "starting"


def duration(seconds: float) -> str:
    """ "41 s", "12 min 5 s", "3 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
