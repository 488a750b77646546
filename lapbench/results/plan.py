"""``sweep.json``: the runs that a sweep consists of, so that a table knows its columns and what is still missing.

``lapbench sweep`` writes it into its out folder; ``lapbench table`` reads it there.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lapbench.errors import UserError
from lapbench.results.files import read_json, write_json

FILE_NAME = "sweep.json"
LOG_NAME = "log.txt"
"""Output of a run, in its folder: there from the moment that the sweep first started it."""
FORMAT = 1
ROLES = ("schedule", "seed", "column")


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        folder: name of its folder inside the sweep's folder.
        labels: label of its value on each axis, {"heads": "2", "seed": "0"}.
        arguments: of ``lapbench fit``, without the run folder.
        configs: digest of the content of each config file among the arguments.
    """

    folder: str
    labels: dict[str, str]
    arguments: tuple[str, ...]
    configs: dict[str, str]


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep. ``axes`` gives each axis its role: its values are the head schedules (the rows of a table),
    the seeds (which a cell averages over), or they make columns. ``baseline`` and ``metric`` are the table's defaults.
    ``retired`` are runs that an earlier version of the sweep made and that are no longer part of it.
    """

    name: str
    axes: dict[str, str]
    runs: tuple[PlannedRun, ...]
    baseline: str | None = None
    metric: str | None = None
    retired: tuple[PlannedRun, ...] = ()

    def axes_for(self, role: str) -> list[str]:
        return [axis for axis, found in self.axes.items() if found == role]


def write_plan(folder: Path, plan: Plan) -> None:
    """Write ``folder/sweep.json`` atomically. UserError: it cannot be written."""
    values = {
        "name": plan.name,
        "baseline": plan.baseline,
        "metric": plan.metric,
        "axes": plan.axes,
        "runs": [dataclasses.asdict(run) for run in plan.runs],
        "retired": [dataclasses.asdict(run) for run in plan.retired],
    }
    write_json(folder / FILE_NAME, {"format": FORMAT, **values})


def read_plan(folder: Path) -> Plan:
    """The plan in ``folder``. UserError: unreadable, not JSON, unknown format, or not what `write_plan` writes."""
    path = folder / FILE_NAME
    values = read_json(path)
    if values.get("format") != FORMAT:
        raise UserError(f"{path}: unknown format {values.get('format')!r}, expected {FORMAT}")
    try:
        plan = Plan(
            name=_text(values["name"]),
            axes={_text(axis): _text(role) for axis, role in values["axes"].items()},
            runs=tuple(_run(value) for value in values["runs"]),
            baseline=None if values["baseline"] is None else _text(values["baseline"]),
            metric=None if values["metric"] is None else _text(values["metric"]),
            retired=tuple(_run(value) for value in values["retired"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a sweep's plan ({type(error).__name__}: {error})") from error
    for axis, role in plan.axes.items():
        if role not in ROLES:
            raise UserError(f"{path}: axis {axis!r} has role {role!r}, expected one of {', '.join(ROLES)}")
    for run in plan.runs:
        if run.labels.keys() != plan.axes.keys() or Path(run.folder).name != run.folder or run.folder == "..":
            raise UserError(f"{path}: run {run.folder!r} does not fit the axes {', '.join(plan.axes)}")
    return plan


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value


def _run(value: dict[str, Any]) -> PlannedRun:
    return PlannedRun(
        folder=_text(value["folder"]),
        labels={_text(axis): _text(label) for axis, label in value["labels"].items()},
        arguments=tuple(_text(argument) for argument in value["arguments"]),
        configs={_text(name): _text(digest) for name, digest in value["configs"].items()},
    )
