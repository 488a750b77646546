"""Leaderboards: hand-computed numbers, ranks, incomplete cells, errors."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lapbench.errors import UserError
from lapbench.results import Record, leaderboard, load_records, write_record
from lapbench.results.formats import score
from lapbench.results.metrics import kind_of, show, show_metrics
from lapbench.results.plan import Plan, PlannedRun, read_plan, write_plan
from lapbench.results.table import Table, load_directory, main

BASE = Record("ImageClassification", "Digits", "vit", "0L", 0, status="finished", checkpoint="last")


def record(schedule: str, seed: int, value: float | None, data: str = "Digits", **changes: object) -> Record:
    folder = Path("runs") / f"{data}-{schedule}-{seed}"
    metrics = {} if value is None else {"test/top1": value}
    return replace(BASE, schedule=schedule, seed=seed, metrics=metrics, data=data, folder=folder, **changes)  # type: ignore[arg-type]


def column(schedule: str, *values: float, data: str = "Digits") -> list[Record]:
    return [record(schedule, seed, value, data) for seed, value in enumerate(values)]


def scores(table: Table, of: str) -> dict[str, str]:
    return {row: score(table.cells.get((row, of)), table.columns[0].kind) for row in table.rows}


def test_90_92_94_is_92_plus_minus_2() -> None:
    table = leaderboard(column("0L", 0.90, 0.92, 0.94))
    assert scores(table, "Digits") == {"0L": "92.00 ± 2.00"}
    assert table.cells["0L", "Digits"].summary is not None
    assert table.cells["0L", "Digits"].summary.n == 3


def test_one_seed_shows_no_deviation() -> None:
    assert scores(leaderboard(column("0L", 0.9583)), "Digits") == {"0L": "95.83"}


def test_rows_are_in_natural_order_and_columns_are_data_sets() -> None:
    records = [r for name in ("10L", "2L", "0L", "0-12L") for r in column(name, 0.9)] + column(
        "2L", 0.8, data="CIFAR10"
    )
    table = leaderboard(records)
    assert table.rows == ("0-12L", "0L", "2L", "10L")
    assert table.data == ["CIFAR10", "Digits"]
    assert scores(table, "CIFAR10") == {"0-12L": "–", "0L": "–", "2L": "80.00", "10L": "–"}


def test_best_second_and_difference() -> None:
    # Means 94.6, 96.9, 96.7.
    records = column("0L", 0.93, 0.946, 0.962) + column("2L", 0.967, 0.969, 0.971) + column("4L", 0.962, 0.967, 0.972)
    table = leaderboard(records)
    cells = {row: table.cells[row, "Digits"] for row in table.rows}
    assert {row: cell.rank for row, cell in cells.items()} == {"0L": None, "2L": 1, "4L": 2}
    assert cells["0L"].difference is None
    assert cells["2L"].difference == pytest.approx(0.023)
    assert cells["4L"].difference == pytest.approx(0.021)
    against = leaderboard(records, baseline="2L")
    assert against.cells["0L", "Digits"].difference == pytest.approx(-0.023)


def test_ties_share_and_are_judged_by_the_printed_number() -> None:
    table = leaderboard([*column("0L", 0.9), *column("1L", 0.95), *column("2L", 0.950001), *column("3L", 0.92)])
    ranks = {row: table.cells[row, "Digits"].rank for row in table.rows}
    assert ranks == {"0L": None, "1L": 1, "2L": 1, "3L": 2}


def test_a_lower_loss_is_better_and_an_unknown_metric_is_not_ranked() -> None:
    records = [
        replace(BASE, schedule=f"{i}L", metrics={"val/loss": loss, "val/novelty": loss}, folder=Path(f"runs/{i}"))
        for i, loss in enumerate([0.25, 0.5, 0.125])
    ]
    table = leaderboard(records, metric="val/loss")
    assert [table.cells[row, "Digits"].rank for row in table.rows] == [2, None, 1]
    assert "lower is better" in table.caption
    table = leaderboard(records, metric="val/novelty")
    assert [table.cells[row, "Digits"].rank for row in table.rows] == [None] * 3
    assert "not known which direction is better" in table.caption


@pytest.mark.parametrize(
    ("name", "higher", "percent"),
    [
        ("test/top1", True, True),
        ("val/top5", True, True),
        ("arc_easy/accuracy", True, True),
        ("mmlu/mean_accuracy", True, True),
        ("train/loss", False, False),
        ("val/ema_loss", False, False),
        ("val/bits_per_byte", False, False),
        ("perplexity", False, False),
        ("val/closs", None, False),
        ("top1/speed", None, False),
    ],
)
def test_direction_and_unit(name: str, higher: bool | None, percent: bool) -> None:
    assert (kind_of(name).higher_is_better, kind_of(name).percent) == (higher, percent)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.05, "0.05000"), (1.5, "1.500"), (12.3456, "12.35"), (1234.5678, "1235"), (0, "0.000"), (3.2e-6, "3.200e-06")],
)
def test_other_metrics_have_four_significant_digits(value: float, text: str) -> None:
    assert show(value, kind_of("val/loss")) == text


def test_numbers() -> None:
    assert show(0.0123, kind_of("test/top1"), sign=True) == "+1.23"
    assert show(-0.0123, kind_of("test/top1"), sign=True) == "-1.23"
    assert show(-0.00001, kind_of("test/top1"), sign=True) == "0.00"
    assert show(-0.0021, kind_of("val/loss"), scale=0.5, sign=True) == "-0.0021"
    assert show_metrics({"test/top1": 0.9694, "val/loss": math.nan}, "test/top1") == "test/top1 96.94 %"
    assert show_metrics({"val/loss": math.nan}, "val/loss") == "val/loss nan"


@pytest.mark.parametrize(
    ("third", "text", "state"),
    [
        (record("2L", 2, None, status="running"), "99.50 (2/3 seeds)", "running"),
        (record("2L", 2, 1.0, status="failed", error="out of memory"), "99.50 (2/3 seeds)", "failed"),
        (record("2L", 2, None, status="interrupted"), "99.50 (2/3 seeds)", "interrupted"),
        (record("2L", 2, None), "99.50 (2/3 seeds)", "no metric"),
        (record("2L", 2, math.nan), "nan in 1/3 seeds", "nan"),
        (record("2L", 2, math.inf), "inf in 1/3 seeds", "inf"),
    ],
)
def test_an_incomplete_cell_is_shown_as_such_and_never_best(third: Record, text: str, state: str) -> None:
    others = column("0L", 0.9, 0.9, 0.9) + column("1L", 0.8, 0.8, 0.8)
    table = leaderboard([*others, *column("2L", 0.99, 1.0), third])
    cell = table.cells["2L", "Digits"]
    assert score(cell, table.columns[0].kind) == text
    assert (cell.rank, cell.difference, cell.complete) == (None, None, False)
    assert [table.cells[row, "Digits"].rank for row in ("0L", "1L")] == [1, 2]
    assert table.notes[0].startswith(f"Incomplete: of 9 runs 1 {state}.")
    if state == "failed":
        assert "failed: runs/Digits-2L-2: out of memory" in table.notes


def test_a_cell_without_any_score() -> None:
    running = [record("0L", seed, None, status="running") for seed in (0, 1)]
    table = leaderboard([*running, *column("2L", 0.9)])
    assert score(table.cells["0L", "Digits"], table.columns[0].kind) == "running"
    table = leaderboard([*running, record("0L", 2, None, status="failed"), *column("2L", 0.9)])
    assert score(table.cells["0L", "Digits"], table.columns[0].kind) == "2 running, 1 failed"
    assert table.cells["2L", "Digits"].difference is None  # the baseline is incomplete


def test_the_metric_is_chosen_by_what_there_is() -> None:
    both = replace(BASE, metrics={"val/top1": 0.5, "test/top1": 0.6})
    assert leaderboard([both]).metrics == ["test/top1"]
    assert leaderboard([replace(BASE, metrics={"val/top1": 0.5})]).metrics == ["val/top1"]
    assert leaderboard([both], metric="val/top1").metrics == ["val/top1"]
    with pytest.raises(
        UserError, match=r"no record has the metric test/top1 or .* or val/bits_per_byte; there are val/loss"
    ):
        leaderboard([replace(BASE, metrics={"val/loss": 0.5})])
    with pytest.raises(UserError, match=r"no record has the metric test/top9: did you mean test/top1\?"):
        leaderboard([both], metric="test/top9")
    with pytest.raises(UserError, match=r"no record has the metric speed; there are test/top1, val/top1"):
        leaderboard([both], metric="speed")


def test_the_caption_says_what_the_numbers_are() -> None:
    records = [*column("0L", 0.9, 0.8), record("2L", 0, 0.7, checkpoint="best val/top1")]
    caption = leaderboard(records).caption
    assert "top-1 accuracy in % on the test split of Digits" in caption
    assert "mean ± standard deviation (ddof 1)" in caption
    assert "checkpoints scored: last (2 of 3 runs), best val/top1 (1 of 3 runs)" in caption
    assert "difference to 0L in points" in caption
    assert "difference" not in leaderboard(column("0L", 0.9, 0.8)).caption


def test_unknown_baseline_lists_the_schedules() -> None:
    with pytest.raises(UserError, match=r"no schedule '3L' to compare with; there are 0L, 10L"):
        leaderboard(column("10L", 0.9) + column("0L", 0.9), baseline="3L")
    assert leaderboard(column("2L", 0.9)).baseline is None


def test_the_same_seed_twice_names_both_folders() -> None:
    twice = [record("0L", 0, 0.9), replace(record("0L", 0, 0.8), folder=Path("runs/again"))]
    with pytest.raises(UserError, match=r"two runs of 0L on Digits with seed 0: runs/Digits-0L-0 and runs/again"):
        leaderboard(twice)


def test_different_backbones_are_different_columns() -> None:
    table = leaderboard([record("0L", 0, 0.9), replace(record("0L", 0, 0.8), backbone="big", folder=Path("b"))])
    assert table.data == ["Digits, big", "Digits, vit"]


# ---- with a sweep's plan ----


def make_sweep(folder: Path, written: dict[str, Record], axes: dict[str, str], labels: list[dict[str, str]]) -> None:
    runs = [PlannedRun("_".join(f"{a}-{v}" for a, v in each.items()), each, (), {}) for each in labels]
    write_plan(folder, Plan("demo", axes, tuple(runs), metrics=("test/top1",)))
    for name, each in written.items():
        write_record(folder / name, each)


def test_planned_runs_that_were_not_started_are_shown(tmp_path: Path) -> None:
    labels = [{"heads": heads, "seed": seed} for heads in ("0", "2", "0,1,2,3") for seed in ("0", "1")]
    written = {"heads-0_seed-0": record("0L", 0, 0.9), "heads-0_seed-1": record("0L", 1, 0.92)}
    written |= {"heads-0,1,2,3_seed-0": record("0_1L_2L_3L", 0, 0.95), "old": record("9L", 0, 0.9)}
    make_sweep(tmp_path, written, {"heads": "schedule", "seed": "seed"}, labels)
    table = leaderboard(load_records(tmp_path))
    expected = {"0L": "91.00 ± 1.41", "0_1L_2L_3L": "95.00 (1/2 seeds)", "2L": "not started"}
    assert scores(table, "Digits") == expected
    assert any("does not hold" in note or "do not hold" in note or "Left out" in note for note in table.notes)
    assert leaderboard(*_directory(tmp_path)).cells == table.cells


def _directory(folder: Path) -> tuple[list[Record], None, None, dict[Path, Plan]]:
    records, plans = load_directory(folder)
    return records, None, None, plans


def test_other_axes_make_columns_in_the_order_of_the_plan(tmp_path: Path) -> None:
    labels = [{"data": d, "heads": "0", "drop-path": p} for d in ("imagenet", "cifar10") for p in ("0.4", "0.1")]
    written = {"data-cifar10_heads-0_drop-path-0.1": record("0L", 7, 0.9, data="CIFAR10")}
    make_sweep(tmp_path, written, {"data": "column", "heads": "schedule", "drop-path": "column"}, labels)
    table = leaderboard(load_records(tmp_path))
    assert table.data == [f"{d}, drop-path {p}" for d in ("imagenet", "cifar10") for p in ("0.4", "0.1")]
    assert table.rows == ("0L",)
    assert score(table.cells["0L", "cifar10, drop-path 0.1"], table.columns[0].kind) == "90.00"


def test_two_sweeps_in_one_directory_are_kept_apart(tmp_path: Path) -> None:
    for name, value in (("a", 0.9), ("b", 0.8)):
        written = {"heads-0": record("0L", 0, value)}
        make_sweep(tmp_path / name, written, {"heads": "schedule"}, [{"heads": "0"}, {"heads": "1"}])
    table = leaderboard(*_directory(tmp_path))
    assert table.data == ["a: Digits", "b: Digits"]
    assert scores(table, "b: Digits") == {"0L": "80.00", "1L": "not started"}


def test_a_sweep_that_has_just_begun(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_sweep(tmp_path, {}, {"heads": "schedule"}, [{"heads": "0"}, {"heads": "2"}])
    assert main([str(tmp_path)]) == 0
    assert "Incomplete: of 2 runs 2 not started" in capsys.readouterr().out
    write_record(tmp_path / "heads-0", replace(record("0L", 0, None, status="running"), metrics={"val/top1": 0.5}))
    (tmp_path / "heads-2").mkdir()
    (tmp_path / "heads-2" / "log.txt").touch()  # it ended, or is still importing, without having written a record
    assert main([str(tmp_path)]) == 0
    assert "of 2 runs 1 running, 1 no record" in capsys.readouterr().out


def make_chains(folder: Path, written: dict[str, Record], *metrics: str) -> None:
    """Two schedules, each pre-trained, then fine-tuned."""
    runs = []
    for heads in ("0", "2"):
        first = PlannedRun(f"heads-{heads}/pre", {"heads": heads}, (), {}, "pre")
        runs += [first, replace(first, folder=f"heads-{heads}/sft", stage="sft", earlier={"pre": first.folder})]
    write_plan(folder, Plan("chains", {"heads": "schedule"}, tuple(runs), metrics=metrics or ("test/top1",)))
    for name, each in written.items():
        write_record(folder / name, each)


def test_of_a_chain_the_last_stage_is_shown_or_the_one_asked_for(tmp_path: Path) -> None:
    values = {"heads-0/pre": 0.1, "heads-0/sft": 0.5, "heads-2/pre": 0.2, "heads-2/sft": 0.6}
    make_chains(tmp_path, {name: record(f"{name[6]}L", 0, value) for name, value in values.items()})
    for table in (leaderboard(load_records(tmp_path)), leaderboard(*_directory(tmp_path), "sft")):
        assert scores(table, "Digits") == {"0L": "50.00", "2L": "60.00"}
        assert table.cells["2L", "Digits"].difference == pytest.approx(0.1)
        assert table.notes == ()
    assert scores(leaderboard(*_directory(tmp_path), "pre"), "Digits") == {"0L": "10.00", "2L": "20.00"}


def test_what_a_missing_last_stage_waits_for(tmp_path: Path) -> None:
    written = {
        "heads-0/pre": record("0L", 0, None, status="failed", error="no space left"),
        "heads-2/pre": record("2L", 0, 0.2, data="Text"),
        "other": record("9L", 0, 0.2),
    }
    make_chains(tmp_path, written)
    table = leaderboard(*_directory(tmp_path))
    assert (table.metrics, table.data, table.rows) == (["test/top1"], ["chains"], ("0L", "2L"))
    assert table.notes == (
        "Incomplete: of 2 runs 2 not started. Cells with such runs are not ranked or compared.",
        "Waiting for an earlier stage: 1 (1 failed).",
        f"failed: {tmp_path / 'heads-0' / 'pre'}: no space left",
        f"Left out, as the sweep's plan does not hold them: {tmp_path / 'other'}",
    )
    assert [name for name, cell in table.cells.items() if cell.complete] == []
    assert "2 not started" not in " ".join(leaderboard(*_directory(tmp_path), "pre").notes)


def test_an_earlier_stage_need_not_have_the_metric_of_the_sweep(tmp_path: Path) -> None:
    losses = {
        name: replace(BASE, schedule=f"{name[6]}L", metrics={"val/bits_per_byte": 1.5})
        for name in ("heads-0/pre", "heads-2/pre")
    }
    make_chains(tmp_path, losses, "arc_easy/accuracy")
    assert leaderboard(*_directory(tmp_path)).metrics == ["arc_easy/accuracy"]  # its turn comes
    table = leaderboard(*_directory(tmp_path), "pre")
    assert table.metrics == ["val/bits_per_byte"]
    assert scores(table, "Digits") == {"0L": "1.500", "2L": "1.500"}
    assert "after stage pre; lower is better" in table.caption


def test_an_unknown_stage(tmp_path: Path) -> None:
    make_chains(tmp_path / "chains", {})
    with pytest.raises(UserError, match="no stage 'xyz' in sweep chains: expected one of pre, sft"):
        leaderboard(*_directory(tmp_path), "xyz")
    make_sweep(tmp_path / "plain", {"heads-0": record("0L", 0, 0.9)}, {"heads": "schedule"}, [{"heads": "0"}])
    assert leaderboard(*_directory(tmp_path), "pre").data == ["chains: chains", "plain: Digits"]
    with pytest.raises(UserError, match="no stage 'pre': expected a sweep with `stages`, got none"):
        leaderboard(*_directory(tmp_path / "plain"), "pre")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"folder": "heads-0/pre"', '"folder": "heads-0/../x"', "run 'heads-0/../x' does not fit"),
        ('"folder": "heads-0/pre"', '"folder": "/x"', "run '/x' does not fit"),
        ('"folder": "heads-0/pre"', '"folder": "heads-0"', "run 'heads-0' does not fit"),
        ('"pre": "heads-0/pre"', '"pre": "heads-1/pre"', "'heads-0/sft' starts from 'heads-1/pre', which is none of"),
        ('"stage": "pre"', '"stage": 3', "not a sweep's plan .TypeError: expected a string, got 3"),
    ],
)
def test_a_broken_plan_of_chains_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    make_chains(tmp_path, {})
    path = tmp_path / "sweep.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message):
        read_plan(tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format": 1', '"format": 3', "unknown format 3, expected 1"),
        ('"schedule"', '"rows"', "axis 'heads' has role 'rows', expected one of schedule, seed, column"),
        ('"folder": "heads-0"', '"folder": "../x"', "run '../x' does not fit"),
        ('"runs"', '"cells"', "not a sweep's plan"),
    ],
)
def test_a_broken_plan_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    make_sweep(tmp_path, {}, {"heads": "schedule"}, [{"heads": "0"}])
    path = tmp_path / "sweep.json"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(UserError, match=message) as caught:
        read_plan(tmp_path)
    assert str(caught.value).startswith(str(path))


# ---- the command ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["."], r"no record\.json in \. or below"),
        ([".", "--format", "word"], "--format: invalid choice: 'word'"),
        ([".", "--base", "0L"], "unrecognized arguments: --base 0L"),
        ([], "the following arguments are required: DIR"),
    ],
)
def test_bad_command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message):
        main(arguments)


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    printed = capsys.readouterr().out
    for option in ("DIR", "--baseline NAME", "--metric NAME", "--stage NAME", "--format", "--output FILE"):
        assert option in printed


def test_the_table_needs_no_torch_numpy_or_yaml(tmp_path: Path) -> None:
    write_record(tmp_path / "run", replace(BASE, metrics={"test/top1": 0.9}))
    code = (
        "import sys; from lapbench.results.table import main; main(sys.argv[1:]);"
        "print(*sorted({'torch', 'numpy', 'lightning', 'yaml', 'rich'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, encoding="utf-8").stdout
    assert "90.00" in output
    assert output.splitlines()[-1] == ""
