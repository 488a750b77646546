"""``lapbench compare`` on made-up runs: what it draws, prints and refuses."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lapbench.figures import load_figure, save
from lapbench.results.files import write_json
from lapbench.results.plan import Plan, PlannedRun, write_plan
from lapbench.results.record import Record, read_record, write_record
from tests.figures.samples import series

Command = Callable[..., Any]


def add(
    folder: Path, schedule: str, seed: int, within: float | None = 0.2, top1: float | None = 0.9, **record: Any
) -> None:
    """A finished run, with the figure anova unless ``within`` is None."""
    metrics = {} if top1 is None else {"test/top1": top1}
    values: dict[str, Any] = {"data": "Digits", "status": "finished", "metrics": metrics, **record}
    write_record(folder, Record(task="T", backbone="vit", schedule=schedule, seed=seed, **values))
    if within is not None:
        one = series(
            "anova",
            schedule,
            seed,
            within_sequence=[0.5, within],
            within_class=[0.1, 0.7 - within],
            between_class=[0.4, 0.3],
        )
        write_json(folder / "figures/anova.json", {"figure": "anova", "series": [one]})


@pytest.fixture
def compare(lapbench: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command without the seconds of drawing."""
    monkeypatch.setattr(save, "draw", lambda data: {"png": b"", "svg": b""})
    return partial(lapbench, "compare")


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """0L with two seeds, 2L with one."""
    folder = tmp_path / "sweep"
    add(folder / "a", "0L", 0, 0.30, 0.90)
    add(folder / "b", "0L", 1, 0.20, 0.94)
    add(folder / "c", "2L", 0, 0.10, 0.95)
    return folder


def test_it_merges_the_runs_and_prints_files_and_fractions(sweep: Path, lapbench: Command) -> None:
    outcome = lapbench("compare", sweep)
    assert (outcome.status, outcome.err) == (0, "")
    out = sweep / "figures"
    files = [str(out / f"{name}.{suffix}") for name in ("anova", "accuracy") for suffix in ("json", "png", "svg")]
    lines = outcome.out.splitlines()
    assert lines[:6] == files
    assert sorted(str(path) for path in out.iterdir()) == sorted(files)
    assert [line.split() for line in lines[7:]] == [
        ["Variance", "of", "tokens", "in", "layer", "1,", "mean", "±", "SD", "over", "n", "seeds"],
        [],
        ["heads", "within", "sequence", "(%)", "within", "class", "(%)", "between", "classes", "(%)", "n"],
        [lines[10]],
        ["0L", "25.00", "±", "7.07", "45.00", "±", "7.07", "30.00", "±", "0.00", "2"],
        ["2L", "10.00", "60.00", "30.00", "1"],
    ]
    merged = load_figure(out / "anova.json")["series"]
    assert [(s["label"], s["seed"], s["within_sequence"][1]) for s in merged] == [
        ("0L", 0, 0.3),
        ("0L", 1, 0.2),
        ("2L", 0, 0.1),
    ]
    scored = load_figure(out / "accuracy.json")["series"]
    assert [(s["label"], s["laplacian_heads"], s["num_heads"], s["metric"], s["value"]) for s in scored] == [
        ("0L", 0, 4, "test/top1", 0.9),
        ("0L", 0, 4, "test/top1", 0.94),
        ("2L", 2, 4, "test/top1", 0.95),
    ]


def test_a_second_time_does_not_take_its_own_figures_for_those_of_a_run(sweep: Path, compare: Command) -> None:
    compare(sweep)
    first = (sweep / "figures/anova.json").read_bytes()
    assert compare(sweep).status == 0
    assert (sweep / "figures/anova.json").read_bytes() == first


