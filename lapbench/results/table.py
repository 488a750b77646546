"""Leaderboards: ``lapbench table`` and `leaderboard`. A row for each head schedule, a column for each data set."""

import math
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lapbench.errors import ArgumentParser, UserError
from lapbench.results.cells import Cells, Run, collect
from lapbench.results.files import write_atomically
from lapbench.results.metrics import DEFAULTS, SPLITS, MetricKind, kind_of, show, split_of
from lapbench.results.plan import FILE_NAME as PLAN_FILE
from lapbench.results.plan import Plan, read_plan
from lapbench.results.record import FILE_NAME as RECORD_FILE
from lapbench.results.record import Record, folders_with, load_records, read_record
from lapbench.results.statistics import Summary, summarize

MOST_NAMED = 20
"""Incomplete runs that the notes below a table name one by one."""


@dataclass(frozen=True)
class Entry:
    """One run in its cell: the metric's value if the run is finished and has it, and else why not."""

    run: Run
    value: float | None
    state: str
    """ "done", "nan", "inf", "-inf", "no metric", "running", "failed", "interrupted", "not started" or "no record"."""


@dataclass(frozen=True)
class Cell:
    """All runs of one schedule in one column.

    ``summary`` is over the finite values. ``rank`` is 1 for the best and 2 for the second of the column among complete
    cells; ties share. ``difference`` is the mean less that of the baseline in the same column, both complete.
    """

    entries: tuple[Entry, ...]
    summary: Summary | None
    rank: int | None = None
    difference: float | None = None

    @property
    def complete(self) -> bool:
        return all(entry.state == "done" for entry in self.entries)


@dataclass(frozen=True)
class Table:
    """A leaderboard, ready for any of the formats in `lapbench.results.formats`. Values are as recorded (fractions)."""

    title: str
    metric: str
    kind: MetricKind
    baseline: str | None
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: dict[tuple[str, str], Cell]
    caption: str
    notes: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        return all(cell.complete for cell in self.cells.values())


def leaderboard(
    records: Sequence[Record],
    baseline: str | None = None,
    metric: str | None = None,
    plans: Mapping[Path, Plan] | None = None,
    stage: str | None = None,
) -> Table:
    """Arrange ``records`` into a table of one metric.

    Args:
        records: from `load_records`.
        baseline: row that the others are compared with; by default the sweep's, else "0L" if there is such a row.
        metric: by default the sweep's, else the first of `lapbench.results.metrics.DEFAULTS` that a record has.
        plans: the sweeps by folder; by default those whose folder holds the records' folders.
        stage: of a sweep with stages, the one to show; by default the last.

    Raises:
        UserError: nothing to show, two runs of one cell and seed, unknown baseline, metric or stage.
    """
    if plans is None:
        parents = dict.fromkeys(parent for record in records if record.folder for parent in record.folder.parents[:2])
        plans = {folder: read_plan(folder) for folder in parents if (folder / PLAN_FILE).is_file()}
    placed = collect(records, plans, stage)
    if not placed.rows:
        raise UserError("no runs to make a table of")
    only_plan = next(iter(plans.values())) if len(plans) == 1 else None
    metric = _choose_metric(metric, _planned_metric(only_plan, placed) if only_plan else None, placed.records)
    baseline = _choose_baseline(baseline or (only_plan.baseline if only_plan else None), placed)
    kind = kind_of(metric)
    cells = {place: _cell(runs, metric) for place, runs in placed.runs.items()}
    for column in placed.columns:
        _rank(cells, column, kind)
        _compare(cells, column, baseline)
    return Table(
        title=only_plan.name if only_plan else "",
        metric=metric,
        kind=kind,
        baseline=baseline,
        rows=tuple(placed.rows),
        columns=tuple(placed.columns),
        cells=cells,
        caption=_caption(metric, kind, baseline, cells, placed.stages),
        notes=_notes(cells, placed),
    )


