"""LightningModules: one file for each training paradigm. ``TASKS`` names them."""

from lapbench.tasks.classification import ImageClassification
from lapbench.tasks.language_modeling import LanguageModeling
from lapbench.tasks.segmentation import SemanticSegmentation

__all__ = ["ImageClassification", "LanguageModeling", "SemanticSegmentation"]
