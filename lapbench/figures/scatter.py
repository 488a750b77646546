"""Clouds of points, a panel for each schedule: PCA of tokens, and simplices of three classes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lapbench.figures.data import Figures, Group, grouped
from lapbench.figures.style import COLUMN, MARKERS, MUTED, OKABE_ITO, PAGE, legend_below, new_figure, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 8
MOST_NAMED = 20
"""Classes that a legend lists."""
_FEW_POINTS = 500


def draw_pca(data: Figures) -> "Figure":
    """Tokens on the first two principal components, coloured by class; of each schedule the lowest seed."""
    groups, left_out = chosen(grouped(data["series"]))
    figure, panels = _panels(groups, 0.22)
    present = sorted({number for group in groups for number in group.first["classes"]})
    for axes, group in zip(panels, groups, strict=False):
        series = group.first
        _cloud(axes, series["points"], series["classes"], present)
        texts = [
            f"PC {i}" if share is None else f"PC {i} ({100 * share:.1f} %)"
            for i, share in enumerate(series["explained"], 1)
        ]
        axes.set_xlabel(texts[0], fontsize=7)
        axes.set_ylabel(texts[1], fontsize=7)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_box_aspect(1)
        axes.margins(0.06)
        axes.set_title(_title(group))
    names = groups[0].first["class_names"]
    named = [names[number] if names and 0 <= number < len(names) else str(number) for number in present]
    if len(present) <= MOST_NAMED:
        _class_legend(figure, named)
    else:
        left_out = [*left_out, f"{len(present)} classes; colours and markers repeat"]
    note(figure, "; ".join(left_out))
    return figure


def draw_simplex(data: Figures) -> "Figure":
    """Features of three classes in the plane of their classifier rows; the vertices are perfect collapse."""
    groups, left_out = chosen(grouped(data["series"]))
    figure, panels = _panels(groups, 0.05)
    everywhere = [point for group in groups for key in ("points", "vertices") for point in group.first[key]]
    limits = [(min(values) - 0.05, max(values) + 0.05) for values in zip(*everywhere, strict=True)]
    for axes, group in zip(panels, groups, strict=False):
        series = group.first
        corners = series["vertices"]
        x, y = zip(*corners, corners[0], strict=True)
        axes.plot(x, y, color="#999999", linewidth=0.8, zorder=0)
        _cloud(axes, series["points"], series["classes"], [0, 1, 2])
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.set_xlim(*limits[0])
        axes.set_ylim(*limits[1])
        axes.set_title(_title(group))
    names = groups[0].first.get("class_names")
    ids = groups[0].first["chosen"]
    _class_legend(figure, [names[number] if names else f"class {number}" for number in ids])
    note(figure, "; ".join(left_out))
    return figure


def chosen(groups: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """At most ``MOST_PANELS`` groups, the ends among them, and the line that says so."""
    if len(groups) <= MOST_PANELS:
        return list(groups), []
    places = [round(i * (len(groups) - 1) / (MOST_PANELS - 1)) for i in range(MOST_PANELS)]
    return [groups[i] for i in places], [f"{MOST_PANELS} of {len(groups)} schedules"]


def _panels(groups: Sequence[Group], extra: float) -> "tuple[Figure, Sequence[Axes]]":
    """A square for each group: at most two abreast in a column, four on a page. ``extra`` is for what is below each."""
    columns = min(len(groups), 2 if len(groups) <= 2 else 4 if len(groups) > 3 else 3)
    width = COLUMN if columns <= 2 else PAGE
    rows = -(-len(groups) // columns)
    side = width / max(columns, 2)
    figure = new_figure(width, rows * (side + extra) + 0.1)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    return figure, panels


def _cloud(axes: "Axes", points: Sequence[Sequence[float]], classes: Sequence[int], every: Sequence[int]) -> None:
    """The points, class by class. A class has the same look in every panel, by its place in ``every``."""
    size, alpha = (10, 0.8) if len(points) <= _FEW_POINTS else (5, 0.7)
    for rank, number in enumerate(every):
        mine = [point for point, own in zip(points, classes, strict=True) if own == number]
        if mine:
            x, y = zip(*mine, strict=True)
            # Thousands of marks as vectors would make a picture of megabytes.
            raster = len(points) > 4 * _FEW_POINTS
            axes.scatter(x, y, s=size, alpha=alpha, linewidths=0, rasterized=raster, **_look(rank, len(every)))


def _look(rank: int, total: int) -> dict[str, Any]:
    colors = OKABE_ITO[:7] if total <= 7 else MUTED  # without yellow, which is hard to see on white
    return {"color": colors[rank % len(colors)], "marker": MARKERS[rank // len(colors) % len(MARKERS)]}


def _class_legend(figure: "Figure", names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], linestyle="", markersize=4, **_look(rank, len(names))) for rank in range(len(names))]
    legend_below(figure, handles, [name if len(name) <= 22 else name[:21] + "…" for name in names])


def _title(group: Group) -> str:
    return group.label if len(group.members) == 1 else f"{group.label} (seed {group.first['seed']})"
