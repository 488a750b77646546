"""Which metrics a table shows, and which run belongs into which cell: from the records, and from the sweeps' plans."""

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lapbench.errors import UserError
from lapbench.results.metrics import DEFAULTS, split_of
from lapbench.results.plan import LOG_NAME, Plan, PlannedRun
from lapbench.results.record import Record


@dataclass(frozen=True)
class Run:
    """A run and its place: ``row`` is its head schedule, or the name of the ``reference`` that it is.

    ``record`` is None as long as it has written none.
    """

    row: str
    column: str
    seed: str
    folder: Path
    record: Record | None
    labels: Mapping[str, str]
    waits_for: "Run | None" = None
    """The first of its earlier stages that has not finished, as long as it has no record itself."""
    reference: bool = False

    @property
    def status(self) -> str:
        """The record's; before there is one, "not started", or "no record" if the sweep's log shows that it was."""
        if self.record:
            return self.record.status
        return "no record" if (self.folder / LOG_NAME).exists() else "not started"


@dataclass(frozen=True)
class Cells:
    """The runs of each (row, column), the rows and columns in order, and the records that no plan knows.

    The last rows are the ``references``.

    ``stages`` are those that the runs of planned chains are in, ``records`` all that are not of other stages.
    """

    runs: dict[tuple[str, str], list[Run]]
    rows: list[str]
    columns: list[str]
    strays: list[Record]
    stages: list[str]
    records: list[Record]
    references: list[str]


