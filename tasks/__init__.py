"""LightningModules: one file for each training paradigm. ``TASKS`` names them."""

from lapbench.tasks.classification import ImageClassification

__all__ = ["ImageClassification"]
