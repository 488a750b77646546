"""The formats of a `Table`: text for terminals, markdown, CSV and JSON; LaTeX and HTML are in `typeset`."""

import csv
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Callable

from lapbench.results.files import plain
from lapbench.results.metrics import MetricKind, kind_of, show, split_of
from lapbench.results.table import Cell, Column, Table
from lapbench.results.typeset import html, latex

GAP = "   "
_ASCII = str.maketrans({"±": "+-", "Δ": "D", "–": "-"})
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def score(cell: Cell | None, kind: MetricKind) -> str:
    """The text of a cell: "92.00 ± 2.00", "94.60 (2/3 seeds)", "running", "nan in 1/3 seeds", "1 failed, 2 running"."""
    if cell is None or _blank(cell):
        return "–"
    states = Counter(entry.state for entry in cell.entries)
    total = len(cell.entries)
    for state in ("nan", "inf", "-inf"):
        if states[state]:
            return f"{state} in {states[state]}/{total} seeds"
    if cell.summary is None:
        return next(iter(states)) if len(states) == 1 else ", ".join(f"{n} {state}" for state, n in states.items())
    mean = show(cell.summary.mean, kind)
    if not cell.complete:
        return f"{mean} ({cell.summary.n}/{total} seeds)"
    if cell.summary.std is None:
        return mean
    return f"{mean} ± {show(cell.summary.std, kind, scale=cell.summary.mean)}"


def _blank(cell: Cell) -> bool:
    """Whether it is that of a reference without the metric."""
    return all(entry.state == "none" for entry in cell.entries)


def headers(table: Table, column: Column) -> list[str]:
    """The heads of the columns that a column of the table consists of: mean, n, difference."""
    return [f"mean ± std{column.kind.unit}", *(["n"] if _with_n(table) else []), *(["Δ"] if _with_delta(table) else [])]


def fields(table: Table, row: str, column: Column) -> list[str]:
    """The texts under `headers` for one cell, without marks for best and second."""
    cell = table.cells.get((row, column.name))
    texts = [score(cell, column.kind)]
    if _with_n(table):
        texts.append(str(cell.summary.n if cell.summary else 0) if cell and not _blank(cell) else "")
    if _with_delta(table):
        if cell and cell.summary and cell.difference is not None:
            texts.append(show(cell.difference, column.kind, scale=cell.summary.mean, sign=True))
        else:
            texts.append("")
    return texts


def _with_n(table: Table) -> bool:
    """A wide table whose cells all have the same n says it once, below; any other says it in each cell."""
    return len(table.columns) <= 3 or _common_n(table) is None


def _common_n(table: Table) -> int | None:
    cells = [cell for cell in table.cells.values() if not _blank(cell)]
    counts = {cell.summary.n if cell.complete and cell.summary else None for cell in cells}
    return counts.pop() if len(counts) == 1 else None


def _with_delta(table: Table) -> bool:
    return any(cell.difference is not None for cell in table.cells.values())


def footer(table: Table) -> list[str]:
    """Caption and notes, one line each."""
    same_n = [] if _with_n(table) else [f"n = {_common_n(table)} in each cell."]
    return [" ".join([table.caption, *same_n]), *table.notes]


def rank_of(table: Table, row: str, column: Column) -> int | None:
    cell = table.cells.get((row, column.name))
    return cell.rank if cell else None


def text(table: Table, ansi: bool = False, width: int | None = 120) -> str:
    """For a terminal: best and second as bold and underline (``ansi``) or as ``**`` and ``_``, which a legend explains.

    Columns that do not fit into ``width`` characters go into further blocks below.
    """
    blocks = [_text_block(table, column, ansi) for column in table.columns]
    rows = ["", "heads", *table.rows]
    margin = max(len(row) for row in rows)
    several = len(table.metrics) > 1
    lines = [_heading(table) if several else ": ".join(filter(None, [table.title, _with_unit(table.metrics[0])]))]
    while blocks:
        taken, used = 0, margin
        while taken < len(blocks) and (taken == 0 or width is None or used + len(GAP) + _width(blocks[taken]) <= width):
            used += len(GAP) + _width(blocks[taken])
            taken += 1
        lines.append("")
        for index, row in enumerate(rows):
            lines.append(GAP.join([row.ljust(margin), *(block[index] for block in blocks[:taken])]).rstrip())
        lines.insert(-len(table.rows), "─" * used)
        if table.references:
            lines.insert(-len(table.references), "─" * used)
        blocks = blocks[taken:]
    lines.append("")
    if any(cell.rank for cell in table.cells.values()):
        lines.append(
            "Bold: best of its column; underlined: second." if ansi else "**best** and _second_ of each column."
        )
    return "\n".join(lines + footer(table)) + "\n"


