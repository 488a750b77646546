"""The horizontal axis of figures against the number of Laplacian heads."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lapbench.figures.data import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def counts_heads(groups: Sequence[Group]) -> bool:
    """Whether each schedule but the references is a number of Laplacian heads, the same in all layers."""
    schedules = [group for group in groups if not group.reference]
    return all(
        group.laplacian_heads is not None and group.label == f"{group.laplacian_heads:g}L" for group in schedules
    )


def schedule_ticks(axes: "Axes", groups: Sequence[Group], width: float) -> None:
    """Group i stands at i: numbers of heads where the schedules are such numbers, their names else.

    Of more numbers than fit into ``width`` inches, every second, third, ... is written; names are turned.
    """
    plain = counts_heads(groups)
    labels = [group.label.removesuffix("L") if plain and not group.reference else group.label for group in groups]
    places = range(len(groups))
    turned = False
    if plain and not any(group.reference for group in groups):
        places = range(0, len(groups), -(-len(groups) * 22 // int(100 * width)))
    else:
        turned = sum(len(label) + 2 for label in labels) > 17 * width
    axes.set_xticks(places, [labels[place] for place in places])
    if turned:
        for text in axes.get_xticklabels():
            text.set(rotation=35, ha="right", rotation_mode="anchor")
    axes.set_xlim(-0.6, len(groups) - 0.4)


def head_axis(groups: Sequence[Group], totals: bool = True) -> str:
    """ "Laplacian heads per layer (of 6)", without the 6 for narrow panels, or "head schedule"."""
    if not counts_heads(groups):
        return "head schedule"
    sizes = {group.num_heads for group in groups if not group.reference and group.num_heads}
    return "Laplacian heads per layer" + (f" (of {sizes.pop()})" if totals and len(sizes) == 1 else "")
