"""Curves against depth and against the number of the eigenvalue: arXiv 2602.09297, Figs. 6, 7 and 10."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from lapbench.figures.data import Figures, Group, Series, curve, grouped, over_seeds
from lapbench.figures.style import (
    COLUMN,
    PAGE,
    Look,
    legend_below,
    looks,
    new_figure,
    note,
    seeds_note,
    undefined_note,
)
from lapbench.results.statistics import Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FLOOR = 1e-9
"""Eigenvalues below this part of the largest are rounding: of T centred tokens at most T - 1 are above zero."""


def draw_similarity(data: Figures) -> "Figure":
    """Mean cosine similarity of the tokens of a sequence against depth, a curve for each schedule."""
    groups = grouped(data["series"])
    figure = new_figure(COLUMN, 2.2)
    axes = figure.add_subplot()
    undefined = []
    for group, look in zip(groups, looks(groups).values(), strict=True):
        if not _line(axes, group.common("layers"), curve(group, "similarity"), group.label, look):
            undefined.append(group.label)
    _depth(axes, groups)
    axes.set_ylabel("cosine similarity")
    note(figure, f"tokens of one sequence; {seeds_note(groups, 'band')}", undefined_note(undefined))
    legend_below(figure, *axes.get_legend_handles_labels())
    return figure


def draw_spectrum(data: Figures) -> "Figure":
    """Eigenvalues of the centred tokens of a sequence, and how many hold the fraction alpha of their sum.

    The band is the SD over sequences, pooled over seeds; where it reaches below zero it goes on to the axis.
    """
    groups = grouped(data["series"])
    figure = new_figure(COLUMN, 2.3)
    axes = figure.add_subplot()
    axes.set_yscale("log")
    lowest, highest = math.inf, 0.0
    undefined = []
    for group, look in zip(groups, looks(groups).values(), strict=True):
        means = [summary.mean for summary in curve(group, "eigenvalues_mean") if summary]
        largest = max(means, default=0.0)
        shown = [(i + 1, mean) for i, mean in enumerate(means) if largest > 0 and mean > FLOOR * largest]
        if not shown:
            undefined.append(group.label)
            continue
        lowest, highest = min(lowest, shown[-1][1]), max(highest, largest)
        k = over_seeds(series["k_alpha"] for series in group.members)
        label = group.label if k is None else f"{group.label}: {k.mean:.1f}"
        x, y = zip(*shown, strict=True)
        axes.plot(x, y, look.dash, color=look.color, label=label)
        spread = _pooled(group)
        if spread is not None:
            low = [max(mean - spread[i - 1], FLOOR * largest) for i, mean in shown]
            axes.fill_between(x, low, [m + spread[i - 1] for i, m in shown], color=look.color, alpha=0.15, linewidth=0)
        if k is not None:
            axes.axvline(k.mean, color=look.color, linestyle=":", linewidth=0.9)
            axes.plot([k.mean], [_at(shown, k.mean)], look.marker, color=look.color)
    if highest:
        axes.set_ylim(lowest / 2, highest * 3)
    axes.set_xlabel("eigenvalue number")
    axes.set_ylabel("eigenvalue")
    alphas = sorted({series["alpha"] for series in data["series"]})
    percent = " or ".join(f"{100 * alpha:g} %" for alpha in alphas)
    note(figure, "centred tokens of a sequence; band: ± SD over sequences", undefined_note(undefined))
    title = f"dotted: number of components with {percent} of the variance"
    legend_below(figure, *axes.get_legend_handles_labels(), title)
    return figure


def _pooled(group: Group) -> list[float] | None:
    """Root mean square over seeds of the SD over sequences; None where a seed has one sequence only."""
    stds: list[Sequence[float | None]] = [series["eigenvalues_std"] or [None] for series in group.members]
    if any(value is None for each in stds for value in each):
        return None
    squares = [[value**2 for value in each if value is not None] for each in stds]
    return [math.sqrt(math.fsum(values) / len(values)) for values in zip(*squares, strict=True)]


def _at(points: Sequence[tuple[int, float]], x: float) -> float:
    """Height of the curve at ``x``, on its logarithmic axis."""
    for (left, low), (right, high) in pairwise(points):
        if left <= x <= right:
            part = (x - left) / (right - left)
            return math.exp((1 - part) * math.log(low) + part * math.log(high))
    return points[0][1] if x < points[0][0] else points[-1][1]


def draw_sublayers(data: Figures) -> "Figure":
    """Variance within sequences after a sublayer over that before, against depth: attention, MLP, each kind of head.

    A kind's curve is what the residual stream would be if only its heads had been added.
    """
    groups = grouped(data["series"])
    ratios = {group.label: [_ratios(series) for series in group.members] for group in groups}
    titles = list(dict.fromkeys(title for each in ratios.values() for found in each for title in found))
    titles.sort(key=lambda title: title.endswith("alone"))  # the whole sublayers first
    columns = 2 if len(titles) <= 4 else 4
    rows = -(-len(titles) // columns)
    figure = new_figure(COLUMN if columns == 2 else PAGE, 1.4 * rows + 0.3)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    style = looks(groups)
    for index, axes in enumerate(panels.flat):
        if index >= len(titles):
            axes.set_axis_off()
            continue
        axes.axhline(1, color=_RULE, linewidth=0.6)
        for group in groups:
            lists = [found[titles[index]] for found in ratios[group.label] if titles[index] in found]
            summaries = [over_seeds(values) for values in zip(*lists, strict=True)]
            # An empty curve still puts the schedule into the legend, which is that of the first panel.
            _line(axes, group.common("layers") if lists else [], summaries, group.label, style[group.label])
        axes.set_title(titles[index])
        if index % columns == 0:
            axes.set_ylabel("after / before")
        if index + columns >= len(titles):
            _depth(axes, groups)
            axes.xaxis.set_tick_params(labelbottom=True)
    note(figure, f"variance within sequences; {seeds_note(groups, 'band')}")
    legend_below(figure, *panels.flat[0].get_legend_handles_labels())
    return figure


_RULE = "#999999"


def _ratios(series: Series) -> dict[str, list[float | None]]:
    """By title of the panel, a ratio for each layer."""
    before = series["before_attention"]
    found = {
        "attention": _divide(series["after_attention"], before),
        "MLP": _divide(series["after_mlp"], series["after_attention"]),
    }
    for kind, values in series["by_kind"].items():
        if values["variance"] is not None:
            found[f"{kind} heads alone"] = _divide(values["variance"], before)
    return found


def _divide(after: Sequence[float | None], before: Sequence[float | None]) -> list[float | None]:
    return [a / b if a is not None and b else None for a, b in zip(after, before, strict=True)]


def _line(axes: "Axes", x: Sequence[float], summaries: Sequence[Summary | None], label: str, look: Look) -> bool:
    """A curve with its band and gaps where it is not defined; False if it is nowhere."""
    gap = math.nan
    mean = [summary.mean if summary else gap for summary in summaries]
    marker = look.marker if len(x) <= 16 else ""
    axes.plot(x, mean, look.dash, marker=marker, markersize=3, color=look.color, label=label)
    std = [summary.std if summary and summary.std is not None else gap for summary in summaries]
    if not all(map(math.isnan, std)):
        low, high = ([m + sign * s for m, s in zip(mean, std, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=look.color, alpha=0.2, linewidth=0)
    return any(summaries)


def _depth(axes: "Axes", groups: Sequence[Group]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    layers = [layer for group in groups for layer in group.common("layers")]
    if len({*layers}) == 1:
        axes.set_xticks([layers[0]])
    axes.set_xlabel("layer")
