"""Each format of one small table with hand-computed numbers, and hostile names in all of them."""

import csv
import io
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lapbench.errors import UserError
from lapbench.results import Record, Table, leaderboard, write_record
from lapbench.results.formats import FORMATS, emit, text
from lapbench.results.table import main

BASE = Record("ImageClassification", "Digits", "vit", "0L", 0, status="finished", checkpoint="last")
# Means 92 and 96 with deviations 2 and 1; one seed of 10L failed, so its 99 % does not count as best.
SCORES = {"0L": (0.90, 0.92, 0.94), "2L": (0.95, 0.96, 0.97), "10L": (0.99, 0.99, None)}
CAPTION = (
    "test/top1: top-1 accuracy in % on the test split of Digits; higher is better; mean ± standard deviation (ddof 1) "
    "over n seeds; checkpoint scored: last; Δ: difference to 0L in points, before rounding."
)
NOTES = [
    "Incomplete: of 9 runs 1 failed. Cells with such runs are not ranked or compared.",
    "failed: runs/10L-2: loss <nan>",
]


def records() -> list[Record]:
    found = []
    for schedule, values in SCORES.items():
        for seed, value in enumerate(values):
            each = replace(BASE, schedule=schedule, seed=seed, folder=Path(f"runs/{schedule}-{seed}"))
            if value is None:
                found.append(replace(each, status="failed", error="loss\n<nan>"))
            else:
                found.append(replace(each, metrics={"test/top1": value}))
    return found


@pytest.fixture
def table() -> Table:
    return leaderboard(records())


@pytest.fixture
def hostile() -> Table:
    name = '<script>alert(1)</script> & 100% $x_1^2$ {a}\\b|c,"d"#~*'
    return leaderboard([replace(BASE, data=name, schedule="0L", metrics={"test/top1": 0.9}, folder=Path(name))])


def test_text(table: Table) -> None:
    assert text(table) == "\n".join(
        [
            "test/top1 (%)",
            "",
            "                     Digits",
            "heads        mean ± std (%)    n      Δ",
            "───────────────────────────────────────",
            "0L            _92.00 ± 2.00_   3",
            "2L           **96.00 ± 1.00**  3  +4.00",
            "10L       99.00 (2/3 seeds)    2",
            "",
            "**best** and _second_ of each column.",
            CAPTION,
            *NOTES,
            "",
        ]
    )


def test_text_on_a_terminal_is_bold_and_underlined_and_still_aligned(table: Table) -> None:
    lines = text(table, ansi=True).splitlines()
    assert "\x1b[1m96.00 ± 1.00\x1b[0m" in lines[6]
    assert "\x1b[4m92.00 ± 2.00\x1b[0m" in lines[5]
    plain = [re.sub(r"\x1b\[\d*m", "", line) for line in lines]
    assert [line.index(".00 ±") for line in plain[5:7]] == [plain[6].index("6.00") + 1] * 2
    assert plain[5].rindex("3") == plain[6].index("  3") + 2
    assert "Bold: best of its column; underlined: second." in lines


def test_a_wide_table_is_folded_to_the_width() -> None:
    many = [replace(r, data=f"data{i}", folder=Path(f"{i}/{r.folder}")) for i in range(9) for r in records()[:6]]
    lines = text(leaderboard(many), width=80).splitlines()
    grid = lines[: lines.index("**best** and _second_ of each column.")]
    assert max(map(len, grid)) <= 80
    assert [line for line in grid if line.startswith("heads")] != []
    assert " ".join(grid).count("**96.00 ± 1.00**") == 9
    # All cells have three seeds, so the caption says it instead of 18 cells.
    assert any(line.endswith("n = 3 in each cell.") for line in lines)
    assert not any(re.search(r"\bn\b", line) for line in grid)


def test_markdown(table: Table) -> None:
    assert FORMATS["markdown"](table).splitlines() == [
        "**Digits, test/top1 (%)**",
        "",
        "| heads | mean ± std (%) | n | Δ |",
        "|:---|---:|---:|---:|",
        "| 0L | <ins>92.00 ± 2.00</ins> | 3 |  |",
        "| 2L | **96.00 ± 1.00** | 3 | +4.00 |",
        "| 10L | 99.00 (2/3 seeds) | 2 |  |",
        "",
        f"{CAPTION}  ",
        f"{NOTES[0]}  ",
        "failed: runs/10L-2: loss \\<nan\\>  ",
        "Bold: best of its column; underlined: second.",
    ]


def test_latex(table: Table) -> None:
    lines = [line.strip() for line in FORMATS["latex"](table).splitlines()]
    assert "\\begin{tabular}{lrrr}" in lines
    assert lines[lines.index("\\midrule") + 1 : lines.index("\\bottomrule")] == [
        "0L & \\underline{92.00 $\\pm$ 2.00} & 3 &  \\\\",
        "2L & \\textbf{96.00 $\\pm$ 1.00} & 3 & $+4.00$ \\\\",
        "10L & 99.00 (2/3 seeds) & 2 &  \\\\",
    ]
    assert "heads & mean $\\pm$ std (\\%) & n & $\\Delta$ \\\\" in lines


