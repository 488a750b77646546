"""Metrics that the tasks share; those that torchmetrics has are used from there."""

import torch
from torch import Tensor
from torchmetrics import Metric


class SampleMean(Metric):
    """Mean over samples with sums in float64: over millions of them, and the same for any number of processes.

    torchmetrics' ``MeanMetric`` adds up in float32; asked for float64, it forgets so when it is moved to a device.
    """

    is_differentiable = False
    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values: Tensor, weight: int = 1) -> None:
        """Add values of any shape, each standing for ``weight`` samples."""
        self.total = self.total + values.detach().double().sum() * weight
        self.count = self.count + values.numel() * weight

    def compute(self) -> Tensor:
        """The mean, a float64 scalar."""
        return self.total / self.count