def _width(block: list[str]) -> int:
    return len(block[1])


def _text_block(table: Table, column: Column, ansi: bool) -> list[str]:
    """The lines of one column: its name, the sub-headers, a line for each row, all equally wide as seen."""
    marks = {
        None: ("", "") if ansi else ("  ", "  "),
        1: ("\x1b[1m", "\x1b[0m") if ansi else ("**", "**"),
        2: ("\x1b[4m", "\x1b[0m") if ansi else (" _", "_ "),
    }
    cells = [headers(table, column), *(fields(table, row, column) for row in table.rows)]
    ranks = [None, *(rank_of(table, row, column) for row in table.rows)]
    widths = [max(len(cell[i]) for cell in cells) for i in range(len(cells[0]))]
    lines = []
    for cell, rank in zip(cells, ranks, strict=True):
        before, after = marks[rank]
        padding = " " * (widths[0] - len(cell[0]))
        rest = [part.rjust(size) for part, size in zip(cell[1:], widths[1:], strict=True)]
        lines.append("  ".join([padding + before + cell[0] + after, *rest]))
    seen = max(len(column.name), *(len(_ESCAPES.sub("", line)) for line in lines))
    return [column.name.center(seen), *(" " * (seen - len(_ESCAPES.sub("", line))) + line for line in lines)]


def markdown(table: Table) -> str:
    """A GitHub table; best in bold, second underlined."""
    several = len(table.columns) > 1
    heads = [(column.name, name) for column in table.columns for name in headers(table, column)]
    head = ["heads", *(f"{column}: {name}" if several else name for column, name in heads)]
    lines = [f"**{_escape_markdown(_heading(table))}**", "", _markdown_row(head)]
    lines.append("|" + "|".join([":---", *("---:" for _ in head[1:])]) + "|")
    for row in table.rows:
        name = _escape_markdown(row)
        parts = [f"*{name}*" if row in table.references else name]
        for column in table.columns:
            first, *rest = (_escape_markdown(part) for part in fields(table, row, column))
            before, after = {None: ("", ""), 1: ("**", "**"), 2: ("<ins>", "</ins>")}[rank_of(table, row, column)]
            parts += [before + first + after, *rest]
        lines.append("| " + " | ".join(parts) + " |")
    ranked = any(cell.rank for cell in table.cells.values())
    legend = ["Bold: best of its column; underlined: second."] if ranked else []
    return "\n".join([*lines, "", *(f"{_escape_markdown(line)}  " for line in footer(table)), *legend]) + "\n"


def _heading(table: Table) -> str:
    """Title, data set if there is one, metric if there is one: what the columns' names do not say."""
    names = [table.title] if table.title else []
    names += table.data if len(table.data) == 1 and table.data[0] != table.title else []
    metrics = [_with_unit(metric) for metric in table.metrics]
    return ", ".join([*names, *metrics] if len(metrics) == 1 else names or metrics)


def _with_unit(metric: str) -> str:
    return metric + kind_of(metric).unit


def _markdown_row(parts: list[str]) -> str:
    return "| " + " | ".join(_escape_markdown(part) for part in parts) + " |"


def _escape_markdown(value: str) -> str:
    return re.sub(r"([\\`*_\[\]|<>])", r"\\\1", " ".join(value.split()))


