"""Optimizers, parameter groups, learning-rate schedules and weight averaging."""

from lapbench.optim.groups import parameter_groups
from lapbench.optim.muon import MuonSettings, build_muon, set_momentum
from lapbench.optim.optimizers import OptimizerSettings, build_optimizer
from lapbench.optim.schedules import LRSchedule, build_scheduler, learning_rate

__all__ = [
    "LRSchedule",
    "MuonSettings",
    "OptimizerSettings",
    "build_muon",
    "build_optimizer",
    "build_scheduler",
    "learning_rate",
    "parameter_groups",
    "set_momentum",
]
