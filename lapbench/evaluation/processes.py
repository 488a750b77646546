"""The processes of a run, for work that they share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Processes:
    """This process among those of the run.

    Attributes:
        rank: Its number.
        count: How many there are.
        group: What they talk in; None for one process.
    """

    rank: int = 0
    count: int = 1
    group: Any = None

    @classmethod
    def of(cls, trainer: pl.Trainer) -> "Processes":
        """Those of a trainer; called by all of them at the same time."""
        if trainer.world_size == 1:
            return cls()
        # Objects travel through main memory: not over NCCL.
        return cls(trainer.global_rank, trainer.world_size, dist.new_group(backend="gloo"))

    def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """``function`` of each item, computed by one of the processes; the whole list on all of them.

        Each process takes every ``count``-th item, so how items are made must not depend on the process.
        """
        own = [function(item) for item in items[self.rank :: self.count]]
        if self.count == 1:
            return own
        parts: list[list[R]] = [[] for _ in range(self.count)]
        dist.all_gather_object(parts, own, group=self.group)
        return [parts[i % self.count][i // self.count] for i in range(len(items))]

    def cat(self, tensor: Tensor) -> Tensor:
        """The rows of all processes, in the order of these, on all.

        Args:
            tensor: On the CPU, [n, ...]; n may differ between the processes, nothing else.
        """
        if self.count == 1:
            return tensor
        sizes = [0] * self.count
        dist.all_gather_object(sizes, len(tensor), group=self.group)
        whole = tensor.new_empty(sum(sizes), *tensor.shape[1:])
        for rank, part in enumerate(torch.split(whole, sizes)):
            if rank == self.rank:
                part.copy_(tensor)
            dist.broadcast(part, src=rank, group=self.group)
        return whole

    def of_first(self, value: T) -> T:
        """The first process's value, on all."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]
