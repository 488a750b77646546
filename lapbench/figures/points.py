"""Numbers of a run against its number of Laplacian heads: accuracy (arXiv 2602.09297, Fig. 3) and neural collapse."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lapbench.errors import UserError
from lapbench.figures.data import COLLAPSE, Figures, Group, grouped, over_seeds
from lapbench.figures.style import COLUMN, GREY, OKABE_ITO, legend_below, looks, new_figure, note, seeds_note
from lapbench.figures.ticks import schedule_ticks
from lapbench.results.metrics import kind_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS: dict[str, tuple[str, ...]] = {
    "NC1: within over between": COLLAPSE[:1],
    "NC2: equal norms": ("nc2_equinorm_means", "nc2_equinorm_classifier"),
    "NC2: equal angles": ("nc2_equiangular_means", "nc2_equiangular_classifier"),
    "NC3: self-duality": ("nc3",),
    "NC4: nearest mean": ("nc4",),
}
"""Panels and the numbers in each. The first of a panel is that of the class means, the second of the classifier."""
ROWS = ("class means", "classifier")


def draw_accuracy(data: Figures) -> "Figure":
    """A metric against the number of Laplacian heads: each seed, their mean and SD. References are dashed lines.

    Raises:
        UserError: runs with different metrics.
    """
    metric = _one(data, "metric", "metrics")
    kind = kind_of(metric)
    scale = 100 if kind.percent else 1
    groups = grouped(data["series"])
    places = [group for group in groups if not group.reference] or groups
    figure = new_figure(COLUMN, 2.6)
    axes = figure.add_subplot()
    style = looks(groups)
    for x, group in enumerate(places):
        values = [scale * series["value"] for series in group.members]
        axes.plot([x] * len(values), values, "o", color=style[group.label].color, alpha=0.4, markersize=3, zorder=1)
    _means(axes, places, [[scale * series["value"] for series in group.members] for group in places], OKABE_ITO[0])
    references = [group for group in groups if group not in places]
    for group, dash in zip(references, ("--", ":", "-.") * len(references), strict=False):
        summary = over_seeds(scale * series["value"] for series in group.members)
        assert summary is not None
        axes.axhline(summary.mean, color=GREY, linestyle=dash, linewidth=0.9, label=group.label)
    schedule_ticks(axes, places)
    axes.set_ylabel(f"{kind.title}{kind.unit}")
    note(axes, f"{metric}; dots: single seeds; {seeds_note(places, 'whiskers')}")
    legend_below(figure, axes)
    return figure


def draw_collapse(data: Figures) -> "Figure":
    """NC1 to NC4 of the last layer against the number of Laplacian heads; panels for what is defined in a run.

    Raises:
        UserError: runs whose features are different units (sequence means and class tokens).
    """
    unit = _one(data, "unit", "units of features")
    groups = grouped(data["series"])
    shown = {title: [key for key in keys if _any(data, key)] for title, keys in PANELS.items()}
    titles = [title for title, keys in shown.items() if keys]
    missing = [title.partition(":")[0] for title, keys in shown.items() if not keys]
    rows = max(1, -(-len(titles) // 2))
    figure = new_figure(COLUMN, 1.45 * rows + 0.6)
    panels = figure.subplots(rows, 2, squeeze=False)
    for index, axes in enumerate(panels.flat):
        if index >= len(titles):
            axes.set_axis_off()
            continue
        for which, key in enumerate(PANELS[titles[index]]):
            if key in shown[titles[index]]:
                values = [[series[key] for series in group.members] for group in groups]
                _means(axes, groups, values, OKABE_ITO[3 * which], ("-o", "--s")[which], ROWS[which])
        schedule_ticks(axes, groups)
        axes.set_title(titles[index])
        axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
        if index + 2 < len(titles):
            axes.set_xlabel("")
    without = f"not defined: {', '.join(missing)}" if missing else ""
    lines = [f"features: {unit}, last layer; {seeds_note(groups, 'whiskers')}", without]
    figure.suptitle("\n".join(filter(None, lines)), fontsize=6.5, color="#444444")
    for axes in panels.flat:
        if len(axes.get_legend_handles_labels()[1]) > 1:
            legend_below(figure, axes)
            break
    return figure


def _any(data: Figures, key: str) -> bool:
    return any(series[key] is not None for series in data["series"])


def _one(data: Figures, key: str, what: str) -> str:
    """The value that all series share. UserError: they do not."""
    labels = {series[key]: series["label"] for series in data["series"]}
    if len(labels) > 1:
        found = ", ".join(f"{value} ({label})" for value, label in labels.items())
        raise UserError(f"{data['figure']}: runs with different {what} cannot share a picture: {found}")
    value: str = data["series"][0][key]
    return value


def _means(
    axes: "Axes", groups: Sequence[Group], values: Sequence[Sequence[float | None]], color: str, line: str = "-o",
    label: str = "",
) -> None:
    """Means with whiskers of ± SD; a line joins the schedules, not the references. What has no value is left out."""
    found = [(x, over_seeds(each)) for x, each in enumerate(values)]
    for reference in (False, True):
        places = [(x, s) for x, s in found if s is not None and groups[x].reference == reference]
        if places:
            axes.errorbar(
                [x for x, _ in places],
                [summary.mean for _, summary in places],
                [summary.std or 0.0 for _, summary in places],
                fmt=line[-1] if reference else line,
                color=GREY if reference else color,
                elinewidth=0.8,
                label=label or None if not reference else None,
            )
