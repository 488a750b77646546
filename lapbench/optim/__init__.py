"""Optimizers, parameter groups, learning-rate schedules and weight averaging."""

from lapbench.optim.clipping import clip_each_grad_norm_
from lapbench.optim.groups import parameter_groups, set_weight_decay
from lapbench.optim.muon import MuonSettings, build_muon, set_momentum
from lapbench.optim.optimizers import OptimizerSettings, build_optimizer
from lapbench.optim.schedules import LRSchedule, build_scheduler, cosine, learning_rate

__all__ = [
    "LRSchedule",
    "MuonSettings",
    "OptimizerSettings",
    "build_muon",
    "build_optimizer",
    "build_scheduler",
    "clip_each_grad_norm_",
    "cosine",
    "learning_rate",
    "parameter_groups",
    "set_momentum",
    "set_weight_decay",
]
