"""Many linear classifiers on the same frozen features, trained as one: the grid of a linear probe.

Letters: B images, H heads, C classes, P parts of an image's features, D width of each part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric

Pooling = Literal["token", "token+avg", "avg"]
# One vector for each image: a kind of token, and the block it is read after, counted from the last one, 1.
Part = tuple[Literal["token", "avg"], int]


@dataclass(frozen=True)
class Head:
    """One classifier of a grid: peak learning rate of its steps, and the features that it sees."""

    lr: float
    blocks: int
    pooling: Pooling

    @property
    def parts(self) -> tuple[Part, ...]:
        """What its features are made of, in order."""
        if self.pooling == "avg":
            return tuple(("avg", block) for block in range(self.blocks, 0, -1))
        tokens: tuple[Part, ...] = tuple(("token", block) for block in range(self.blocks, 0, -1))
        return tokens if self.pooling == "token" else (*tokens, ("avg", 1))


def grid(lrs: Sequence[float], blocks: Sequence[int], poolings: Sequence[Pooling]) -> list[Head]:
    """All combinations; heads with the same features stand together."""
    return [Head(lr, n, pooling) for n in blocks for pooling in poolings for lr in lrs]


def parts_of(heads: Sequence[Head]) -> list[Part]:
    """The parts that any of the heads sees, each once."""
    return list(dict.fromkeys(part for head in heads for part in head.parts))


class HeadGrid(nn.Module):
    """Linear classifiers in float64, those on the same features as one matrix.

    One SGD with one learning rate, ``lr``, trains them all: its steps are linear in the gradient, so that the mean of
    the heads' losses, weighted by their own learning rates, moves each head as its own SGD would.

    Args:
        heads: The grid; heads with the same features stand together.
        dim: Width D of each part.
        num_classes: Classes C.
        init_std: Standard deviation of the normal initial weights; biases start at 0.
        seed: Seed of the initial weights. Heads with the same features start alike, whatever else the grid holds.
    """

    shares: Tensor

    def __init__(self, heads: Sequence[Head], dim: int, num_classes: int, init_std: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.dim = dim
        self.num_classes = num_classes
        columns = {part: column for column, part in enumerate(parts_of(heads))}
        features = dict.fromkeys(head.parts for head in heads)
        self._columns = [[columns[part] for part in parts] for parts in features]
        self.banks = nn.ModuleList()
        for parts in features:
            count = sum(head.parts == parts for head in heads)
            bank = nn.Linear(len(parts) * dim, count * num_classes, dtype=torch.float64)
            drawn = torch.randn(
                num_classes, bank.in_features, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            )
            bank.weight.data = (drawn * init_std).repeat(count, 1)
            nn.init.zeros_(bank.bias)
            self.banks.append(bank)
        lrs = torch.tensor([head.lr for head in heads], dtype=torch.float64)
        self.lr = float(lrs.sum())
        self.register_buffer("shares", lrs / lrs.sum(), persistent=False)

    def forward(self, features: Tensor) -> list[Tensor]:
        """Logits [B, H', C] of each H' heads that see the same, of features [B, P, D] in the order of ``parts_of``."""
        wide = features.double()
        return [
            bank(wide[:, columns].flatten(1)).unflatten(1, (-1, self.num_classes))
            for bank, columns in zip(self.banks, self._columns, strict=True)
        ]

    def loss(self, features: Tensor, labels: Tensor, weight_decay: float = 0.0) -> Tensor:
        """What one step minimises: the weighted mean over heads of cross-entropy and decay.

        Args:
            features: [B, P, D].
            labels: [B].
            weight_decay: As SGD's, of weights and biases.
        """
        losses = torch.cat([cross_entropies(logits, labels).mean(dim=0) for logits in self(features)])
        if weight_decay:
            losses = losses + weight_decay / 2 * torch.cat([self._squares(bank) for bank in self.banks])
        return (losses * self.shares).sum()

    def _squares(self, bank: nn.Module) -> Tensor:
        """Sum of the squared parameters of each head of a bank."""
        bias = cast(Tensor, bank.bias)
        squares = [p.view(len(bias) // self.num_classes, -1).square().sum(dim=1) for p in bank.parameters()]
        return torch.stack(squares).sum(dim=0)


class FeatureNorm(nn.BatchNorm1d):
    """Batch norm without weights over features [B, P, D] in float64, each of the P D numbers a channel."""

    def __init__(self, parts: int, dim: int) -> None:
        super().__init__(parts * dim, eps=1e-6, affine=False, dtype=torch.float64)

    def forward(self, features: Tensor) -> Tensor:
        """The normalised features, [B, P, D]."""
        return super().forward(features.flatten(1)).view_as(features)


def cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy [B, H] of logits [B, H, C] and labels [B]."""
    heads = logits.size(1)
    flat = nn.functional.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(heads), reduction="none")
    return flat.view(-1, heads)


class HeadScores(Metric):
    """Mean loss, top-1 and top-5 accuracy of each head, over the samples of all processes.

    Args:
        heads: Heads H.
        num_classes: Classes; with fewer than five, top-5 is that many.
    """

    is_differentiable = False
    full_state_update = False
    loss: Tensor
    top1: Tensor
    top5: Tensor
    samples: Tensor

    def __init__(self, heads: int, num_classes: int) -> None:
        super().__init__()
        self.k = min(5, num_classes)
        for name in ("loss", "top1", "top5"):
            self.add_state(name, torch.zeros(heads, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("samples", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, banks: Sequence[Tensor], labels: Tensor) -> None:
        """Add a batch.

        Args:
            banks: Logits [B, H', C] that together are those of all heads, in order.
            labels: [B].
        """
        self.loss = self.loss + torch.cat([cross_entropies(logits, labels).sum(dim=0) for logits in banks])
        best = torch.cat([logits.topk(self.k, dim=2).indices for logits in banks], dim=1)
        hits = best == labels[:, None, None]
        self.top1 = self.top1 + hits[:, :, 0].sum(dim=0)
        self.top5 = self.top5 + hits.any(dim=2).sum(dim=0)
        self.samples = self.samples + len(labels)

    def compute(self) -> dict[str, Any]:
        """``loss``, ``top1`` and ``top5``, a list with a number for each head."""
        return {name: (getattr(self, name) / self.samples).tolist() for name in ("loss", "top1", "top5")}
