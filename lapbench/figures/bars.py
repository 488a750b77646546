"""Stacked fractions of the total variance of tokens: arXiv 2602.09297, Figs. 5 and 8."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lapbench.errors import UserError
from lapbench.figures.data import Figures, Group, Series, grouped, over_seeds
from lapbench.figures.style import COLUMN, OKABE_ITO, PAGE, legend_below, new_figure, note, seeds_note, undefined_note
from lapbench.figures.ticks import head_axis, schedule_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = {"within_sequence": "within sequence", "within_class": "within class", "between_class": "between classes"}
"""Levels of the analysis of variance, from the bottom of a bar to its top."""
COLORS = dict(zip(PARTS, (OKABE_ITO[0], OKABE_ITO[4], OKABE_ITO[1]), strict=True))
INK = dict(zip(PARTS, ("white", "black", "black"), strict=True))


def levels(series: Sequence[Series]) -> list[str]:
    """The parts that the runs have: three, or two where each token has its own class (language models).

    Raises:
        UserError: runs of both sorts.
    """
    two = [each["within_sequence"] is None for each in series]
    if len({*two}) > 1:
        raise UserError(
            "anova: runs with three levels (within sequence, within class, between classes) and with two cannot share "
            f"a picture: {series[two.index(False)]['label']} has three, {series[two.index(True)]['label']} two"
        )
    return [part for part in PARTS if not (two[0] and part == "within_sequence")]


def draw_anova(data: Figures) -> "Figure":
    """A bar for each schedule: the fractions in the last layer that was measured, mean and SD over seeds."""
    groups = grouped(data["series"])
    parts = levels(data["series"])
    figure = new_figure(COLUMN if len(groups) <= 10 else PAGE, 2.4)
    axes = figure.add_subplot()
    undefined = [group.label for i, group in enumerate(groups) if not _stack(axes, i, group, parts, len(groups))]
    schedule_ticks(axes, groups, figure.get_figwidth() - 0.5)
    axes.set_xlabel(head_axis(groups))
    axes.set_ylim(0, 100)
    axes.set_ylabel("variance of tokens (%)")
    layers = sorted({group.common("layers")[-1] for group in groups})
    note(
        figure,
        f"layer {' or '.join(map(str, layers))}; {seeds_note(groups, 'whiskers')}",
        undefined_note(undefined),
    )
    legend_below(figure, *axes.get_legend_handles_labels())
    return figure


def _stack(axes: "Axes", x: float, group: Group, parts: Sequence[str], bars: int) -> bool:
    """One bar; False if it has no fractions, as the total is zero."""
    bottom = 0.0
    for index, part in enumerate(parts):
        summary = over_seeds(series[part][-1] for series in group.members)
        if summary is None:
            axes.text(x, 50, "not defined", rotation=90, ha="center", va="center", fontsize=6.5, color="#444444")
            return False
        height = 100 * summary.mean
        known = PARTS[part] in axes.get_legend_handles_labels()[1]  # once in the legend
        label = None if known else PARTS[part]
        axes.bar(x, height, 0.8, bottom=bottom, color=COLORS[part], edgecolor="white", linewidth=0.4, label=label)
        if height >= 7 and bars <= 10:
            axes.text(x, bottom + height / 2, f"{height:.1f}", ha="center", va="center", fontsize=6, color=INK[part])
        bottom += height
        if summary.std is not None and part != parts[-1]:
            # Side by side, as the whiskers of two thin parts would else lie on each other.
            axes.errorbar(x + 0.24 * (index * 2 - 1), bottom, 100 * summary.std, color="black", linewidth=0.8)
    return True
