"""The look of all figures: sizes for a paper's columns, colours that colour-blind readers tell apart, and the files.

A schedule has the same colour in every figure: by its share of Laplacian heads for those that have no other kinds, by
its place among the other schedules else. References are grey.
"""

import io
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lapbench.figures.data import Group

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMN, PAGE = 3.3, 6.9
"""Widths in inches: one column of a paper with two, and the whole page."""

OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#000000", "#F0E442")
"""Okabe and Ito, Color Universal Design (2008), the strongest contrasts first."""
MUTED = ("#332288", "#DDCC77", "#117733", "#CC6677", "#88CCEE", "#882255", "#44AA99", "#AA4499", "#999933", "#000000")
"""Paul Tol's muted scheme with black: ten classes."""
GREY = "#7F7F7F"
DASHES = ("-", "--", "-.", ":")
REFERENCE_DASHES = ("--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib: the same letters on every machine
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.title_fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "errorbar.capsize": 2,
    "figure.constrained_layout.h_pad": 0.03,
    "figure.constrained_layout.w_pad": 0.03,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lapbench",  # else identifiers are random
    "path.simplify": True,
}


@contextmanager
def settings() -> Iterator[None]:
    """Matplotlib's own defaults with ours on top, whatever the user's matplotlibrc says; put back afterwards."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams  # its stubs list every key
        parameters.update(_SETTINGS)
        yield


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure that no window or global state knows. Sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def render(figure: "Figure") -> dict[str, bytes]:
    """The content of a PNG (200 dpi) and an SVG file, the same bytes for the same data."""
    files = {}
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None, "Creator": None})):
        stream = io.BytesIO()
        figure.savefig(stream, format=suffix, dpi=200, metadata=metadata)
        files[suffix] = stream.getvalue()
        figure.set_layout_engine("none")  # placed once, at the PNG's resolution, and the same in both
    return files


@dataclass(frozen=True)
class Look:
    """How a group is drawn."""

    color: Any
    dash: str
    marker: str


def looks(groups: Sequence[Group]) -> dict[str, Look]:
    """By label. Groups that would have the same colour differ in dashes and markers."""
    found: dict[str, Look] = {}
    used: dict[Any, int] = {}
    for group in groups:
        color = _color(group)
        repeat = used.get(color, 0)
        used[color] = repeat + 1
        found[group.label] = Look(color, DASHES[repeat % len(DASHES)], MARKERS[repeat % len(MARKERS)])
    return found


def _color(group: Group) -> Any:
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    if group.reference:
        return GREY
    if group.laplacian_heads is None or not group.num_heads or not is_laplacian(group.label):
        return OKABE_ITO[zlib.crc32(group.label.encode()) % len(OKABE_ITO)]
    # Lightness grows with the share, so that the order is seen in grey too; the palest yellow is left out.
    return to_hex(colormaps["viridis"](0.88 * group.laplacian_heads / group.num_heads))


def is_laplacian(label: str) -> bool:
    """Whether a schedule's name has attention and Laplacian heads only: "0L", "0-12L", "6L@last4", "0L_2Lx10_0L"."""
    return re.fullmatch(r"[0-9]+(-[0-9]+)?L(@[a-z]+[0-9]+)?(x[0-9]+)?(_[0-9]+L(x[0-9]+)?)*", label) is not None


def seeds_note(groups: Sequence[Group], spread: str) -> str:
    """ "Mean ± SD over 3 seeds": what the band or whiskers (``spread``) are."""
    counts = sorted({len(group.members) for group in groups if not group.reference} or {1})
    if counts == [1]:
        return "one seed"
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean, {spread}: ± SD over {number} seeds"


def undefined_note(labels: Sequence[str]) -> str:
    """The line that names what could not be drawn, as it has no value."""
    return f"not defined: {', '.join(labels)}" if labels else ""


def legend_below(figure: "Figure", handles: Sequence[Any], labels: Sequence[str], title: str = "") -> None:
    """A legend below all panels, where it hides no data. The figure grows by its height."""
    if not labels:
        return
    width, height = figure.get_size_inches()
    sizes = [0.43 + 0.054 * len(label) for label in labels]  # handle, gap and letters
    fitting = len(labels) if sum(sizes) <= width else max(1, int(width / max(sizes)))
    rows = -(-len(labels) // fitting)
    columns = -(-len(labels) // rows)  # rows as even as they can be
    figure.set_size_inches(width, height + 0.08 + 0.15 * (rows + bool(title)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, title=title or None, columnspacing=1.2)


def note(figure: "Figure", *lines: str) -> None:
    """Small print above all panels."""
    if text := "\n".join(filter(None, lines)):
        figure.suptitle(text, fontsize=6.5, color="#444444")
