"""Which process and worker produces which samples of an epoch: pure arithmetic on the manifest's counts.

An epoch is a sequence of draws, numbered from 0. Every rank takes the same number of steps, an epoch's length does not
depend on the number of workers, no sample is drawn twice, and the position after any number of batches is known without
reading anything. For shards that are streamed, a rank owns a contiguous range of the draws, and each of its workers a
contiguous part of that range holding whole batches (`Plan.share`, `Plan.sequence`).

The plan knows nothing of tar files: a reader turns its ``Read`` ranges into samples.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from lapbench.errors import UserError


class Read(NamedTuple):
    """Samples ``first`` to ``last`` (exclusive) of shard number ``shard``, counted over the samples in use."""

    shard: int
    first: int
    last: int


class Share(NamedTuple):
    """What one worker contributes to one epoch of one rank.

    ``slot`` is its place in the round robin over the whole epoch, ``first`` the number of its first draw, ``sizes``
    the sizes of its batches and ``skip`` how many of them were already consumed.
    """

    slot: int
    first: int
    sizes: tuple[int, ...]
    skip: int


@dataclass(frozen=True)
class Plan:
    """Splits the epochs of one data split over ranks and workers.

    Training draws each sample ``repeats`` times in a row; every rank takes ``samples // (batch_size * world_size)``
    full batches. For streams the shards are permuted by (seed, epoch) and their sequence is rotated by a random offset.
    Evaluation keeps the order of the shards and gives each rank its share of every sample exactly once.

    Args:
        counts: Samples in use in each shard.
        batch_size: Samples in a batch of one rank.
        training: Shuffled full batches, or every sample once in order.
        seed: Seed of the shuffles, at least 0.
        repeats: Times that a training epoch draws each of its samples (repeated augmentation). An epoch keeps its
            number of draws, so it holds ``1 / repeats`` of the samples.
        rank: Number of this process, from 0.
        world_size: Number of processes.

    Raises:
        UserError: a setting out of range, or too few samples to give every process one batch.
    """

    counts: tuple[int, ...]
    batch_size: int
    training: bool
    seed: int = 0
    repeats: int = 1
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        for name in ("batch_size", "repeats", "world_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.seed < 0:
            raise UserError(f"seed must be at least 0, got {self.seed}")
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank must be in 0..{self.world_size - 1}, got {self.rank}")
        if self.training and self.batches < 1:
            needed = self.batch_size * self.world_size
            raise UserError(
                f"one training step takes {needed} samples (batch {self.batch_size} x {self.world_size} processes), "
                f"the split holds {self.samples}"
            )
        if not self.training and self.world_size > self.samples:
            raise UserError(
                f"{self.world_size} processes cannot share the evaluation of {self.samples} samples: use fewer"
            )

    @cached_property
    def samples(self) -> int:
        """Samples in use over all shards and ranks."""
        return sum(self.counts)

    @cached_property
    def batches(self) -> int:
        """Batches of one epoch on this rank; the same on every rank (except evaluation at batch size 1)."""
        if self.training:
            return self.samples // (self.batch_size * self.world_size)
        return len(self.sizes)

    @cached_property
    def span(self) -> tuple[int, int]:
        """The contiguous draws of this rank: first and last (exclusive)."""
        if self.training:
            each = self.batches * self.batch_size
            return self.rank * each, (self.rank + 1) * each
        return self.rank * self.samples // self.world_size, (self.rank + 1) * self.samples // self.world_size

    @cached_property
    def sizes(self) -> list[int]:
        """The size of each batch of this rank, in the order that the loader hands them out."""
        if self.training:
            return [self.batch_size] * self.batches
        first, last = self.span
        full, rest = divmod(last - first, self.batch_size)
        sizes = [self.batch_size] * full + [rest] * (rest > 0)
        largest = -(-self.samples // self.world_size)
        # A rank with one sample fewer must not take one step fewer: wrapped models may communicate in every step.
        if len(sizes) < -(-largest // self.batch_size) and self.batch_size > 1:
            sizes[-1:] = [self.batch_size - 1, 1]
        return sizes

    def share(self, worker: int, workers: int, start: int = 0) -> Share:
        """The part of worker ``worker`` of ``workers`` when the epoch goes on at batch ``start``.

        A loader asks its workers in turn, beginning with worker 0, so after a resume at ``start`` worker 0 must play
        the part that hands out batch ``start``.
        """
        slot = (worker + start) % workers
        owned = [sum(self.sizes[s::workers]) for s in range(slot)]
        return Share(
            slot=slot,
            first=self.span[0] + sum(owned),
            sizes=tuple(self.sizes[slot::workers]),
            skip=len(range(slot, start, workers)),
        )

    def sequence(self, epoch: int) -> list[Read]:
        """Every sample in use exactly once, in the order of ``epoch``."""
        whole = [Read(shard, 0, count) for shard, count in enumerate(self.counts) if count]
        if not self.training:
            return whole
        rng = random.Random(mixed("shards", self.seed, epoch))
        rng.shuffle(whole)
        offset = rng.randrange(self.samples)
        return cut(whole, offset, self.samples) + cut(whole, 0, offset)


def cut(sequence: Sequence[Read], first: int, last: int) -> list[Read]:
    """The samples at positions ``first`` to ``last`` (exclusive) of a sequence of reads."""
    ends = accumulate(read.last - read.first for read in sequence)
    parts = []
    for (shard, begin, end), stop in zip(sequence, ends, strict=True):
        start = stop - (end - begin)  # the position in the sequence of this read's first sample
        low, high = max(first, start), min(last, stop)
        if low < high:
            parts.append(Read(shard, begin + low - start, begin + high - start))
    return parts


def mixed(*values: int | str) -> int:
    """A 64-bit hash of ``values``: the same in every process and version, unlike ``hash``."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")
