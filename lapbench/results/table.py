"""Leaderboards: ``lapbench table`` and `leaderboard`. A row for each schedule, a column for each data set or metric."""

import math
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lapbench.errors import ArgumentParser, UserError
from lapbench.results.caption import caption
from lapbench.results.cells import Cells, Run, choose_metrics, collect
from lapbench.results.files import write_atomically
from lapbench.results.metrics import DEFAULTS, MetricKind, kind_of, show, split_of
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
    """ "done", "nan", "inf", "-inf", "no metric", "running", "failed", "interrupted", "not started" or "no record"; or
    "none": the run is a reference that does not have the metric, as raw pixels have no loss."""


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
        return all(entry.state in ("done", "none") for entry in self.entries)


@dataclass(frozen=True)
class Column:
    """One metric on one data set. ``name`` is its heading, ``data`` the data set and values of other swept axes."""

    name: str
    data: str
    metric: str

    @property
    def kind(self) -> MetricKind:
        return kind_of(self.metric)


@dataclass(frozen=True)
class Table:
    """A leaderboard, ready for any of the formats in `lapbench.results.formats`. Values are as recorded (fractions).

    ``cells`` are by the row and the column's name. The last rows are the ``references``, neither ranked nor compared.
    """

    title: str
    baseline: str | None
    rows: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: dict[tuple[str, str], Cell]
    caption: str
    notes: tuple[str, ...]
    references: tuple[str, ...] = ()

    @property
    def metrics(self) -> list[str]:
        return list(dict.fromkeys(column.metric for column in self.columns))

    @property
    def data(self) -> list[str]:
        return list(dict.fromkeys(column.data for column in self.columns))

    @property
    def is_complete(self) -> bool:
        return all(cell.complete for cell in self.cells.values())


def leaderboard(
    records: Sequence[Record],
    baseline: str | None = None,
    metric: str | Sequence[str] | None = None,
    plans: Mapping[Path, Plan] | None = None,
    stage: str | None = None,
) -> Table:
    """Arrange ``records`` into a table of one metric, or of several side by side.

    Args:
        records: from `load_records`.
        baseline: row that the others are compared with; by default the sweep's, else "0L" if there is such a row.
        metric: one or several; by default the sweep's, else the first of `lapbench.results.metrics.DEFAULTS` that a
            record has.
        plans: the sweeps by folder; by default those whose folder holds the records' folders.
        stage: of a sweep with stages, the one to show; by default the last.

    Raises:
        UserError: nothing to show, two runs of one cell and seed, unknown baseline, metric or stage, a metric
            twice.
    """
    if plans is None:
        parents = dict.fromkeys(parent for record in records if record.folder for parent in record.folder.parents[:2])
        plans = {folder: read_plan(folder) for folder in parents if (folder / PLAN_FILE).is_file()}
    placed = collect(records, plans, stage)
    if not placed.rows:
        raise UserError("no runs to make a table of")
    only_plan = next(iter(plans.values())) if len(plans) == 1 else None
    wanted = [metric] if isinstance(metric, str) else metric or []
    metrics = choose_metrics(wanted, _planned_metrics(only_plan, placed) if only_plan else [], placed.records)
    baseline = _choose_baseline(baseline or (only_plan.baseline if only_plan else None), placed)
    columns = _columns(placed.columns, metrics)
    cells = {
        (row, column.name): _cell(runs, column.metric)
        for (row, data), runs in placed.runs.items()
        for column in columns
        if column.data == data
    }
    schedules = [row for row in placed.rows if row not in placed.references]
    for column in columns:
        _rank(cells, column, schedules)
        _compare(cells, column, baseline, schedules)
    compared = any(cell.difference is not None for cell in cells.values())
    return Table(
        title=only_plan.name if only_plan else "",
        baseline=baseline,
        rows=tuple(placed.rows),
        columns=columns,
        cells=cells,
        caption=caption(
            metrics, _scored(cells), placed.stages, baseline if compared else None, tuple(placed.references)
        ),
        notes=_notes(cells, columns, placed),
        references=tuple(placed.references),
    )


def _planned_metrics(plan: Plan, placed: Cells) -> list[str]:
    """The sweep's metrics are those of its last stage; another stage is shown by the ones that it has too."""
    last = placed.stages == [*plan.stages[-1:]]
    return [metric for metric in plan.metrics if last or any(metric in record.metrics for record in placed.records)]


