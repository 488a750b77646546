"""The progress bar of a conversion, on stderr: images done, rate and time left."""

import sys
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:,.1f} {task.fields['unit']}/s")


class Bar:
    """``with Bar("train", total) as bar: bar.advance(3)``; silent when ``shown`` is False."""

    def __init__(self, label: str, total: int | None, shown: bool = True, unit: str = "images", start: int = 0) -> None:
        # What was done before counts as completed but not towards the rate, or the time left would be far too short.
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            _Rate(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not shown,
        )
        self._task = self._progress.add_task(label, total=total, completed=start, unit=unit, note="")

    def advance(self, count: int) -> None:
        """Count ``count`` more."""
        self._progress.advance(self._task, count)

    def note(self, text: str) -> None:
        """Show ``text`` beside the rate."""
        self._progress.update(self._task, note=text)

    def __enter__(self) -> "Bar":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()


def notice(text: str, shown: bool = True) -> None:
    """Write one line to stderr when ``shown``."""
    if shown:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def waiting(folder: Path, shown: bool = True) -> None:
    """Say that another process converts into ``folder``."""
    notice(f"another process is converting into {folder}: waiting for it", shown)
