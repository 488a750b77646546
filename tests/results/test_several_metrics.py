"""Tables with several metrics side by side: hand-computed numbers of two kinds, an accuracy and a loss in nats."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lapbench.errors import UserError
from lapbench.results import Record, Table, leaderboard, load_records, write_record
from lapbench.results.formats import FORMATS, fields, text
from lapbench.results.plan import Plan, PlannedRun, read_plan, write_plan
from lapbench.results.table import main

BASE = Record("LanguageModeling", "PyDocs", "tiny", "0L", 0, status="finished", checkpoint="last")
ACCURACY, LOSS = "language/accuracy", "val/loss"
# Accuracies: means 0.50 and 0.55, deviations 0.02 and 0.01. Losses: means 3 and 2.5, deviations 1 and 0.5 nats.
SCORES = {
    "0L": [(0.48, 2.0), (0.50, 3.0), (0.52, 4.0)],
    "2L": [(0.54, 2.0), (0.55, 2.5), (0.56, 3.0)],
}
CAPTION = (
    "language/accuracy: in %, by evaluation language, higher is better; val/loss: on the val split, lower is better; "
    "data: PyDocs; mean ± standard deviation (ddof 1) over n seeds; checkpoint scored: last; "
    "Δ: difference to 0L (in points where the metric is in %), before rounding."
)


def records(data: str = "PyDocs") -> list[Record]:
    return [
        replace(BASE, data=data, schedule=row, seed=seed, metrics=metrics, folder=Path(f"runs/{data}-{row}-{seed}"))
        for row, values in SCORES.items()
        for seed, metrics in enumerate({ACCURACY: accuracy, LOSS: loss} for accuracy, loss in values)
    ]


def without(record: Record, metric: str) -> Record:
    return replace(record, metrics={name: value for name, value in record.metrics.items() if name != metric})


@pytest.fixture
def table() -> Table:
    return leaderboard(records(), metric=[ACCURACY, LOSS])


def test_each_column_has_the_unit_direction_and_difference_of_its_metric(table: Table) -> None:
    assert (table.metrics, table.data) == ([ACCURACY, LOSS], ["PyDocs"])
    accuracy, loss = (table.cells["2L", name] for name in (ACCURACY, LOSS))
    assert (accuracy.rank, loss.rank) == (1, 1)  # one as the higher, one as the lower
    assert accuracy.difference == pytest.approx(0.05)
    assert loss.difference == pytest.approx(-0.5)
    assert fields(table, "2L", table.columns[0]) == ["55.00 ± 1.00", "3", "+5.00"]
    assert fields(table, "2L", table.columns[1]) == ["2.500 ± 0.500", "3", "-0.500"]


def test_text(table: Table) -> None:
    assert text(table) == "\n".join(
        [
            "PyDocs",
            "",
            "             language/accuracy                   val/loss",
            "heads     mean ± std (%)    n      Δ        mean ± std    n       Δ",
            "───────────────────────────────────────────────────────────────────",
            "0L         _50.00 ± 2.00_   3           _3.000 ± 1.000_   3",
            "2L        **55.00 ± 1.00**  3  +5.00   **2.500 ± 0.500**  3  -0.500",
            "",
            "**best** and _second_ of each column.",
            CAPTION,
            "",
        ]
    )


def test_markdown(table: Table) -> None:
    names = ["language/accuracy: mean ± std (%)", "language/accuracy: n", "language/accuracy: Δ"]
    names += ["val/loss: mean ± std", "val/loss: n", "val/loss: Δ"]
    lines = FORMATS["markdown"](table).splitlines()
    assert lines[0] == "**PyDocs**"
    assert lines[2] == f"| heads | {' | '.join(names)} |"
    assert lines[4:6] == [
        "| 0L | <ins>50.00 ± 2.00</ins> | 3 |  | <ins>3.000 ± 1.000</ins> | 3 |  |",
        "| 2L | **55.00 ± 1.00** | 3 | +5.00 | **2.500 ± 0.500** | 3 | -0.500 |",
    ]
    assert f"{CAPTION}  " in lines


def test_latex(table: Table) -> None:
    lines = [line.strip() for line in FORMATS["latex"](table).splitlines()]
    assert "& \\multicolumn{3}{c}{language/accuracy} & \\multicolumn{3}{c}{val/loss} \\\\" in lines
    assert "heads & mean $\\pm$ std (\\%) & n & $\\Delta$ & mean $\\pm$ std & n & $\\Delta$ \\\\" in lines
    row = "2L & \\textbf{55.00 $\\pm$ 1.00} & 3 & $+5.00$ & \\textbf{2.500 $\\pm$ 0.500} & 3 & $-0.500$ \\\\"
    assert lines[lines.index("\\bottomrule") - 1] == row
    assert any(line.startswith("\\caption{PyDocs. language/accuracy: in \\%, by evaluation") for line in lines)


def test_html(table: Table) -> None:
    page = FORMATS["html"](table)
    assert '<th scope="colgroup" colspan="3">language/accuracy</th><th scope="colgroup" colspan="3">val/loss' in page
    heads = ["mean ± std (%)", "n", "Δ", "mean ± std", "n", "Δ"]
    assert "".join(f'<th scope="col">{head}</th>' for head in heads) + "</tr>\n</thead>" in page
    cells = ["<strong>55.00 ± 1.00</strong>", "3", "+5.00", "<strong>2.500 ± 0.500</strong>", "3", "-0.500"]
    assert '<th scope="row">2L</th>' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>" in page


def test_csv_has_a_line_for_each_run_and_metric(table: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](table))))
    found = [(row["schedule"], row["metric"], int(row["seed"]), float(row["value"])) for row in rows]
    assert found == [
        (schedule, metric, seed, values[index])
        for schedule, runs in SCORES.items()
        for index, metric in enumerate((ACCURACY, LOSS))
        for seed, values in enumerate(runs)
    ]
    assert {row["column"] for row in rows} == {"PyDocs"}


def test_json_names_each_cells_metric(table: Table) -> None:
    value = json.loads(FORMATS["json"](table))
    assert "metric" not in value
    assert [(each["metric"], each["split"], each["higher_is_better"]) for each in value["metrics"]] == [
        (ACCURACY, "language", True),
        (LOSS, "val", False),
    ]
    assert value["columns"] == ["PyDocs"]
    cell = value["cells"][3]
    assert (cell["schedule"], cell["column"], cell["metric"], cell["rank"]) == ("2L", "PyDocs", LOSS, 1)
    assert (cell["mean"], cell["std"], cell["difference"]) == pytest.approx((2.5, 0.5, -0.5))


def test_with_several_data_sets_columns_are_named_by_both() -> None:
    table = leaderboard([*records("B"), *records("A")], metric=[LOSS, ACCURACY])
    names = [f"A: {LOSS}", f"A: {ACCURACY}", f"B: {LOSS}", f"B: {ACCURACY}"]
    assert [column.name for column in table.columns] == names
    lines = text(table, width=None).splitlines()
    assert lines[0] == "val/loss, language/accuracy (%)"  # nothing else names the table
    assert lines[2].split() == " ".join(names).split()
    assert table.caption.startswith("val/loss: on the val split, lower is better; language/accuracy: in %, by")
    assert "data:" not in table.caption
    assert {row["column"] for row in csv.DictReader(io.StringIO(FORMATS["csv"](table)))} == {"A", "B"}


def test_metrics_that_differ_in_nothing_but_their_name_share_a_part_of_the_caption() -> None:
    metrics = {"linear/top1": 0.5, "linear/top5": 0.6, "linear/novelty": 1.0, "knn/top1": 0.4}
    caption = leaderboard([replace(BASE, metrics=metrics)], metric=list(metrics)).caption
    assert caption.startswith(
        "linear/top1 (linear-probe top-1 accuracy), linear/top5 (linear-probe top-5 accuracy): in %, "
        "by evaluation linear, higher is better; "
        "linear/novelty: by evaluation linear, not ranked, as it is not known which direction is better; "
        "knn/top1 (k-NN top-1 accuracy): in %, by evaluation knn, higher is better; data: PyDocs; mean"
    )


def test_a_run_that_lacks_one_of_the_metrics_counts_once_and_says_which() -> None:
    whole = records()
    whole[0] = without(whole[0], ACCURACY)
    whole[5] = replace(whole[5], status="failed", metrics={}, error="no space left")
    table = leaderboard(whole, metric=[ACCURACY, LOSS])
    assert [fields(table, "0L", column)[0] for column in table.columns] == ["51.00 (2/3 seeds)", "3.000 ± 1.000"]
    assert [fields(table, "2L", column)[0] for column in table.columns] == ["54.50 (2/3 seeds)", "2.250 (2/3 seeds)"]
    assert table.notes == (
        "Incomplete: of 6 runs 1 no metric, 1 failed. Cells with such runs are not ranked or compared.",
        "no metric (language/accuracy): runs/PyDocs-0L-0",
        "failed: runs/PyDocs-2L-2: no space left",
    )
    assert "checkpoint scored: last" in table.caption
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](table))))
    assert [row["state"] for row in rows if row["folder"] == "runs/PyDocs-0L-0"] == ["no metric", "done"]


def test_no_run_has_the_metric_of_an_evaluation_that_failed_in_all_of_them() -> None:
    failed = [
        replace(without(record, ACCURACY), evaluations={"language": {"error": "out of memory"}}) for record in records()
    ]
    table = leaderboard(failed, metric=[ACCURACY, LOSS])
    assert [fields(table, "2L", column)[0] for column in table.columns] == ["no metric", "2.500 ± 0.500"]


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ([LOSS, "val/lost"], r"no record has the metric val/lost: did you mean val/loss\?$"),
        ([LOSS, "xyz"], "no record has the metric xyz; there are language/accuracy, val/loss$"),
        ([LOSS, ACCURACY, LOSS], "expected each metric once, got val/loss twice$"),
    ],
)
def test_mistakes(metric: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        leaderboard(records(), metric=metric)


def test_the_plan_of_a_sweep_lists_several_and_names_one(tmp_path: Path) -> None:
    runs = tuple(PlannedRun(f"heads-{heads}", {"heads": heads}, (), {}) for heads in "02")
    for metrics, written in (((), None), ((LOSS,), LOSS), ((ACCURACY, LOSS), [ACCURACY, LOSS])):
        write_plan(tmp_path, Plan("demo", {"heads": "schedule"}, runs, metrics=metrics))
        assert json.loads((tmp_path / "sweep.json").read_text())["metric"] == written
        assert read_plan(tmp_path).metrics == metrics
    assert [column.name for column in leaderboard([], plans={tmp_path: read_plan(tmp_path)}).columns] == [
        ACCURACY,
        LOSS,
    ]
    for row in "02":
        write_record(tmp_path / f"heads-{row}", replace(BASE, schedule=f"{row}L", metrics={ACCURACY: 0.5, LOSS: 2.0}))
    assert text(leaderboard(load_records(tmp_path))).startswith("demo, PyDocs\n")
    path = tmp_path / "sweep.json"
    path.write_text(path.read_text().replace(f'"{LOSS}"', "3"))
    with pytest.raises(UserError, match=r"not a sweep's plan .TypeError: expected a string, got 3"):
        read_plan(tmp_path)


def test_an_earlier_stage_is_shown_by_the_metrics_that_it_has(tmp_path: Path) -> None:
    first = PlannedRun("heads-0/pre", {"heads": "0"}, (), {}, "pre")
    second = replace(first, folder="heads-0/sft", stage="sft", earlier={"pre": first.folder})
    write_plan(tmp_path, Plan("demo", {"heads": "schedule"}, (first, second), metrics=(ACCURACY, LOSS)))
    write_record(tmp_path / "heads-0/pre", replace(BASE, metrics={LOSS: 2.0}))
    plans = {tmp_path: read_plan(tmp_path)}
    assert leaderboard(load_records(tmp_path), plans=plans).metrics == [ACCURACY, LOSS]
    assert leaderboard(load_records(tmp_path), plans=plans, stage="pre").metrics == [LOSS]


def test_the_option_is_given_for_each_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for record in records():
        assert record.folder
        write_record(tmp_path / record.folder, record)
    assert main([str(tmp_path), "--metric", ACCURACY, "--metric", LOSS]) == 0
    assert capsys.readouterr().out == text(leaderboard(load_records(tmp_path), metric=[ACCURACY, LOSS]))
    assert main([str(tmp_path), "--metric", LOSS]) == 0
    assert capsys.readouterr().out.startswith("val/loss\n")
