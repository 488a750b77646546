"""Numbers of a run against its number of Laplacian heads: accuracy (arXiv 2602.09297, Fig. 3) and neural collapse."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lapbench.errors import UserError
from lapbench.figures.data import Figures, Group, grouped, over_seeds
from lapbench.figures.style import (
    COLUMN,
    GREY,
    OKABE_ITO,
    REFERENCE_DASHES,
    legend_below,
    looks,
    new_figure,
    note,
    seeds_note,
)
from lapbench.figures.ticks import head_axis, schedule_ticks
from lapbench.results.metrics import SPLITS, kind_of, show, split_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS: dict[str, tuple[str, ...]] = {
    "NC1: within over between": ("nc1",),
    "NC2: equal norms": ("nc2_equinorm_means", "nc2_equinorm_classifier"),
    "NC2: equal angles": ("nc2_equiangular_means", "nc2_equiangular_classifier"),
    "NC3: self-duality": ("nc3",),
    "NC4: nearest mean": ("nc4",),
}
"""Panels and the numbers in each. The first of a panel is that of the class means, the second of the classifier."""
ROWS = ("class means", "classifier")
_COLORS = (OKABE_ITO[0], OKABE_ITO[3])
_LINES = ("-o", "--s")

Values = Sequence[Sequence[float | None]]


def draw_accuracy(data: Figures) -> "Figure":
    """A metric against the number of Laplacian heads: each seed, their mean and SD. References are grey lines.

    Raises:
        UserError: runs with different metrics.
    """
    metric = _one(data, "metric", "metrics")
    kind = kind_of(metric)
    scale = 100 if kind.percent else 1
    places, references = _split(grouped(data["series"]))
    figure = new_figure(COLUMN, 2.2)
    axes = figure.add_subplot()
    style = looks(places)
    values = [[scale * series["value"] for series in group.members] for group in places]
    for x, group in enumerate(places):
        dots = {"color": style[group.label].color, "alpha": 0.5, "markersize": 3, "zorder": 1}
        axes.plot([x] * len(values[x]), values[x], "o", **dots)
    _means(axes, values, _COLORS[0], _LINES[0])
    _breathe(axes)
    handles, labels = [], []
    for group, dash in zip(references, REFERENCE_DASHES * len(references), strict=False):
        summary = over_seeds(scale * series["value"] for series in group.members)
        assert summary is not None
        inside = _reference(axes, summary.mean, dash, GREY)
        handles.append(_key(GREY, dash))
        labels.append(f"{group.label}: {show(summary.mean / scale, kind)}" + ("" if inside else " (outside)"))
    schedule_ticks(axes, places, COLUMN - 0.5)
    axes.set_xlabel(head_axis(places))
    split = split_of(metric)
    axes.set_ylabel(f"{split + ' ' if split in SPLITS else ''}{kind.title}{kind.unit}")
    several = any(len(group.members) > 1 for group in places)
    note(figure, f"{'dots: single seeds; ' if several else ''}{seeds_note(places, 'whiskers')}")
    legend_below(figure, handles, labels)
    return figure


def draw_collapse(data: Figures) -> "Figure":
    """NC1 to NC4 of the last layer against the number of Laplacian heads; panels for what is defined in a run.

    Raises:
        UserError: runs whose features are different units (sequence means and class tokens).
    """
    unit = _one(data, "unit", "units of features")
    places, references = _split(grouped(data["series"]))
    shown = {
        title: [key for key in keys if any(series[key] is not None for series in data["series"])]
        for title, keys in PANELS.items()
    }
    titles = [title for title, keys in shown.items() if keys]
    rows = max(1, -(-len(titles) // 2))
    figure = new_figure(COLUMN, 1.3 * rows + 0.45)
    panels = figure.subplots(rows, 2, squeeze=False)
    for axes in panels.flat[len(titles) :]:
        axes.set_axis_off()
    outside = []
    for axes, title in zip(panels.flat, titles, strict=False):
        outside += _panel(axes, shown[title], title, places, references)
    for axes in panels.flat[max(0, len(titles) - 2) : len(titles)]:  # the lowest of each column
        axes.set_xlabel(head_axis(places, totals=False), fontsize=7)
    missing = [title.partition(":")[0] for title, keys in shown.items() if not keys]
    note(
        figure,
        f"features: {unit}, last layer; {seeds_note(places, 'whiskers')}",
        f"not defined: {', '.join(dict.fromkeys(missing))}" if missing else "",
        f"outside: {'; '.join(outside)}" if outside else "",
    )
    both = any(len(keys) > 1 for keys in shown.values())
    handles = [_key(color, line[:-1], line[-1]) for color, line in zip(_COLORS, _LINES, strict=True)] if both else []
    handles += [_key(GREY, dash) for _, dash in zip(references, REFERENCE_DASHES * len(references), strict=False)]
    legend_below(figure, handles, [*(ROWS if both else ()), *(group.label for group in references)])
    return figure


def _panel(
    axes: "Axes", keys: Sequence[str], title: str, places: Sequence[Group], references: Sequence[Group]
) -> list[str]:
    """One panel of neural collapse; the references that are too far away to be drawn, with their numbers."""
    for key in keys:
        which = PANELS[title].index(key)
        _means(axes, _values(places, key), _COLORS[which], _LINES[which])
    axes.set_ylim(bottom=0)  # 0 is collapse
    _breathe(axes)
    outside = []
    for key in keys:
        which = PANELS[title].index(key)
        for group, dash in zip(references, REFERENCE_DASHES * len(references), strict=False):
            summary = over_seeds(series[key] for series in group.members)
            if summary and not _reference(axes, summary.mean, dash, _COLORS[which] if len(keys) > 1 else GREY):
                outside.append(f"{group.label} {title.partition(':')[0]} {summary.mean:.3g}")
    schedule_ticks(axes, places, COLUMN / 2 - 0.4)
    axes.set_title(title)
    return outside


def _split(groups: Sequence[Group]) -> tuple[list[Group], list[Group]]:
    """Schedules and references; references alone stand in the place of schedules."""
    schedules = [group for group in groups if not group.reference]
    return (schedules, [group for group in groups if group.reference]) if schedules else (list(groups), [])


def _values(groups: Sequence[Group], key: str) -> Values:
    return [[series[key] for series in group.members] for group in groups]


def _one(data: Figures, key: str, what: str) -> str:
    """The value that all series share. UserError: they do not."""
    labels = {series[key]: series["label"] for series in data["series"]}
    if len(labels) > 1:
        found = ", ".join(f"{value} ({label})" for value, label in labels.items())
        raise UserError(f"{data['figure']}: runs with different {what} cannot share a picture: {found}")
    value: str = data["series"][0][key]
    return value


def _means(axes: "Axes", values: Values, color: str, line: str) -> None:
    """Means with whiskers of ± SD, joined by a line. What has no value is left out, and so is the SD of one seed."""
    found = [(x, summary) for x, each in enumerate(values) if (summary := over_seeds(each))]
    axes.plot([x for x, _ in found], [summary.mean for _, summary in found], line, color=color)
    spread = [(place, summary.mean, summary.std) for place, summary in found if summary.std is not None]
    if spread:
        places, mean, std = zip(*spread, strict=True)
        axes.errorbar(places, mean, std, fmt="none", color=color, elinewidth=0.8)


def _breathe(axes: "Axes") -> None:
    """Room for the marks at the upper edge, and for the lines of references."""
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.06 * (high - low))


def _reference(axes: "Axes", value: float, dash: Any, color: str) -> bool:
    """A line across at ``value``; none, and False, if showing it would crush the schedules' own range to a third."""
    low, high = axes.get_ylim()
    if not low - 2 * (high - low) <= value <= high + 2 * (high - low):
        return False
    axes.axhline(value, color=color, linestyle=dash, linewidth=0.9, zorder=0)
    margin = 0.06 * (high - low)
    axes.set_ylim(min(low, value - margin) if value < low else low, max(high, value + margin))
    return True


def _key(color: str, dash: Any, marker: str = "") -> Any:
    from matplotlib.lines import Line2D

    return Line2D([], [], color=color, linestyle=dash, marker=marker)
