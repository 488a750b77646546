"""The horizontal axis of figures against the number of Laplacian heads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lapbench.figures.data import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def counts_heads(groups: Sequence[Group]) -> bool:
    """Whether each schedule but the references is a number of Laplacian heads, the same in all layers."""
    return all(group.label == f"{group.laplacian_heads:g}L" for group in groups if not group.reference)


def schedule_ticks(axes: "Axes", groups: Sequence[Group]) -> None:
    """Group i stands at i: numbers of heads where the schedules are such numbers, their names else."""
    plain = counts_heads(groups)
    labels = [group.label.removesuffix("L") if plain and not group.reference else group.label for group in groups]
    wide = sum(map(len, labels)) > 14 * axes.figure.get_figwidth() / max(1, axes.get_subplotspec().get_gridspec().ncols)
    axes.set_xticks(
        range(len(groups)),
        labels,
        rotation=40 if wide else 0,
        ha="right" if wide else "center",
        rotation_mode="anchor",
    )
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_xlabel(head_axis(groups))


def head_axis(groups: Sequence[Group]) -> str:
    """ "Laplacian heads per layer (of 6)", or "head schedule"."""
    if not counts_heads(groups):
        return "head schedule"
    totals = {group.num_heads for group in groups if not group.reference and group.num_heads}
    return "Laplacian heads per layer" + (f" (of {totals.pop()})" if len(totals) == 1 else "")