def _planned_metric(plan: Plan, placed: Cells) -> str | None:
    """The sweep's metric is one of its last stage; another stage is shown by it only if it has it too."""
    last = placed.stages == [*plan.stages[-1:]]
    return plan.metric if last or any(plan.metric in record.metrics for record in placed.records) else None


def _choose_metric(wanted: str | None, planned: str | None, records: Sequence[Record]) -> str:
    known = sorted({metric for record in records for metric in record.metrics})
    if planned and not any(record.status == "finished" for record in records):
        known = sorted({*known, planned})  # its turn comes at the end of a run
    name = wanted or planned or next((metric for metric in DEFAULTS if metric in known), None)
    if name in known:
        return name
    if not known:
        return name or DEFAULTS[0]  # nothing was measured yet: the table shows what runs and what is missing
    raise UserError(f"no record has the metric {name or ' or '.join(DEFAULTS)}; there are {', '.join(known)}")


def _choose_baseline(name: str | None, placed: Cells) -> str | None:
    if name is None:
        return "0L" if "0L" in placed.rows else None
    if name not in placed.rows:
        raise UserError(f"no schedule {name!r} to compare with; there are {', '.join(placed.rows)}")
    return name


def _cell(runs: Sequence[Run], metric: str) -> Cell:
    entries = tuple(_entry(run, metric) for run in runs)
    values = [entry.value for entry in entries if entry.value is not None and math.isfinite(entry.value)]
    return Cell(entries, summarize(values) if values else None)


def _entry(run: Run, metric: str) -> Entry:
    if run.record is None or run.record.status != "finished":
        return Entry(run, None, run.status)
    value = run.record.metrics.get(metric)
    if value is None:
        return Entry(run, None, "no metric")
    return Entry(run, value, "done" if math.isfinite(value) else str(value))


def _rank(cells: dict[tuple[str, str], Cell], column: str, kind: MetricKind) -> None:
    """Mark the best and the second of a column, by the mean as printed: equal numbers must not look different."""
    means = {
        place: float(show(cell.summary.mean, kind))
        for place, cell in cells.items()
        if place[1] == column and cell.complete and cell.summary
    }
    if kind.higher_is_better is None or len(means) < 2:
        return
    order = sorted(set(means.values()), reverse=kind.higher_is_better)
    for place, mean in means.items():
        if (rank := order.index(mean) + 1) <= 2:
            cells[place] = replace(cells[place], rank=rank)


def _compare(cells: dict[tuple[str, str], Cell], column: str, baseline: str | None) -> None:
    reference = cells.get((baseline, column)) if baseline else None
    if reference is None or not reference.complete or reference.summary is None:
        return
    for (row, where), cell in cells.items():
        if where == column and row != baseline and cell.complete and cell.summary:
            cells[row, where] = replace(cell, difference=cell.summary.mean - reference.summary.mean)


def _caption(
    metric: str, kind: MetricKind, baseline: str | None, cells: Mapping[tuple[str, str], Cell], stages: Sequence[str]
) -> str:
    """One line: metric, split, stage, statistic, and which checkpoint was scored."""
    records = [e.run.record for cell in cells.values() for e in cell.entries if e.state == "done" and e.run.record]
    data = {record.data for record in records}
    checkpoints = Counter(record.checkpoint or "not recorded" for record in records)
    split = split_of(metric)
    parts = [f"{metric}: {kind.title}{' in %' if kind.percent else ''}"]
    parts[0] += f" on the {split} split" if split in SPLITS else ""
    parts[0] += f" of {next(iter(data))}" if len(data) == 1 else ""
    parts[0] += f", by evaluation {split}" if split and split not in SPLITS else ""
    parts[0] += f", after stage {' or '.join(stages)}" if stages else ""
    if kind.higher_is_better is None:
        parts.append("not ranked, as it is not known which direction is better")
    else:
        parts.append(f"{'higher' if kind.higher_is_better else 'lower'} is better")
    parts.append("mean ± standard deviation (ddof 1) over n seeds")
    if len(checkpoints) == 1:
        parts.append(f"checkpoint scored: {next(iter(checkpoints))}")
    elif checkpoints:
        counts = (f"{name} ({n} of {len(records)} runs)" for name, n in checkpoints.items())
        parts.append(f"checkpoints scored: {', '.join(counts)}")
    if any(cell.difference is not None for cell in cells.values()):
        parts.append(f"Δ: difference to {baseline}{' in points' if kind.percent else ''}, before rounding")
    return "; ".join(parts) + "."


