"""Figures of what was measured: each is drawn from plain data that stand beside it as JSON. Imports no torch."""

from lapbench.figures.data import load_figure, merge
from lapbench.figures.save import FIGURES, save_figure

__all__ = ["FIGURES", "load_figure", "merge", "save_figure"]
