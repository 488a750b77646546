"""LightningModules: one file for each training paradigm. ``TASKS`` names them."""

from lapbench.tasks.classification import ImageClassification
from lapbench.tasks.dino import DINO
from lapbench.tasks.frozen import FrozenBackbone
from lapbench.tasks.language_modeling import LanguageModeling

__all__ = ["DINO", "FrozenBackbone", "ImageClassification", "LanguageModeling"]
