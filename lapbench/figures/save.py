"""All figures by name, and the three files of each: the numbers, a picture for screens, a picture for papers."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lapbench.figures.bars import draw_anova
from lapbench.figures.data import Figures, problem
from lapbench.figures.lines import draw_similarity, draw_spectrum, draw_sublayers
from lapbench.figures.maps import draw_feature_maps
from lapbench.figures.points import draw_accuracy, draw_collapse
from lapbench.figures.scatter import draw_pca, draw_simplex
from lapbench.figures.style import render, settings
from lapbench.results.files import write_atomically, write_json

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: "dict[str, Callable[[Figures], Figure]]" = {
    "anova": draw_anova,
    "similarity": draw_similarity,
    "spectrum": draw_spectrum,
    "collapse": draw_collapse,
    "pca": draw_pca,
    "feature_maps": draw_feature_maps,
    "simplex": draw_simplex,
    "sublayers": draw_sublayers,
    "accuracy": draw_accuracy,
}
"""What draws a figure from its data (see `lapbench.figures.data`). A new figure is an entry here and in ``FIELDS``."""


def draw(data: Figures) -> dict[str, bytes]:
    """The content of the pictures, by suffix. UserError: series that cannot share a picture."""
    with settings():
        return render(FIGURES[data["figure"]](data))


def save_figure(folder: Path, name: str, data: Figures) -> list[Path]:
    """Write ``folder/NAME.json``, ``NAME.png`` and ``NAME.svg``, each as a whole or not at all. Returns their paths.

    The numbers are written first: a picture never lacks them. Equal data give equal bytes.

    Args:
        folder: made if it is missing.
        name: of the figure, a key of ``FIGURES``.
        data: ``{"figure": name, "series": [...]}``.

    Raises:
        ValueError: unknown figure, or data that are not its own (a missing field, a NaN, ...).
        UserError: a file cannot be written, or series that cannot share a picture (see the draw functions).
    """
    if wrong := problem(data):
        raise ValueError(f"data of figure {name}: {wrong}")
    if data["figure"] != name:
        raise ValueError(f"expected the data of figure {name}, got those of {data['figure']}")
    pictures = draw(data)  # what cannot be drawn leaves all three files as they were
    paths = [folder / f"{name}.json"]
    write_json(paths[0], data)
    for suffix, content in pictures.items():
        paths.append(folder / f"{name}.{suffix}")
        write_atomically(paths[-1], content)
    return paths
