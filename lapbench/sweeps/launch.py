"""``lapbench sweep``: run all runs of a sweep that are not finished yet, then print the table."""

import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lapbench.errors import ArgumentParser, UserError, positive
from lapbench.process import lock_folder
from lapbench.results.files import write_atomically
from lapbench.results.formats import emit, markdown, text
from lapbench.results.plan import Plan, write_plan
from lapbench.results.table import leaderboard, load_directory
from lapbench.sweeps.grid import load_sweep
from lapbench.sweeps.progress import open_display
from lapbench.sweeps.reconcile import find_records, reconcile, status_of
from lapbench.sweeps.runner import Outcome, Runner, fit_command

FIT = (sys.executable, "-m", "lapbench", "fit")
ACTIONS = {
    None: "run",
    "finished": "skip, finished",
    "running": "resume",
    "interrupted": "resume",
    "failed": "try again",
}
"""What the sweep does with a run, by the status in its record."""


def main(argv: Sequence[str]) -> int:
    """``lapbench sweep``."""
    parser = ArgumentParser(
        prog="lapbench sweep",
        description="Run every combination of a sweep's axes, each as a process in a folder of its own, then print the "
        "table. Started again, it skips finished runs, resumes interrupted ones and tries failed ones again.",
        epilog="Exit status: 0 all runs are finished, 1 some failed, 2 bad input, 130 or 143 stopped by a signal. "
        "Ctrl-C lets the runs save first; pressed twice, it kills them.",
    )
    parser.add_argument("sweep", metavar="SWEEP", help="sweep file, by path or by name (quickstart)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder for the runs (default: runs/NAME of the sweep)")
    parser.add_argument("--jobs", metavar="N", type=positive, default=1, help="runs at a time (default: 1)")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be done, with the command of each run, and do nothing"
    )
    arguments = parser.parse_args(argv)
    sweep = load_sweep(arguments.sweep)
    out = arguments.out or Path("runs") / sweep.name
    if arguments.dry_run:
        emit(dry_run(sweep.plan(), out))
        return 0
    return launch(sweep.plan(), out, arguments.jobs)


def launch(plan: Plan, out: Path, jobs: int = 1, command: Sequence[str] = FIT) -> int:
    """Run what is missing of ``plan`` in the folder ``out``.

    Args:
        plan: from ``load_sweep(...).plan()``.
        out: folder of the sweep; made if missing.
        jobs: runs at a time.
        command: the trainer; exit status 0 with a record that says "finished" means finished, 75 start me again,
            anything else failed.

    Returns:
        Exit status: 0 all finished, 1 some failed, 128 + n stopped by signal n.

    Raises:
        UserError: ``out`` cannot be written, another sweep is at work in it, or it holds other runs than the plan's.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make {out}: {error.strerror or error}") from error
    with lock_folder(out, "another `lapbench sweep`"):
        plan = reconcile(out, plan)
        records = find_records(out, plan)
        write_plan(out, plan)
        todo = [run for run in plan.runs if status_of(records.get(run.folder)) != "finished"]
        done = len(plan.runs) - len(todo)
        emit(f"{plan.name}: {_size(plan)} in {out}{f', {done} of them already finished' if done else ''}\n")
        outcome = Outcome()
        if todo:
            metric = next(iter(plan.metrics), None)
            display = open_display(len(plan.runs), metric)
            outcome = Runner(out, todo, command, jobs, display, done, metric).run()
        if outcome.signal:
            emit(_stopped(outcome, len(plan.runs)))
            return 128 + outcome.signal
        if outcome.failures:
            emit(_failures(outcome, len(plan.runs)))
        _print_table(out)
        return 1 if outcome.failures else 0


def _size(plan: Plan) -> str:
    """ "6 runs", or "6 runs (2 x pretrain, midtrain, sft)" with stages."""
    count = len(plan.runs)
    return f"{count} runs ({count // len(plan.stages)} x {', '.join(plan.stages)})" if plan.stages else f"{count} runs"


def _print_table(out: Path) -> None:
    records, plans = load_directory(out)
    table = leaderboard(records, plans=plans)
    write_atomically(out / "table.txt", text(table))
    write_atomically(out / "table.md", markdown(table))
    on_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if on_terminal else 120
    emit("\n" + text(table, ansi=on_terminal, width=width))
    again = f"lapbench table {shlex.quote(str(out))}"
    emit(f"\nThe table is in {out / 'table.txt'} and table.md; `{again}` prints it again.\n")


def _failures(outcome: Outcome, total: int) -> str:
    lines = [f"\n{len(outcome.failures)} of {total} runs failed:"]
    for failure in outcome.failures:
        lines += [f"  {failure.run.folder}: {failure.reason}", f"    log: {failure.log}"]
    if outcome.waiting:
        lines.append(f"{len(outcome.waiting)} later stages wait for them: {_some(outcome.waiting)}.")
    return "\n".join([*lines, "Start the sweep again to try them again.", ""])


def _stopped(outcome: Outcome, total: int) -> str:
    failed = f", {len(outcome.failures)} failed" if outcome.failures else ""
    return (
        f"Stopped: {len(outcome.unfinished)} of {total} runs are unfinished ({_some(outcome.unfinished)}){failed}. "
        "Start the sweep again to continue.\n"
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])


def dry_run(plan: Plan, out: Path, command: Sequence[str] = FIT) -> str:
    """What `launch` would do, as text: for each run the action and the command. UserError: as `launch`."""
    if out.exists():
        plan = reconcile(out, plan)
    records = find_records(out, plan)
    actions = [ACTIONS[status_of(records.get(run.folder))] for run in plan.runs]
    counts = ", ".join(f"{n} {action}" for action, n in Counter(actions).items())
    lines = [f"{plan.name}: {_size(plan)} in {out} ({counts})"]
    for index, (run, action) in enumerate(zip(plan.runs, actions, strict=True), 1):
        lines.append(f"[{index}/{len(plan.runs)}] {run.folder}: {action}")
        lines.append(f"    {shlex.join(fit_command(command, out, run))}")
    return "\n".join([*lines, ""])