def _notes(cells: Mapping[tuple[str, str], Cell], placed: Cells) -> tuple[str, ...]:
    """What a reader must know about runs that are not, or not fully, in the table."""
    entries = [entry for cell in cells.values() for entry in cell.entries]
    incomplete = [entry for entry in entries if entry.state != "done"]
    notes = []
    if incomplete:
        counts = ", ".join(f"{n} {state}" for state, n in Counter(entry.state for entry in incomplete).items())
        notes.append(f"Incomplete: of {len(entries)} runs {counts}. Cells with such runs are not ranked or compared.")
    obstacles = [entry.run.waits_for for entry in incomplete if entry.run.waits_for]
    if obstacles:
        counts = ", ".join(f"{n} {state}" for state, n in Counter(run.status for run in obstacles).items())
        notes.append(f"Waiting for an earlier stage: {len(obstacles)} ({counts}).")
    named = [(entry.state, entry.run) for entry in incomplete] + [(run.status, run) for run in obstacles]
    named = [(state, run) for state, run in named if state not in ("not started", "running")]
    for state, run in named[:MOST_NAMED]:
        error = run.record.error if run.record else None
        notes.append(f"{state}: {run.folder}" + (f": {' '.join(error.split())}" if error else ""))
    if len(named) > MOST_NAMED:
        notes.append(f"and {len(named) - MOST_NAMED} more")
    if strays := [str(record.folder) for record in placed.strays]:
        notes.append(f"Left out, as the sweep's plan does not hold them: {', '.join(strays)}")
    return tuple(notes)


def main(argv: Sequence[str]) -> int:
    """``lapbench table``."""
    from lapbench.results.formats import FORMATS, SUFFIXES, emit, text

    parser = ArgumentParser(
        prog="lapbench table",
        description="Print the leaderboard of all runs in a folder: a row for each head schedule, a column for each "
        "data set (and other swept axis), mean and standard deviation over seeds.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="folder of a sweep, or any folder that holds runs")
    parser.add_argument(
        "--baseline",
        metavar="NAME",
        help="schedule that the others are compared with (default: the sweep's baseline, else 0L if it is there)",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="metric to show, as the records name it (default: the sweep's metric, else the first that there is of "
        f"{', '.join(DEFAULTS)})",
    )
    parser.add_argument("--stage", metavar="NAME", help="stage to show, of a sweep with stages (default: the last)")
    parser.add_argument(
        "--format",
        choices=sorted(FORMATS),
        help="text (default), markdown, latex (needs booktabs), csv (a line for each run), json, or html (one page); "
        "without it the suffix of --output decides",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write to FILE instead of printing")
    arguments = parser.parse_args(argv)
    records, plans = load_directory(arguments.directory)
    table = leaderboard(records, arguments.baseline, arguments.metric, plans, arguments.stage)
    output: Path | None = arguments.output
    name = arguments.format or (SUFFIXES.get(output.suffix.lower()) if output else None) or "text"
    if output:
        write_atomically(output, FORMATS[name](table))
    elif name == "text" and sys.stdout.isatty():
        emit(text(table, ansi=True, width=shutil.get_terminal_size().columns))
    else:
        emit(FORMATS[name](table))
    return 0


def load_directory(directory: Path) -> tuple[list[Record], dict[Path, Plan]]:
    """All records and sweep plans in ``directory`` and below. UserError: neither there, or one that cannot be read."""
    plans = {folder: read_plan(folder) for folder in folders_with(PLAN_FILE, directory)}
    if plans:  # then a folder without records is a sweep that has just begun
        return [read_record(folder) for folder in folders_with(RECORD_FILE, directory)], plans
    return load_records(directory), plans
