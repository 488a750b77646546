"""The numbers beside the figures, as text: fractions of the variance of tokens by schedule, mean and SD over seeds."""

from lapbench.figures.bars import PARTS, levels
from lapbench.figures.data import Figures, Group, grouped, over_seeds

GAP = "   "


def anova_table(data: Figures) -> str:
    """A row for each schedule, references last. Fractions of the total in the last layer, in percent."""
    groups = grouped(data["series"])
    parts = levels(data["series"])
    rows = [["heads", *(f"{PARTS[part]} (%)" for part in parts), "n"]]
    rows += [[group.label, *(_cell(group, part) for part in parts), str(len(group.members))] for group in groups]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        GAP.join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    rule = "─" * len(lines[0])
    lines.insert(1, rule)
    references = sum(group.reference for group in groups)
    if 0 < references < len(groups):
        lines.insert(-references, rule)
    layers = " or ".join(str(layer) for layer in sorted({group.common("layers")[-1] for group in groups}))
    title = f"Variance of tokens in layer {layers}, mean ± SD over n seeds"
    return "\n".join([title, "", *lines]) + "\n"


def _cell(group: Group, part: str) -> str:
    summary = over_seeds(series[part][-1] for series in group.members)
    if summary is None:
        return "not defined"
    mean = f"{100 * summary.mean:.2f}"
    return mean if summary.std is None else f"{mean} ± {100 * summary.std:.2f}"