def as_csv(table: Table) -> str:
    """Long form: a line for each run and metric, the value as recorded (accuracies as fractions) in full precision."""
    axes = list(dict.fromkeys(axis for c in table.cells.values() for e in c.entries for axis in e.run.labels))
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    names = ["schedule", "column", "data", "seed", "state", "metric", "value", "checkpoint", "folder", "error"]
    writer.writerow([*names, *(f"axis:{axis}" for axis in axes)])
    for row, column, cell in _in_order(table):
        for entry in cell.entries:
            record = entry.run.record
            known = [record.data, record.checkpoint, record.error] if record else [None, None, None]
            value = "" if entry.value is None else repr(entry.value)
            where = [row, column.data, known[0], entry.run.seed, entry.state, column.metric, value]
            labels = [entry.run.labels.get(axis, "") for axis in axes]
            writer.writerow([*where, known[1], entry.run.folder, known[2], *labels])
    return stream.getvalue()


def _in_order(table: Table) -> list[tuple[str, Column, Cell]]:
    places = [(row, column) for row in table.rows for column in table.columns]
    return [(row, column, table.cells[row, column.name]) for row, column in places if (row, column.name) in table.cells]


def as_json(table: Table) -> str:
    """Everything in the table, values as recorded (accuracies as fractions) in full precision.

    Of several metrics there is a list instead of one, and each cell names its own.
    """
    several = len(table.metrics) > 1
    metrics = [
        {
            "metric": metric,
            "split": split_of(metric),
            "statistic": "mean and standard deviation (ddof 1) over seeds",
            "higher_is_better": kind_of(metric).higher_is_better,
        }
        for metric in table.metrics
    ]
    cells = [
        {
            "schedule": row,
            "column": column.data,
            **({"metric": column.metric} if several else {}),
            "complete": cell.complete,
            "n": cell.summary.n if cell.summary else 0,
            "planned": len(cell.entries),
            "mean": cell.summary.mean if cell.summary else None,
            "std": cell.summary.std if cell.summary else None,
            "rank": cell.rank,
            "difference": cell.difference,
            "runs": [
                {
                    "seed": entry.run.seed,
                    "state": entry.state,
                    "value": entry.value,
                    "folder": str(entry.run.folder),
                    "error": entry.run.record.error if entry.run.record else None,
                    "axes": dict(entry.run.labels),
                }
                for entry in cell.entries
            ],
        }
        for row, column, cell in _in_order(table)
    ]
    value = {
        "title": table.title,
        **({"metrics": metrics} if several else metrics[0]),
        "baseline": table.baseline,
        "schedules": [row for row in table.rows if row not in table.references],
        **({"references": table.references} if table.references else {}),
        "columns": table.data,
        "cells": cells,
        "caption": table.caption,
        "notes": table.notes,
    }
    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def as_latex(table: Table) -> str:
    """A booktabs table."""
    return latex(_heading(table), _heads(table), _marked(table), footer(table), len(table.references))


def as_html(table: Table) -> str:
    """A page that needs nothing else."""
    return html(_heading(table), _heads(table), _marked(table), footer(table), len(table.references))


def _heads(table: Table) -> list[tuple[str, list[str]]]:
    return [(column.name, headers(table, column)) for column in table.columns]


def _marked(table: Table) -> list[tuple[str, list[tuple[list[str], int | None, bool]]]]:
    """For each row its name, and for each column the texts, the rank, and whether the cell is complete."""
    rows = []
    for row in table.rows:
        cells = []
        for column in table.columns:
            cell = table.cells.get((row, column.name))
            cells.append((fields(table, row, column), rank_of(table, row, column), cell is None or cell.complete))
        rows.append((row, cells))
    return rows


FORMATS: dict[str, Callable[[Table], str]] = {
    "text": text,
    "markdown": markdown,
    "latex": as_latex,
    "csv": as_csv,
    "json": as_json,
    "html": as_html,
}
SUFFIXES = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv", ".json": "json", ".html": "html"}


def emit(value: str) -> None:
    """Write to stdout; an old terminal's encoding gets plain letters for the signs that it lacks."""
    try:
        value.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        value = value.translate(_ASCII).encode("ascii", "replace").decode()
    sys.stdout.write(value)
    sys.stdout.flush()
