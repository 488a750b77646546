"""Metrics that the tasks share; those that torchmetrics has are used from there."""

import math

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


class BitsPerByte(Metric):
    """Bits that a language model needs for each UTF-8 byte of a text: sum of nats / (ln 2 x sum of bytes).

    Unlike the loss, it does not depend on the vocabulary. Tokens without text (special ones) are in neither sum. Sums
    are float64, as in `SampleMean`.
    """

    is_differentiable = False
    full_state_update = False
    nats: Tensor
    bytes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("bytes", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, losses: Tensor, token_bytes: Tensor) -> None:
        """Add predicted tokens.

        Args:
            losses: Cross-entropy of each token in nats, [N].
            token_bytes: Bytes of text of each token, [N]; 0 for special tokens.
        """
        self.nats = self.nats + losses.detach().double()[token_bytes > 0].sum()
        self.bytes = self.bytes + token_bytes.sum()

    def compute(self) -> Tensor:
        """Bits per byte, a float64 scalar."""
        return self.nats / (math.log(2) * self.bytes)
