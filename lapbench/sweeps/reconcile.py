"""What is already there of a sweep: which runs are finished, and whether all were made with the sweep's arguments."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lapbench.errors import UserError
from lapbench.results.plan import FILE_NAME as PLAN_FILE
from lapbench.results.plan import Plan, PlannedRun, read_plan
from lapbench.results.record import FILE_NAME as RECORD_FILE
from lapbench.results.record import Record, read_record


def find_record(folder: Path) -> Record | None:
    """The record in a run's folder, None before the run has written one. UserError: it cannot be read."""
    return read_record(folder) if (folder / RECORD_FILE).exists() else None


def find_records(out: Path, plan: Plan) -> dict[str, Record]:
    """The records of the planned runs by folder name."""
    found = {run.folder: find_record(out / run.folder) for run in plan.runs}
    return {name: record for name, record in found.items() if record}


def status_of(record: Record | None) -> str | None:
    """The status of a run for a sweep: one that has finished with a failed evaluation is to be tried again."""
    if record is None:
        return None
    return "failed" if record.status == "finished" and record.failed_evaluations else record.status


def reconcile(out: Path, plan: Plan) -> Plan:
    """Check ``plan`` against the runs that an earlier version of the sweep made in ``out``.

    Returns:
        ``plan``, knowing the runs that are no longer part of it.

    Raises:
        UserError: a run that has a record was made with other arguments or configs, by something else than this
            sweep, or from an earlier stage that is no longer there: starting the sweep again would mix the results of
            two configurations in one table.
    """
    earlier = read_plan(out) if (out / PLAN_FILE).exists() else Plan(plan.name, plan.axes, ())
    known = {run.folder: run for run in (*earlier.retired, *earlier.runs)}
    current = {run.folder for run in plan.runs}
    made = {name for name in {*known, *current} if (out / name / RECORD_FILE).exists()}
    for run in plan.runs:
        later = [name for name, other in known.items() if name in made and run.folder in other.earlier.values()]
        if run.folder not in made and later:
            raise UserError(
                f"{out / later[0]} holds a run that started from {run.folder}, which is no longer there; "
                f"use another --out, or move {' and '.join(later)} away too, to run the chain anew from {run.stage}"
            )
        if run.folder not in made:
            continue
        what = " and ".join(["that folder", *later])
        advice = f"use another --out, or move {what} away to run {'them' if later else 'it'} anew"
        if run.folder not in known:
            raise UserError(f"{out / run.folder} holds a run that this sweep did not make: {advice}")
        if difference := _difference(known[run.folder], run):
            raise UserError(f"{out / run.folder} holds a run with other settings: {difference}; {advice}")
    return replace(plan, retired=tuple(run for name, run in known.items() if name in made - current))


def _difference(old: PlannedRun, new: PlannedRun) -> str | None:
    """What differs between two versions of a run, in words; None if nothing does."""
    if old.arguments != new.arguments:
        before, after = _joined(old.arguments), _joined(new.arguments)
        gone = " ".join(argument for argument in before if argument not in after)
        come = " ".join(argument for argument in after if argument not in before)
        if not gone and not come:
            return f"{' '.join(before)} then, {' '.join(after)} now (another order)"
        return f"{gone or 'nothing'} then, {come or 'nothing'} now"
    if old.earlier != new.earlier:
        stages = [", ".join(run.earlier) or "none" for run in (old, new)]
        return f"the stages before it were {stages[0]} then, are {stages[1]} now"
    changed = [name for name, digest in new.configs.items() if old.configs.get(name) != digest]
    return f"the content of config {', '.join(changed)} has changed since" if changed else None


def _joined(arguments: Sequence[str]) -> list[str]:
    """Arguments with each ``--config`` and its name in one."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1] == "--config":
            joined[-1] = f"--config {argument}"
        else:
            joined.append(argument)
    return joined
