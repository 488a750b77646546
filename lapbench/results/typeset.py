"""LaTeX and HTML of a table that is already text; everything that came from a record or a config is escaped here."""

import html as escaping
from collections.abc import Sequence

Rows = Sequence[tuple[str, Sequence[tuple[Sequence[str], int | None, bool]]]]
"""For each row its name, and for each column its texts, its rank (1, 2, None), and whether it is complete."""

Heads = Sequence[tuple[str, Sequence[str]]]
"""For each column its name, and the heads of its texts."""

PAGE_COLUMNS = 3
"""Columns of a leaderboard, each with mean, n and difference, that fit beside each other on a printed page."""

_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        "±": r"$\pm$",
        "Δ": r"$\Delta$",
        "–": "--",
    }
)


def escape_latex(value: str) -> str:
    """``value`` as LaTeX text on one line."""
    return " ".join(value.split()).translate(_LATEX)


def latex(title: str, columns: Heads, rows: Rows, footer: Sequence[str], references: int = 0) -> str:
    """A ``table`` environment; the document needs ``\\usepackage[T1]{fontenc}`` and ``\\usepackage{booktabs}``.

    A page is `PAGE_COLUMNS` columns wide: the others go into further tabulars below. A rule sets the last
    ``references`` rows apart.
    """
    caption, *notes = footer
    lines = [
        "% Needs \\usepackage[T1]{fontenc} and \\usepackage{booktabs}.",
        "\\begin{table}",
        "  \\centering",
        f"  \\caption{{{escape_latex(title)}. {escape_latex(caption)}}}",
    ]
    lines += ["  \\footnotesize\\setlength{\\tabcolsep}{3pt}"] if len(columns) >= PAGE_COLUMNS else []
    for start in range(0, len(columns), PAGE_COLUMNS):
        part = slice(start, start + PAGE_COLUMNS)
        lines += ["  \\par\\medskip"] if start else []
        lines += _tabular(columns[part], [(name, cells[part]) for name, cells in rows], references)
    lines += [f"  \\par\\smallskip{{\\footnotesize {escape_latex(note)}}}" for note in notes]
    return "\n".join([*lines, "\\end{table}"]) + "\n"


def _tabular(columns: Heads, rows: Rows, references: int) -> list[str]:
    span = len(columns[0][1])
    groups = " & ".join(f"\\multicolumn{{{span}}}{{c}}{{{escape_latex(column)}}}" for column, _ in columns)
    rules = " ".join(f"\\cmidrule(lr){{{2 + i * span}-{1 + (i + 1) * span}}}" for i in range(len(columns)))
    lines = [
        f"  \\begin{{tabular}}{{l{'r' * span * len(columns)}}}",
        "    \\toprule",
        f"    & {groups} \\\\",
        f"    {rules}",
        "    heads & " + " & ".join(escape_latex(name) for _, names in columns for name in names) + " \\\\",
        "    \\midrule",
    ]
    for index, (name, cells) in enumerate(rows):
        lines += ["    \\midrule"] if index == len(rows) - references else []
        parts = [escape_latex(name)]
        for texts, rank, _ in cells:
            first, *rest = (_latex_number(text) for text in texts)
            parts += [{None: first, 1: f"\\textbf{{{first}}}", 2: f"\\underline{{{first}}}"}[rank], *rest]
        lines.append("    " + " & ".join(parts) + " \\\\")
    return [*lines, "    \\bottomrule", "  \\end{tabular}"]


def _latex_number(text: str) -> str:
    """A difference's hyphen is a minus sign."""
    return f"${text}$" if text[:1] in ("+", "-") and text[1:2].isdigit() else escape_latex(text)


_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
table { border-top: 2px solid; border-bottom: 2px solid; }
th, td { padding: .3rem .8rem; text-align: right; white-space: nowrap; }
th[scope=row], thead th:first-child { text-align: left; }
th[scope=colgroup] { text-align: center; border-bottom: 1px solid; }
thead tr:last-child th { font-weight: normal; }
thead tr:last-child th, thead th[rowspan] { border-bottom: 1px solid; }
.reference th, .reference td { border-top: 1px solid; }
.incomplete { font-style: italic; opacity: .75; }
p { margin: .5rem 0; overflow-wrap: anywhere; }
footer { font-size: .9rem; }
""".strip()


def html(title: str, columns: Heads, rows: Rows, footer: Sequence[str], references: int = 0) -> str:
    """A self-contained page without scripts. A line sets the last ``references`` rows apart."""
    esc = escaping.escape
    groups = "".join(f'<th scope="colgroup" colspan="{len(names)}">{esc(column)}</th>' for column, names in columns)
    heads = "".join(f'<th scope="col">{esc(name)}</th>' for _, names in columns for name in names)
    body = []
    for index, (name, cells) in enumerate(rows):
        parts = [f'<th scope="row">{esc(name)}</th>']
        for texts, rank, complete in cells:
            first, *rest = (esc(text) for text in texts)
            marked = {None: first, 1: f"<strong>{first}</strong>", 2: f"<u>{first}</u>"}[rank]
            state = "" if complete else ' class="incomplete"'
            parts += [f"<td{state}>{marked}</td>", *(f"<td>{part}</td>" for part in rest)]
        first_reference = ' class="reference"' if index == len(rows) - references else ""
        body.append(f"<tr{first_reference}>{''.join(parts)}</tr>")
    notes = "\n".join(f"<p>{esc(line)}</p>" for line in footer)
    ranked = any(rank for _, cells in rows for _, rank, _ in cells)
    legend = "\n<p><strong>Bold</strong>: best of its column; <u>underlined</u>: second.</p>" if ranked else ""
    table_body = "\n".join(body)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{esc(title)}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>{esc(title)}</h1>
<div class="wide">
<table>
<thead>
<tr><th rowspan="2" scope="col">heads</th>{groups}</tr>
<tr>{heads}</tr>
</thead>
<tbody>
{table_body}
</tbody>
</table>
</div>
<footer>
{notes}{legend}
</footer>
</body>
</html>
"""
