"""Feature maps beside their images: arXiv 2602.09297, Fig. 9."""

import base64
import binascii
import io
from typing import TYPE_CHECKING, Any

from lapbench.errors import UserError
from lapbench.figures.data import Figures, Group, grouped
from lapbench.figures.scatter import chosen
from lapbench.figures.style import COLUMN, PAGE, new_figure, note

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_IMAGES = 6


def draw_feature_maps(data: Figures) -> "Figure":
    """Rows are images, columns the image and then the map of each schedule's lowest seed.

    Raises:
        UserError: runs that have no image in common, or an image that is not a PNG.
    """
    groups, left_out = chosen(grouped(data["series"]))
    common = [key for key in groups[0].first["keys"] if all(key in group.first["keys"] for group in groups)]
    if not common:
        raise UserError(
            f"feature_maps: the runs of {' and '.join(group.label for group in groups)} have no image in common; "
            "expected maps of the same images"
        )
    keys = common[:MOST_IMAGES]
    columns = 1 + len(groups)
    width = COLUMN if columns <= 4 else PAGE
    side = min(1.1, width / columns)
    figure = new_figure(columns * side, (side - 0.03) * len(keys) + (0.4 if left_out else 0.22))
    panels = figure.subplots(len(keys), columns, squeeze=False)
    for row, key in zip(panels, keys, strict=True):
        _picture(row[0], _image(groups[0], key), "gray")
        for axes, group in zip(row[1:], groups, strict=True):
            _picture(axes, group.first["maps"][group.first["keys"].index(key)], None)
    panels[0][0].set_title("image")
    for axes, group in zip(panels[0][1:], groups, strict=True):
        axes.set_title(group.label)
    if left_out:
        note(figure, *left_out)
    return figure


def _picture(axes: Any, picture: Any, cmap: str | None) -> None:
    axes.imshow(picture, cmap=cmap, interpolation="nearest")
    axes.set_axis_off()


def _image(group: Group, key: str) -> Any:
    from matplotlib.image import imread

    text = group.first["images"][group.first["keys"].index(key)]
    try:
        return imread(io.BytesIO(base64.b64decode(text, validate=True)), format="png")
    except (binascii.Error, OSError, ValueError, SyntaxError) as error:
        raise UserError(f"feature_maps: image {key} of {group.label} is not a base64 PNG: {error}") from error