def test_latex_of_a_wide_table_is_folded() -> None:
    many = [replace(r, data=f"data{i}", folder=Path(f"{i}/{r.folder}")) for i in range(7) for r in records()[:6]]
    page = FORMATS["latex"](leaderboard(many))
    assert [len(columns) for columns in re.findall(r"begin{tabular}{l(r+)}", page)] == [6, 6, 2]
    assert page.count("2L & \\textbf{96.00 $\\pm$ 1.00} & $+4.00$") == 3
    assert page.count("\\begin{table}") == 1


def test_latex_escapes_everything_special(hostile: Table) -> None:
    body = FORMATS["latex"](hostile).split("\\begin{table}")[1]
    assert "\\textless{}script\\textgreater{}" in body
    assert "\\& 100\\% \\$x\\_1\\textasciicircum{}2\\$ \\{a\\}\\textbackslash{}b" in body
    assert body.count("{") == body.count("}")
    assert not re.search(r"(?<!\\)[%#$_&^~]", re.sub(r"\$\\(pm|Delta)\$| & |&(?= \\multi)", "", body))


class Page(HTMLParser):
    """The tags and visible text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.cells and self.cells[-1] and data.strip():
            self.cells[-1][-1] += data


def test_html(table: Table) -> None:
    page = FORMATS["html"](table)
    found = Page(page)
    assert found.cells[2][:4] == ["0L", "92.00 ± 2.00", "3", ""]
    assert found.cells[3] == ["2L", "96.00 ± 1.00", "3", "+4.00"]
    assert "<strong>96.00 ± 1.00</strong>" in page
    assert "<u>92.00 ± 2.00</u>" in page
    assert "failed: runs/10L-2: loss <nan>" in found.texts
    assert not re.search(r"(src|href)=", page)  # nothing is fetched


def test_html_is_escaped(hostile: Table) -> None:
    page = FORMATS["html"](hostile)
    assert "script" not in Page(page).tags
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; 100%" in page


def test_markdown_is_escaped(hostile: Table) -> None:
    lines = FORMATS["markdown"](hostile).splitlines()
    assert "\\<script\\>" in lines[0]
    assert not re.search(r"(?<!\\)[<>|]", lines[0])


def test_csv_has_a_line_for_each_run_in_full_precision(table: Table) -> None:
    rows = list(csv.DictReader(io.StringIO(FORMATS["csv"](table))))
    assert len(rows) == 9
    assert [float(row["value"]) for row in rows if row["value"]] == [v for vs in SCORES.values() for v in vs if v]
    assert rows[-1] | {"schedule": "10L", "state": "failed", "value": "", "error": "loss\n<nan>"} == rows[-1]
    third = leaderboard([replace(BASE, metrics={"test/top1": 1 / 3})])
    assert next(csv.DictReader(io.StringIO(FORMATS["csv"](third))))["value"] == repr(1 / 3)


def test_json_is_strict_and_complete(table: Table) -> None:
    value = json.loads(FORMATS["json"](table))
    assert (value["metric"], value["split"], value["baseline"]) == ("test/top1", "test", "0L")
    cell = value["cells"][1]
    assert (cell["schedule"], cell["column"], cell["n"], cell["planned"], cell["rank"]) == ("2L", "Digits", 3, 3, 1)
    assert cell["mean"] == pytest.approx(0.96)
    assert cell["std"] == pytest.approx(0.01)
    assert cell["difference"] == pytest.approx(0.04)
    assert value["cells"][2]["complete"] is False
    bad = FORMATS["json"](leaderboard([replace(BASE, metrics={"test/top1": math.nan})]))
    run = json.loads(bad, parse_constant=pytest.fail)["cells"][0]["runs"][0]
    assert (run["value"], run["state"]) == ("NaN", "nan")


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_writes_to_a_file_and_to_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    for record in records():
        assert record.folder
        write_record(tmp_path / record.folder, record)
    assert main([str(tmp_path / "runs"), "--format", name]) == 0
    printed = capsys.readouterr().out
    output = tmp_path / "new" / "table.out"
    assert main([str(tmp_path / "runs"), "--format", name, "--output", str(output)]) == 0
    assert output.read_text(encoding="utf-8") == printed
    assert capsys.readouterr().out == ""


def test_the_suffix_of_the_output_chooses_the_format(tmp_path: Path) -> None:
    write_record(tmp_path / "run", replace(BASE, metrics={"test/top1": 0.9}))
    main([str(tmp_path), "--output", str(tmp_path / "table.html")])
    assert (tmp_path / "table.html").read_text().startswith("<!DOCTYPE html>")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write"):
        main([str(tmp_path), "--output", str(tmp_path / "file" / "table.html")])


def test_a_terminal_without_unicode_gets_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    emit("92.00 ± 2.00 Δ é\n")
    assert stream.buffer.getvalue() == b"92.00 +- 2.00 D ?\n"  # type: ignore[attr-defined]
