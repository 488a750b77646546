"""``lapbench compare``: the figures of several runs in one picture each, and the numbers as a table. No torch."""

import difflib
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lapbench.errors import ArgumentParser, UserError
from lapbench.figures.compare_table import anova_table
from lapbench.figures.data import FIELDS, Figures, Series, load_figure, merge
from lapbench.figures.save import FIGURES, save_figure
from lapbench.results.cells import Run, choose_metrics, collect
from lapbench.results.formats import emit
from lapbench.results.metrics import DEFAULTS
from lapbench.results.plan import FILE_NAME as PLAN_FILE
from lapbench.results.plan import Plan, read_plan
from lapbench.results.record import FILE_NAME as RECORD_FILE
from lapbench.results.record import Record
from lapbench.results.table import load_directory

FOLDER = "figures"
"""Of the figures, in the folder of a run, and of a comparison."""
MOST_NAMED = 5


def main(argv: Sequence[str]) -> int:
    """``lapbench compare``."""
    parser = ArgumentParser(
        prog="lapbench compare",
        description="Draw the figures of several runs in one picture each: a bar, curve or panel for each head "
        "schedule, mean and standard deviation over seeds. `lapbench analyze RUN` makes the figures of a run.",
    )
    parser.add_argument(
        "directories", metavar="RUN", type=Path, nargs="+", help="folder of a run, or one that holds runs, as a sweep"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        type=Path,
        help=f"folder that the figures go into (default: {FOLDER} inside RUN if there is one RUN that holds others, "
        f"else ./{FOLDER})",
    )
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="metric of the figure 'accuracy', as the records name it (default: the sweep's, else the first that "
        f"there is of {', '.join(DEFAULTS)})",
    )
    parser.add_argument("--figures", metavar="NAMES", help=f"some of {','.join(FIGURES)} (default: all that there are)")
    parser.add_argument(
        "--stage", metavar="NAME", help="stage to compare, of a sweep with stages (default: the last with figures)"
    )
    arguments = parser.parse_args(argv)
    wanted = _names(arguments.figures)
    records, plans = _load(arguments.directories)
    out = arguments.out or _default_out(arguments.directories)
    if own := [record.folder for record in records if record.folder and record.folder / FOLDER == out.resolve()]:
        raise UserError(f"{out} holds the figures of the run {own[0]}: expected another folder after --out")
    figures = compare(records, plans, arguments.metric, arguments.stage, wanted)
    for name, data in figures.items():
        emit("".join(f"{path}\n" for path in save_figure(out, name, data)))
    if "anova" in figures:
        emit("\n" + anova_table(figures["anova"]))
    return 0


def compare(
    records: Sequence[Record],
    plans: Mapping[Path, Plan],
    metric: str | None = None,
    stage: str | None = None,
    wanted: Sequence[str] = (),
) -> dict[str, Figures]:
    """The data of each figure: those that the runs have, merged, and "accuracy", from the records of finished runs.

    Args:
        records: from `lapbench.results.load_records`.
        plans: the sweeps by folder.
        metric: of the figure "accuracy"; by default the sweep's, else a usual one, else there is no such figure.
        stage: of a sweep with stages; by default the last with figures, and for the metric the last.
        wanted: names of figures; by default all that there are.

    Raises:
        UserError: no figures, different data sets or other swept values, unknown metric or stage, one of
            ``wanted`` that no run has, or a file that does not hold a figure.
    """
    figures_stage = stage or _stage_with_figures(records, plans)
    runs = _placed(records, plans, figures_stage)
    if not runs:
        raise UserError(f"no runs to compare: none{f' of stage {figures_stage}' if figures_stage else ''} has begun")
    parts = {id(run): _figures_of(run) for run in runs}
    without = [run.folder for run in runs if not parts[id(run)]]
    names = [name for name in FIGURES if any(name in found for found in parts.values())]
    figures = {name: merge([parts[id(run)][name] for run in runs if name in parts[id(run)]]) for name in names}
    if not wanted or "accuracy" in wanted:
        scored = runs if stage == figures_stage else _placed(records, plans, stage)
        if data := _accuracy(scored, plans, metric, _head_counts(figures)):
            figures["accuracy"] = data
    if without and figures.keys() - {"accuracy"}:
        _warn_without(without)
    if not figures.keys() - {"accuracy"} and tuple(wanted) != ("accuracy",):
        more = f" and {len(runs) - 1} more" if len(runs) > 1 else ""
        raise UserError(
            f"no figures in {runs[0].folder}{more}: expected {runs[0].folder / FOLDER}/*.json; "
            f"make them with `lapbench analyze {runs[0].folder}`"
        )
    if missing := [name for name in wanted if name not in figures]:
        raise UserError(f"no run has the figure {missing[0]}: there are {', '.join(figures) or 'none'}")
    return {name: data for name, data in figures.items() if not wanted or name in wanted}


