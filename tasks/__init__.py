"""LightningModules: one file for each training paradigm. ``TASKS`` names them."""

from lapbench.tasks.classification import ImageClassification
from lapbench.tasks.dino import DINO
from lapbench.tasks.frozen import FrozenBackbone
from lapbench.tasks.language_modeling import LanguageModeling
from lapbench.tasks.segmentation import SemanticSegmentation

__all__ = ["DINO", "FrozenBackbone", "ImageClassification", "LanguageModeling", "SemanticSegmentation"]
