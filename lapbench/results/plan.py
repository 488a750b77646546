"""``sweep.json``: the runs that a sweep consists of, so that a table knows its columns and what is still missing.

``lapbench sweep`` writes it into its out folder; ``lapbench table`` reads it there.
"""

import dataclasses
from dataclasses import dataclass, field
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
        folder: its folder inside the sweep's folder: "heads-2_seed-0", with stages "heads-2_seed-0/sft".
        labels: label of its value on each axis, {"heads": "2", "seed": "0"}.
        arguments: of ``lapbench fit``, without the run folder; "{pretrain}" stands for the folder of that stage.
        configs: digest of the content of each config file among the arguments.
        stage: the stage of its cell that it is; None in a sweep without stages.
        earlier: the folders of the stages before it, by name, the first one first.
        reference: the name of its row in tables, if it is there only for the others to be compared with.
    """

    folder: str
    labels: dict[str, str]
    arguments: tuple[str, ...]
    configs: dict[str, str]
    stage: str | None = None
    earlier: dict[str, str] = field(default_factory=dict)
    reference: str | None = None


@dataclass(frozen=True)
class Plan:
    """All runs of a sweep. ``axes`` gives each axis its role: its values are the head schedules (the rows of a table),
    the seeds (which a cell averages over), or they make columns. ``baseline`` and ``metrics`` are the table's defaults.
    ``retired`` are runs that an earlier version of the sweep made and that are no longer part of it.
    """

    name: str
    axes: dict[str, str]
    runs: tuple[PlannedRun, ...]
    baseline: str | None = None
    metrics: tuple[str, ...] = ()
    retired: tuple[PlannedRun, ...] = ()

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages, in order; none if each cell is one run."""
        return tuple(dict.fromkeys(run.stage for run in self.runs if run.stage))

    def axes_for(self, role: str) -> list[str]:
        return [axis for axis, found in self.axes.items() if found == role]


def write_plan(folder: Path, plan: Plan) -> None:
    """Write ``folder/sweep.json`` atomically. UserError: it cannot be written."""
    values = {
        "name": plan.name,
        "baseline": plan.baseline,
        "metric": list(plan.metrics) if len(plan.metrics) > 1 else next(iter(plan.metrics), None),
        "axes": plan.axes,
        "runs": [_as_dict(run) for run in plan.runs],
        "retired": [_as_dict(run) for run in plan.retired],
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
            metrics=_metrics(values["metric"]),
            retired=tuple(_run(value) for value in values["retired"]),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a sweep's plan ({type(error).__name__}: {error})") from error
    for axis, role in plan.axes.items():
        if role not in ROLES:
            raise UserError(f"{path}: axis {axis!r} has role {role!r}, expected one of {', '.join(ROLES)}")
    folders = {run.folder for run in plan.runs}
    for run in plan.runs:
        if run.labels.keys() != plan.axes.keys() or not _is_safe(run.folder, run.stage):
            raise UserError(f"{path}: run {run.folder!r} does not fit the axes {', '.join(plan.axes)}")
        if unknown := [name for name in run.earlier.values() if name not in folders]:
            raise UserError(f"{path}: run {run.folder!r} starts from {unknown[0]!r}, which is none of its runs")
    return plan


def _is_safe(folder: str, stage: str | None) -> bool:
    """Whether it is inside the sweep's folder, as deep as it should be."""
    parts = folder.split("/")
    return len(parts) == (1 if stage is None else 2) and all(part not in ("", ".", "..") for part in parts)


def _as_dict(run: PlannedRun) -> dict[str, Any]:
    values = dataclasses.asdict(run)
    if run.stage is None:
        del values["stage"], values["earlier"]
    if run.reference is None:
        del values["reference"]
    return values


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r}")
    return value


def _metrics(value: Any) -> tuple[str, ...]:
    """One is a string, several are a list."""
    if value is None:
        return ()
    return tuple(_text(name) for name in value) if isinstance(value, list) else (_text(value),)


def _run(value: dict[str, Any]) -> PlannedRun:
    return PlannedRun(
        folder=_text(value["folder"]),
        labels={_text(axis): _text(label) for axis, label in value["labels"].items()},
        arguments=tuple(_text(argument) for argument in value["arguments"]),
        configs={_text(name): _text(digest) for name, digest in value["configs"].items()},
        stage=_text(value["stage"]) if "stage" in value else None,
        earlier={_text(stage): _text(folder) for stage, folder in value.get("earlier", {}).items()},
        reference=_text(value["reference"]) if "reference" in value else None,
    )
