"""Optimizers, parameter groups, learning-rate schedules and weight averaging."""

from lapbench.optim.groups import parameter_groups
from lapbench.optim.optimizers import OptimizerSettings, build_optimizer
from lapbench.optim.schedules import LRSchedule, build_scheduler, learning_rate

__all__ = [
    "LRSchedule",
    "OptimizerSettings",
    "build_optimizer",
    "build_scheduler",
    "learning_rate",
    "parameter_groups",
]