def test_single_runs_go_into_the_working_folder(
    sweep: Path, compare: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = (sweep / "a/figures/anova.json").read_bytes()
    outcome = compare(sweep / "a", "sweep/c", sweep / "a", "--figures", "anova")
    assert outcome.out.splitlines()[:3] == [f"figures/anova.{suffix}" for suffix in ("json", "png", "svg")]
    assert len(load_figure(tmp_path / "figures/anova.json")["series"]) == 2  # the run given twice counts once
    assert (sweep / "a/figures/anova.json").read_bytes() == own
    assert {path.name for path in (sweep / "a/figures").iterdir()} == {"anova.json"}


def test_out_and_a_metric_of_ones_own(sweep: Path, compare: Command, tmp_path: Path) -> None:
    for name, loss in (("a", 0.5), ("b", float("nan")), ("c", 0.25)):
        record = read_record(sweep / name)
        write_record(sweep / name, replace(record, metrics={**record.metrics, "val/loss": loss}))
    outcome = compare(sweep, "--out", tmp_path / "out", "--metric", "val/loss", "--figures", "accuracy")
    assert outcome.err == "lapbench: val/loss: of 3 runs left out: 1 with nan\n"
    assert outcome.status == 0
    scored = load_figure(tmp_path / "out/accuracy.json")["series"]
    assert [(s["label"], s["metric"], s["value"]) for s in scored] == [
        ("0L", "val/loss", 0.5),
        ("2L", "val/loss", 0.25),
    ]


def test_runs_without_figures_are_named_with_the_command_that_makes_them(sweep: Path, compare: Command) -> None:
    add(sweep / "d", "4L", 0, None)
    add(sweep / "e", "4L", 1, None, None, status="failed")
    outcome = compare(sweep)
    assert outcome.status == 0
    assert outcome.err == (
        "lapbench: test/top1: of 5 runs left out: 1 failed\n"
        f"lapbench: left out, as they have no figures: {sweep}/d, {sweep}/e; make them with "
        f"`lapbench analyze {sweep}/d`\n"
    )
    known = {
        s["label"]: (s["laplacian_heads"], s["num_heads"])
        for s in load_figure(sweep / "figures/accuracy.json")["series"]
    }
    assert known["4L"] == (4, None)


def test_references_of_a_sweep_go_last(sweep: Path, compare: Command) -> None:
    add(sweep / "untrained", "0L", 0, 0.45, 0.3)
    rows = {"a": ("0", "0", None), "b": ("0", "1", None), "c": ("2", "0", None), "untrained": ("0", "0", "untrained")}
    planned = tuple(
        PlannedRun(name, {"heads": heads, "seed": seed}, (), {}, reference=reference)
        for name, (heads, seed, reference) in rows.items()
    )
    write_plan(sweep, Plan("digits", {"heads": "schedule", "seed": "seed"}, planned, metrics=("test/top1",)))
    outcome = compare(sweep)
    assert (outcome.status, outcome.err) == (0, "")
    assert [line.split()[0] for line in outcome.out.splitlines()[9:] if line[0] != "─"] == [
        "heads",
        "0L",
        "2L",
        "untrained",
    ]
    for name in ("anova", "accuracy"):
        last = load_figure(sweep / f"figures/{name}.json")["series"][-1]
        assert (last["label"], last["schedule"], last["reference"]) == ("untrained", "0L", True)
    single = compare(sweep / "untrained", sweep / "c", "--out", sweep / "figures")
    assert single.out.splitlines()[-1].split()[0] == "untrained"


def test_of_a_chain_of_stages_the_one_with_figures(tmp_path: Path, compare: Command) -> None:
    planned = []
    for heads in ("0", "2"):
        labels = {"heads": heads}
        add(tmp_path / heads / "pretrain", f"{heads}L", 0, 0.2, None)
        add(tmp_path / heads / "sft", f"{heads}L", 0, None, 0.9)
        planned += [
            PlannedRun(f"{heads}/pretrain", labels, (), {}, "pretrain"),
            PlannedRun(f"{heads}/sft", labels, (), {}, "sft", {"pretrain": f"{heads}/pretrain"}),
        ]
    write_plan(tmp_path, Plan("chain", {"heads": "schedule"}, tuple(planned)))
    outcome = compare(tmp_path)
    assert (outcome.status, outcome.err) == (0, "")
    assert len(load_figure(tmp_path / "figures/anova.json")["series"]) == 2
    assert [s["value"] for s in load_figure(tmp_path / "figures/accuracy.json")["series"]] == [0.9, 0.9]
    outcome = compare(tmp_path, "--stage", "sft")
    assert f"no figures in {tmp_path}/0/sft and 1 more" in outcome.err
    assert "did you mean sft?" in compare(tmp_path, "--stage", "sftt").err


def refused(outcome: Any) -> str:
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("lapbench: error: ")
    return str(outcome.err)[len("lapbench: error: ") : -1]


def test_mistakes_are_one_line(sweep: Path, compare: Command, tmp_path: Path) -> None:
    assert refused(compare(tmp_path / "swep")).startswith(f"{tmp_path}/swep does not exist: expected")
    (tmp_path / "empty").mkdir()
    assert f"no record.json in {tmp_path}/empty or below" in refused(compare(tmp_path / "empty"))
    assert refused(compare(sweep, "--figures", "anova,simplx")).endswith("(did you mean simplex?)")
    assert refused(compare(sweep, "--figures", "pca")) == ("no run has the figure pca: there are anova")
    assert refused(compare(sweep, "--metric", "test/top2")) == (
        "no record has the metric test/top2: did you mean test/top1?"
    )
    assert refused(compare(sweep, "--stage", "sft")) == "no stage 'sft': expected a sweep with stages, got none"
    assert "the following arguments are required: RUN" in refused(compare())
    assert not (sweep / "figures").exists()


def test_runs_that_do_not_belong_together_are_named(sweep: Path, compare: Command, tmp_path: Path) -> None:
    add(tmp_path / "other", "0L", 7, data="CIFAR10")
    message = refused(compare(sweep, tmp_path / "other"))
    assert message == (
        f"runs of different data sets or settings cannot share a picture: Digits ({sweep}/a), "
        f"CIFAR10 ({tmp_path}/other)"
    )
    add(tmp_path / "again", "2L", 0)
    message = refused(compare(sweep, tmp_path / "again"))
    assert message.startswith("two runs of 2L on Digits with seed 0: ")


def test_two_sweeps_of_the_same_data_share_a_picture_unless_they_hold_equal_runs(
    tmp_path: Path, compare: Command
) -> None:
    for name, heads in (("one", "0"), ("other", "2")):
        add(tmp_path / name / "run", f"{heads}L", 0)
        run = PlannedRun("run", {"heads": heads, "seed": "0"}, (), {})
        write_plan(tmp_path / name, Plan(name, {"heads": "schedule", "seed": "seed"}, (run,)))
    both = [tmp_path / "one", tmp_path / "other"]
    outcome = compare(*both, "--out", tmp_path / "out", "--figures", "anova")
    assert outcome.status == 0
    assert [s["label"] for s in load_figure(tmp_path / "out/anova.json")["series"]] == ["0L", "2L"]
    add(both[1] / "run", "0L", 0)
    message = refused(compare(*both))
    assert message == f"two runs of 0L with seed 0: {both[0]}/run and {both[1]}/run; expected one"


def test_runs_that_the_plan_does_not_hold_are_named(sweep: Path, compare: Command) -> None:
    planned = (PlannedRun("a", {"seed": "0"}, (), {}), PlannedRun("b", {"seed": "1"}, (), {}))
    write_plan(sweep, Plan("digits", {"seed": "seed"}, planned))
    outcome = compare(sweep, "--figures", "accuracy")
    assert outcome.err == f"lapbench: left out, as the sweep's plan does not hold them: {sweep}/c\n"
    assert len(load_figure(sweep / "figures/accuracy.json")["series"]) == 2


def test_the_figures_of_a_run_are_not_written_over(
    sweep: Path, compare: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = (sweep / "a/figures/anova.json").read_bytes()
    monkeypatch.chdir(sweep / "a")
    message = refused(compare(sweep / "a", sweep / "c"))
    assert message == f"figures holds the figures of the run {sweep}/a: expected another folder after --out"
    assert (sweep / "a/figures/anova.json").read_bytes() == own


def test_no_figures_at_all(tmp_path: Path, compare: Command) -> None:
    add(tmp_path / "a", "0L", 0, None)
    message = refused(compare(tmp_path))
    assert message == (
        f"no figures in {tmp_path}/a: expected {tmp_path}/a/figures/*.json; "
        f"make them with `lapbench analyze {tmp_path}/a`"
    )
    outcome = compare(tmp_path, "--figures", "accuracy")  # needs the records only
    assert (outcome.status, outcome.err) == (0, "")


def test_a_broken_file_is_named(sweep: Path, compare: Command) -> None:
    (sweep / "a/figures/anova.json").write_text('{"figure": "similarity", "series": []}')
    assert refused(compare(sweep)).startswith(f"{sweep}/a/figures/anova.json does not hold a figure: ")
    one = {"figure": "similarity", "series": [series("similarity")]}
    write_json(sweep / "a/figures/anova.json", one)
    assert refused(compare(sweep)) == (f"{sweep}/a/figures/anova.json: expected the figure anova, got similarity")


def test_it_loads_no_torch(sweep: Path) -> None:
    code = (
        "import sys; from lapbench.figures.compare import main\n"
        "print(*sorted({'matplotlib', 'numpy'} & set(sys.modules)), 'before')\n"
        "main(sys.argv[1:])\n"
        "print(*sorted({'torch', 'lightning', 'yaml', 'matplotlib.pyplot'} & set(sys.modules)), 'after')"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(sweep), "--figures", "accuracy"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    assert output.splitlines()[0] == "before"
    assert output.splitlines()[-1] == "after"
    assert (sweep / "figures/accuracy.png").exists()