def _columns(data: Sequence[str], metrics: Sequence[str]) -> tuple[Column, ...]:
    """Headed by what tells them apart: data, metric or both."""
    if len(metrics) == 1:
        return tuple(Column(name, name, metrics[0]) for name in data)
    several = len(data) > 1
    return tuple(Column(f"{d}: {metric}" if several else metric, d, metric) for d in data for metric in metrics)


def _choose_baseline(name: str | None, placed: Cells) -> str | None:
    schedules = [row for row in placed.rows if row not in placed.references]
    if name is None:
        return "0L" if "0L" in schedules else None
    if name not in schedules:
        raise UserError(f"no schedule {name!r} to compare with; there are {', '.join(schedules)}")
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
        failed = split_of(metric) in run.record.failed_evaluations
        return Entry(run, None, "none" if run.reference and not failed else "no metric")
    return Entry(run, value, "done" if math.isfinite(value) else str(value))


def _rank(cells: dict[tuple[str, str], Cell], column: Column, rows: Sequence[str]) -> None:
    """Mark the best and the second of a column, by the mean as printed: equal numbers must not look different."""
    kind = column.kind
    means = {
        place: float(show(cell.summary.mean, kind))
        for place, cell in cells.items()
        if place[0] in rows and place[1] == column.name and cell.complete and cell.summary
    }
    if kind.higher_is_better is None or len(means) < 2:
        return
    order = sorted(set(means.values()), reverse=kind.higher_is_better)
    for place, mean in means.items():
        if (rank := order.index(mean) + 1) <= 2:
            cells[place] = replace(cells[place], rank=rank)


def _compare(cells: dict[tuple[str, str], Cell], column: Column, baseline: str | None, rows: Sequence[str]) -> None:
    reference = cells.get((baseline, column.name)) if baseline else None
    if reference is None or not reference.complete or reference.summary is None:
        return
    for (row, where), cell in cells.items():
        if row in rows and where == column.name and row != baseline and cell.complete and cell.summary:
            cells[row, where] = replace(cell, difference=cell.summary.mean - reference.summary.mean)


def _scored(cells: Mapping[tuple[str, str], Cell]) -> list[Record]:
    """The records that have a value in the table, each once."""
    records = [e.run.record for cell in cells.values() for e in cell.entries if e.state == "done" and e.run.record]
    return list({id(record): record for record in records}.values())


def _notes(cells: Mapping[tuple[str, str], Cell], columns: Sequence[Column], placed: Cells) -> tuple[str, ...]:
    """What a reader must know about runs that are not, or not fully, in the table."""
    metric_of = {column.name: column.metric for column in columns}
    found: dict[tuple[int, str], tuple[str, Run, list[str]]] = {}  # a run counts once, in however many columns it is
    for (_, name), cell in cells.items():
        for entry in cell.entries:
            _, _, metrics = found.setdefault((id(entry.run), entry.state), (entry.state, entry.run, []))
            metrics.append(metric_of[name])
    incomplete = [each for each in found.values() if each[0] not in ("done", "none")]
    notes = []
    if incomplete:
        total = len({run for run, _ in found})
        counts = ", ".join(f"{n} {state}" for state, n in Counter(state for state, _, _ in incomplete).items())
        notes.append(f"Incomplete: of {total} runs {counts}. Cells with such runs are not ranked or compared.")
    obstacles = [run.waits_for for _, run, _ in incomplete if run.waits_for]
    if obstacles:
        counts = ", ".join(f"{n} {state}" for state, n in Counter(run.status for run in obstacles).items())
        notes.append(f"Waiting for an earlier stage: {len(obstacles)} ({counts}).")
    several = len({*metric_of.values()}) > 1
    named = [
        (f"{state} ({', '.join(metrics)})" if several and run.status == "finished" else state, run)
        for state, run, metrics in incomplete
    ]
    named += [(run.status, run) for run in obstacles]
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
        "data set (and other swept axis) and metric, mean and standard deviation over seeds.",
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
        action="append",
        help="metric to show, as the records name it; give it again for each further one (default: the sweep's, else "
        f"the first that there is of {', '.join(DEFAULTS)})",
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