def _names(text: str | None) -> list[str]:
    names = [name.strip() for name in text.split(",")] if text is not None else []
    for name in names:
        if name not in FIGURES:
            near = difflib.get_close_matches(name, FIGURES, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"unknown figure {name!r}; expected some of {', '.join(FIGURES)}{hint}")
    return names


def _load(directories: Sequence[Path]) -> tuple[list[Record], dict[Path, Plan]]:
    """All records in the folders and below, each once, and the sweeps that they belong to."""
    records: dict[Path, Record] = {}
    plans: dict[Path, Plan] = {}
    for directory in directories:
        found, below = load_directory(directory)
        for folder, plan in below.items():
            plans.setdefault(folder.resolve(), plan)
        for record in found:
            assert record.folder is not None
            records.setdefault(record.folder.resolve(), record)
    for folder in [parent for path in records for parent in path.parents[:2]]:
        if folder not in plans and (folder / PLAN_FILE).is_file():  # a single run of a sweep: its place is known there
            plans[folder] = read_plan(folder)
    return [replace(record, folder=folder) for folder, record in records.items()], plans


def _default_out(directories: Sequence[Path]) -> Path:
    """Beside the runs of a sweep; a single run's own figures are not written over."""
    if len(directories) == 1 and not (directories[0] / RECORD_FILE).exists():
        return directories[0] / FOLDER
    return Path(FOLDER)


def _placed(records: Sequence[Record], plans: Mapping[Path, Plan], stage: str | None) -> list[Run]:
    """The runs that have a record. UserError: they differ in more than heads and seeds, or two are equal in both."""
    if stage and not any(plan.stages for plan in plans.values()):
        raise UserError(f"no stage {stage!r}: expected a sweep with stages, got none")
    runs: list[Run] = []
    for folder, plan in plans.items():
        inside = [record for record in records if _is_inside(record, folder)]
        cells = collect(inside, {folder: plan}, stage if plan.stages else None)
        runs += [run for found in cells.runs.values() for run in found if run.record]
        if cells.strays:
            names = ", ".join(str(record.folder) for record in cells.strays[:MOST_NAMED])
            print(f"lapbench: left out, as the sweep's plan does not hold them: {names}", file=sys.stderr)
    others = [record for record in records if not any(_is_inside(record, folder) for folder in plans)]
    runs += [run for found in collect(others, {}).runs.values() for run in found]
    _refuse_mixed(runs)
    return runs


def _is_inside(record: Record, folder: Path) -> bool:
    return record.folder is not None and record.folder.is_relative_to(folder)


def _refuse_mixed(runs: Sequence[Run]) -> None:
    columns: dict[str, Run] = {}
    cells: dict[tuple[str, str], Run] = {}
    for run in runs:
        columns.setdefault(run.column, run)
        if (other := cells.setdefault((run.row, run.seed), run)) is not run and other.column == run.column:
            raise UserError(
                f"two runs of {run.row} with seed {run.seed}: {other.folder} and {run.folder}; expected one"
            )
    if len(columns) > 1:
        examples = ", ".join(f"{name} ({run.folder})" for name, run in list(columns.items())[:MOST_NAMED])
        raise UserError(f"runs of different data sets or settings cannot share a picture: {examples}")


