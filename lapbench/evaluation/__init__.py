"""Evaluations that ``lapbench fit`` runs after training: callbacks named in the config's ``trainer.callbacks``."""

from lapbench.evaluation.base import Evaluation, FinishedTraining
from lapbench.evaluation.geometry import TokenGeometry
from lapbench.evaluation.knn import NearestNeighbors
from lapbench.evaluation.language import LanguageEvaluation
from lapbench.evaluation.linear_probe import LinearProbe
from lapbench.evaluation.segmentation import Segmentation

__all__ = [
    "Evaluation",
    "FinishedTraining",
    "LanguageEvaluation",
    "LinearProbe",
    "NearestNeighbors",
    "Segmentation",
    "TokenGeometry",
]