def natural(name: str) -> list[str | int]:
    """Sort key that puts "2L" before "10L"."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def collect(records: Sequence[Record], plans: Mapping[Path, Plan], stage: str | None = None) -> Cells:
    """Place all records and planned runs.

    A record inside a planned sweep's folder is placed by that plan, any other by its data set (and its backbone and
    task, where the records differ in them). Of a chain of stages only one is placed: ``stage``, by default the last.

    Raises:
        UserError: two runs of the same cell with the same seed, or no such stage.
    """
    stages = {folder: _choose_stage(plan, stage) for folder, plan in plans.items()}
    if stage and not any(stages.values()):
        raise UserError(f"no stage {stage!r}: expected a sweep with `stages`, got none")
    inside = {folder: [r for r in records if r.folder and r.folder.is_relative_to(folder)] for folder in plans}
    planned = {id(record) for found in inside.values() for record in found}
    runs: list[Run] = []
    strays: list[Record] = []
    elsewhere: set[Path] = set()
    for folder, plan in plans.items():
        prefix = f"{folder.name}: " if len(plans) > 1 else ""
        by_name = {r.folder.relative_to(folder).as_posix(): r for r in inside[folder] if r.folder}
        runs += _place_planned(folder, plan, stages[folder], by_name, prefix)
        elsewhere |= {folder / run.folder for run in plan.runs if run.stage != stages[folder]}
        strays += [record for name, record in by_name.items() if name not in {run.folder for run in plan.runs}]
    columns = list(dict.fromkeys(run.column for run in runs))
    others = _place_unplanned([record for record in records if id(record) not in planned])
    columns += sorted({run.column for run in others} - set(columns), key=natural)
    runs += others
    cells: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        cells.setdefault((run.row, run.column), []).append(run)
    _refuse_duplicates(cells.values())
    references = list(dict.fromkeys(run.row for run in runs if run.reference))
    rows = [*sorted({run.row for run in runs} - {*references}, key=natural), *references]
    shown = [record for record in records if record.folder not in elsewhere]
    shown_stages = list(dict.fromkeys(filter(None, stages.values())))
    return Cells(cells, rows, columns, strays, shown_stages, shown, references)


def _choose_stage(plan: Plan, wanted: str | None) -> str | None:
    if not plan.stages or wanted is None:
        return plan.stages[-1] if plan.stages else None
    if wanted not in plan.stages:
        near = difflib.get_close_matches(wanted, plan.stages, n=1)
        hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(plan.stages)}"
        raise UserError(f"no stage {wanted!r} in sweep {plan.name}: {hint}")
    return wanted


def _place_planned(
    folder: Path, plan: Plan, stage: str | None, records: Mapping[str, Record], prefix: str
) -> list[Run]:
    known = {run.folder: (run, records.get(run.folder)) for run in plan.runs}
    found = [(run, record) for run, record in known.values() if run.stage == stage]
    heads, seeds, others = (plan.axes_for(role) for role in ("schedule", "seed", "column"))
    data = Counter(record.data for _, record in found if record)
    schedules = {run.labels[axis]: record.schedule for run, record in known.values() if record for axis in heads}
    schedule = next(iter(Counter(r.schedule for _, r in known.values() if r)), "?")

    def row(run: PlannedRun, record: Record | None) -> str:
        if run.reference is not None:
            return run.reference
        if record:
            return record.schedule
        if not heads:
            return schedule
        label = run.labels[heads[0]]
        # A run of the same heads knows the schedule's name; a plain number of heads has an obvious one.
        return schedules.get(label) or (f"{label}L" if label.isdecimal() else label)

    def column(run: PlannedRun, record: Record | None) -> str:
        if others:
            return prefix + ", ".join(run.labels[a] if a == "data" else f"{a} {run.labels[a]}" for a in others)
        return prefix + (record.data if record else max(data, key=data.__getitem__, default=plan.name))

    def seed(run: PlannedRun, record: Record | None) -> str:
        if seeds:
            return ", ".join(run.labels[axis] for axis in seeds)
        return _seed(record) if record else "?"

    def place(run: PlannedRun, record: Record | None) -> Run:
        before = () if record else (place(*known[name]) for name in run.earlier.values())
        obstacle = next((other for other in before if other.status != "finished"), None)
        where = row(run, record), column(run, record), seed(run, record)
        return Run(*where, folder / run.folder, record, run.labels, obstacle, run.reference is not None)

    return [place(run, record) for run, record in found]


def _place_unplanned(records: Sequence[Record]) -> list[Run]:
    differing = [name for name in ("backbone", "task") if len({getattr(record, name) for record in records}) > 1]
    return [
        Run(
            row=record.schedule,
            column=", ".join([record.data, *(getattr(record, name) for name in differing)]),
            seed=_seed(record),
            folder=record.folder or Path(),
            record=record,
            labels={},
        )
        for record in records
    ]


def _seed(record: Record) -> str:
    return "none" if record.seed is None else str(record.seed)


def _refuse_duplicates(cells: Iterable[list[Run]]) -> None:
    for runs in cells:
        folders: dict[str, Path] = {}
        for run in runs:
            if run.seed in folders:
                what = f"{run.row} on {run.column} with seed {run.seed}"
                raise UserError(
                    f"two runs of {what}: {folders[run.seed]} and {run.folder}; expected one (move the other elsewhere)"
                )
            folders[run.seed] = run.folder


def choose_metrics(wanted: Sequence[str], planned: Sequence[str], records: Sequence[Record]) -> Sequence[str]:
    """The metrics that a table shows: those asked for, else those of the sweep, else the first default that there is.

    Raises:
        UserError: one that no record has, or one twice.
    """
    names = wanted or planned
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise UserError(f"expected each metric once, got {repeated[0]} twice")
    known = {metric for record in records for metric in record.metrics}
    if not any(record.status == "finished" for record in records):
        known |= {*planned}  # their turn comes at the end of a run
    failed = {evaluation for record in records for evaluation in record.failed_evaluations}
    known |= {name for name in names if split_of(name) in failed}
    if not known:
        return names or DEFAULTS[:1]  # nothing was measured yet: the table shows what runs and what is missing
    names = names or [name for name in DEFAULTS if name in known][:1]
    missing = [name for name in names if name not in known]
    if names and not missing:
        return names
    near = difflib.get_close_matches(missing[0], sorted(known), n=1) if missing else []
    hint = f": did you mean {near[0]}?" if near else f"; there are {', '.join(sorted(known))}"
    raise UserError(f"no record has the metric {missing[0] if missing else ' or '.join(DEFAULTS)}{hint}")
