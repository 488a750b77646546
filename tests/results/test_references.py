"""References: rows of their own below the schedules, neither ranked nor compared, blank where they have no score."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lapbench.errors import UserError
from lapbench.results import Record, leaderboard, write_record
from lapbench.results.formats import FORMATS, fields, text
from lapbench.results.plan import Plan, PlannedRun, read_plan, write_plan
from lapbench.results.table import Table, load_directory

METRICS = ("linear/top1", "knn/top1", "segmentation/miou")
SECTIONS = {
    "linear": {"chosen_on": "select", "settings": {"split": "test"}},
    "knn": {"settings": {"split": "test", "report_k": 20}},
    "segmentation": {"data": "shapes (synthetic)", "settings": {}},
}
# Raw pixels are better than all of them at k-NN, and have no segmentation.
SCORES: dict[str, dict[str, float]] = {
    "0": {"linear/top1": 0.90, "knn/top1": 0.85, "segmentation/miou": 0.30},
    "2": {"linear/top1": 0.92, "knn/top1": 0.88, "segmentation/miou": 0.35},
    "untrained": {"linear/top1": 0.75, "knn/top1": 0.45, "segmentation/miou": 0.20},
    "raw pixels": {"linear/top1": 0.96, "knn/top1": 0.98},
}
REFERENCES = ("untrained", "raw pixels")


def write(folder: Path, metrics: tuple[str, ...] = METRICS, **changes: dict[str, Any]) -> Plan:
    """A sweep of two seeds, all finished; ``changes`` are those of records by the label of their heads."""
    runs = []
    for label, scores in SCORES.items():
        for seed in (0, 1):
            name = f"heads-{label.replace(' ', '-')}_seed-{seed}"
            reference = label if label in REFERENCES else None
            runs.append(PlannedRun(name, {"heads": label, "seed": str(seed)}, (), {}, reference=reference))
            # All have attention heads only, but for one schedule.
            record = Record("T", "Digits", "vit", "2L" if label == "2" else "0L", seed, "finished", checkpoint="last")
            found = {metric: value + 0.01 * seed for metric, value in scores.items()}
            record = replace(record, **{"metrics": found, "evaluations": SECTIONS, **changes.get(label, {})})
            (folder / name).mkdir()
            write_record(folder / name, record)
    plan = Plan("ssl", {"heads": "schedule", "seed": "seed"}, tuple(runs), "0L", metrics)
    write_plan(folder, plan)
    return plan


def table(folder: Path, baseline: str | None = None) -> Table:
    records, plans = load_directory(folder)
    return leaderboard(records, baseline, plans=plans)


def test_rows_ranks_and_differences(tmp_path: Path) -> None:
    plan = write(tmp_path)
    assert read_plan(tmp_path) == plan
    found = table(tmp_path)
    assert found.rows == ("0L", "2L", "untrained", "raw pixels")
    assert found.references == REFERENCES
    for column in found.columns:
        assert [found.cells[row, column.name].rank for row in found.rows] == [2, 1, None, None]
        assert [found.cells[row, column.name].difference is None for row in found.rows] == [True, False, True, True]
    knn, miou = found.columns[1:]
    assert fields(found, "raw pixels", knn) == ["98.50 ± 0.71", "2", ""]
    assert fields(found, "raw pixels", miou) == ["–", "", ""]
    assert found.cells["raw pixels", miou.name].complete
    assert found.notes == ()


def test_the_caption_says_what_was_measured_and_what_is_there_for_reference(tmp_path: Path) -> None:
    write(tmp_path)
    found = table(tmp_path).caption
    for words in (
        "by evaluation linear (a linear classifier of frozen features on the test split, chosen on samples held out of "
        "training)",
        "by evaluation knn (weighted nearest neighbours of frozen features on the test split, k = 20)",
        "by evaluation segmentation (a head on the frozen backbone, data: shapes (synthetic))",
        "for reference, neither ranked nor compared: untrained, raw pixels.",
    ):
        assert words in found


def test_what_failed_or_is_missing_is_still_told(tmp_path: Path) -> None:
    failed = {"evaluations": {"segmentation": {"error": "out of memory"}}}
    write(tmp_path, untrained={"status": "failed", "error": "no disk"}, **{"raw pixels": failed})
    found = table(tmp_path)
    assert not found.cells["raw pixels", "segmentation/miou"].complete
    assert found.notes[0].startswith("Incomplete: of 8 runs 2 failed, 2 no metric.")
    # The schedules are ranked all the same.
    assert found.cells["2L", "segmentation/miou"].rank == 1


def test_a_reference_is_no_baseline(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match="no schedule 'untrained' to compare with; there are 0L, 2L"):
        table(tmp_path, "untrained")


def test_formats_set_them_apart(tmp_path: Path) -> None:
    write(tmp_path, ("linear/top1", "segmentation/miou"))
    found = table(tmp_path)
    lines = text(found).splitlines()
    rules = [i for i, line in enumerate(lines) if line.startswith("─")]
    starts = ["heads", "0L", "2L", "untrained", "raw pixels"]
    assert [lines[i + 1].partition("  ")[0] for i in rules] == ["0L", "untrained"]
    assert [line.partition("  ")[0] for line in lines if line.partition("  ")[0] in starts] == starts
    markdown = FORMATS["markdown"](found)
    assert "\n| *raw pixels* | 96.50 ± 0.71 | 2 |  | – |  |  |\n" in markdown
    latex = [line.strip() for line in FORMATS["latex"](found).splitlines()]
    assert latex[latex.index("\\midrule", latex.index("\\midrule") + 1) + 1].startswith("untrained & ")
    page = FORMATS["html"](found)
    assert re.findall(r'<tr class="reference"><th scope="row">([^<]*)<', page) == ["untrained"]
    values = json.loads(FORMATS["json"](found))
    assert (values["schedules"], values["references"]) == (["0L", "2L"], [*REFERENCES])


def test_narrow_text_has_both_rules_in_each_block(tmp_path: Path) -> None:
    write(tmp_path)
    lines = text(table(tmp_path), width=40).splitlines()
    assert sum(line.startswith("─") for line in lines) == 2 * 3


def test_records_alone_need_no_plan_of_references(tmp_path: Path) -> None:
    write(tmp_path)
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert [("reference" in run) for run in content["runs"]] == [False] * 4 + [True] * 4
    for run in content["runs"]:  # a plan that an earlier version wrote
        run.pop("reference", None)
    content["runs"] = content["runs"][:4]
    (tmp_path / "sweep.json").write_text(json.dumps(content))
    found = table(tmp_path)
    assert (found.rows, found.references) == (("0L", "2L"), ())
    assert len(found.notes) == 1
    assert found.notes[0].startswith("Left out, as the sweep's plan does not hold them")