def _stage_with_figures(records: Sequence[Record], plans: Mapping[Path, Plan]) -> str | None:
    """The last stage of the sweeps in which a run has figures; None without stages or figures: the last of all."""
    drawn = {record.folder for record in records if record.folder and any((record.folder / FOLDER).glob("*.json"))}
    for folder, plan in plans.items():
        for stage in reversed(plan.stages):
            if any(run.stage == stage and folder / run.folder in drawn for run in plan.runs):
                return stage
    return None


def _figures_of(run: Run) -> dict[str, Figures]:
    """What ``lapbench analyze`` wrote into the run's folder, under the run's name in tables."""
    found = {}
    for name in FIELDS.keys() - {"accuracy"}:  # which is made from records
        path = run.folder / FOLDER / f"{name}.json"
        if not path.exists():
            continue
        data = load_figure(path)
        if data["figure"] != name:
            raise UserError(f"{path}: expected the figure {name}, got {data['figure']}")
        place = {"label": run.row, "reference": run.reference}
        found[name] = {**data, "series": [{**series, **place} for series in data["series"]]}
    return found


def _head_counts(figures: Mapping[str, Figures]) -> dict[str, Series]:
    """By label, a series that knows the numbers of heads."""
    return {series["label"]: series for data in figures.values() for series in data["series"]}


def _accuracy(
    runs: Sequence[Run], plans: Mapping[Path, Plan], metric: str | None, known: Mapping[str, Series]
) -> Figures | None:
    """The figure of a metric; None if none was asked for and no usual one was measured."""
    records = [run.record for run in runs if run.record]
    planned = next(iter(plans.values())).metrics if len(plans) == 1 else ()
    if metric is None:
        measured = {name for record in records for name in record.metrics}
        metric = next((name for name in (*planned, *DEFAULTS) if name in measured), None)
        if metric is None:
            return None
    else:
        choose_metrics([metric], [], records)  # refuses one that no record has
    series, dropped = [], Counter[str]()
    for run in runs:
        assert run.record is not None
        value = run.record.metrics.get(metric)
        if run.record.status != "finished":
            dropped[run.record.status] += 1
        elif value is None:
            dropped["without it"] += not run.reference  # raw pixels have no loss
        elif not math.isfinite(value):
            dropped[f"with {value}"] += 1
        else:
            series.append(_score(run, run.record, metric, value, known.get(run.row)))
    if dropped := +dropped:
        counts = ", ".join(f"{n} {why}" for why, n in dropped.items())
        print(f"lapbench: {metric}: of {len(runs)} runs left out: {counts}", file=sys.stderr)
    return {"figure": "accuracy", "series": series} if series else None


def _score(run: Run, record: Record, metric: str, value: float, known: Series | None) -> Series:
    number = run.row.removesuffix("L")
    heads = float(number) if number.isdecimal() and run.row != number else None
    return {
        "label": run.row,
        "schedule": record.schedule,
        "laplacian_heads": known["laplacian_heads"] if known else heads,
        "num_heads": known["num_heads"] if known else None,
        "seed": record.seed,
        "reference": run.reference,
        "metric": metric,
        "value": value,
    }


def _warn_without(folders: Sequence[Path]) -> None:
    named = ", ".join(map(str, folders[:MOST_NAMED])) + (", ..." if len(folders) > MOST_NAMED else "")
    print(
        f"lapbench: left out, as {'it has' if len(folders) == 1 else 'they have'} no figures: {named}; make them with "
        f"`lapbench analyze {folders[0]}`",
        file=sys.stderr,
    )
