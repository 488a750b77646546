"""Two orders behind one plan: the batches of an epoch as undecoded samples, streamed from shards or read at random.

`StreamOrder` reads shards from front to back, wherever they are, and shuffles through a buffer. `IndexOrder` draws
from the whole split, which takes local shards and their offsets; its order is the same for any number of workers.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from lapbench.datamodules.plan import Plan, Read, Share, cut, mixed

T = TypeVar("T")


class Sample(NamedTuple):
    """An undecoded sample: ``number`` counts all samples of the split in manifest order; ``shard`` names its file."""

    number: int
    shard: str
    key: str
    image: bytes
    label: int


class Draw(NamedTuple):
    """A sample as the order's reader has it, and which of its repeats in the epoch this is."""

    sample: Any
    repeat: int


class Order(Protocol):
    """Which samples make up which batch of one rank."""

    @property
    def plan(self) -> Plan:
        """Sizes and steps."""
        ...

    def layout(self, workers: int) -> dict[str, int | str]:
        """The settings that decide the order of the samples: a position means nothing under others."""
        ...

    def batches(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[list[Draw]]:
        """The batches of worker ``worker`` of ``workers`` when the rank's ``epoch`` goes on at batch ``start``."""
        ...


class RangeReader(Protocol):
    """Turns ranges of the plan into samples."""

    def read(self, reads: Sequence[Read]) -> Iterator[Any]:
        """Yield exactly the samples of ``reads``, in order."""
        ...


class RandomReader(Protocol):
    """Reads any sample."""

    def read(self, place: int) -> Any:
        """The sample at ``place`` among those in use, in manifest order."""
        ...


@dataclass(frozen=True)
class StreamOrder:
    """Shards permuted by (seed, epoch), a contiguous part for each worker, shuffled through a buffer in training.

    Args:
        plan: Who produces what.
        reader: Where undecoded samples come from.
        shuffle_buffer: Samples that each worker holds to shuffle them; training only.
    """

    plan: Plan
    reader: RangeReader
    shuffle_buffer: int = 1

    def layout(self, workers: int) -> dict[str, int | str]:
        """The settings that decide the order; the number of workers is one, as each has its part of the shards."""
        return {
            "reader": "stream",
            "seed": self.plan.seed,
            "batch_size": self.plan.batch_size,
            "world_size": self.plan.world_size,
            "num_workers": workers,
            "repeats": self.plan.repeats,
            "shuffle_buffer": self.shuffle_buffer,
            "samples": self.plan.samples,
            "shards": len(self.plan.counts),
        }

    def batches(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[list[Draw]]:
        """The batches of one worker; those before ``start`` are read, but not decoded."""
        share = self.plan.share(worker, workers, start)
        draws = islice(self._draws(epoch, share), sum(share.sizes[: share.skip]), None)
        for size in share.sizes[share.skip :]:
            yield list(islice(draws, size))

    def _draws(self, epoch: int, share: Share) -> Iterator[Draw]:
        repeats = self.plan.repeats
        first, last = share.first, share.first + sum(share.sizes)
        begin, end = first // repeats, -(-last // repeats)
        samples = self.reader.read(cut(self.plan.sequence(epoch), begin, end))
        placed: Iterator[tuple[int, Any]] = zip(range(begin, end), samples, strict=True)
        if self.plan.training:
            rng = random.Random(mixed("buffer", self.plan.seed, epoch, self.plan.rank, share.slot))
            placed = shuffled(placed, self.shuffle_buffer, rng)
        for place, sample in placed:
            for draw in range(max(first, place * repeats), min(last, (place + 1) * repeats)):
                yield Draw(sample, draw % repeats)


@dataclass(frozen=True)
class IndexOrder:
    """All samples permuted by (seed, epoch) in training, in manifest order else; workers take batches in turn.

    Global batch b is made of the draws [b B W, (b + 1) B W) of the epoch (batch size B, W ranks), of which rank r has
    the r-th part. So the order depends neither on the number of workers nor on how a global batch is split over
    ranks, and going on at any batch costs no more than the permutation.

    Args:
        plan: Who produces what.
        reader: Where undecoded samples come from.
    """

    plan: Plan
    reader: RandomReader

    def layout(self, workers: int) -> dict[str, int | str]:
        """The settings that decide the order of the global batches."""
        return {
            "reader": "index",
            "seed": self.plan.seed,
            "global_batch_size": self.plan.batch_size * self.plan.world_size,
            "repeats": self.plan.repeats,
            "samples": self.plan.samples,
        }

    def batches(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[list[Draw]]:
        """The batches of one worker: every ``workers``-th from ``start`` on."""
        plan = self.plan
        if plan.training:
            places = permutation(plan.samples, mixed("order", plan.seed, epoch))
        for number in range(start + worker, plan.batches, workers):
            if plan.training:
                first = (number * plan.world_size + plan.rank) * plan.batch_size
                draws = (divmod(draw, plan.repeats) for draw in range(first, first + plan.batch_size))
                yield [Draw(self.reader.read(int(places[place])), repeat) for place, repeat in draws]
            else:
                yield [Draw(self.reader.read(place), 0) for place in range(*self._bounds[number : number + 2])]

    @cached_property
    def _bounds(self) -> list[int]:
        """Where the batches of this rank begin in evaluation, and where the last one ends."""
        return list(accumulate(self.plan.sizes, initial=self.plan.span[0]))


def shuffled(items: Iterable[T], size: int, rng: random.Random) -> Iterator[T]:
    """Shuffle a stream through a buffer of ``size`` items: a full shuffle when the stream is not longer."""
    buffer: list[T] = []
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
        else:
            chosen = rng.randrange(size)
            yield buffer[chosen]
            buffer[chosen] = item
    rng.shuffle(buffer)
    yield from buffer


def permutation(count: int, seed: int) -> npt.NDArray[np.int64]:
    """A permutation of 0..count - 1: the order of random keys (a million in 50 ms).

    Numpy promises that a bit generator's raw output stays the same in every version, and no such thing of its
    ``permutation``; a run must be resumable after an update. The number that a key belongs to is in its low bits,
    which makes all keys different and sorting them enough.
    """
    bits = np.uint64(count.bit_length())
    keys = np.random.PCG64(seed).random_raw(count) >> bits << bits
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    return (keys & ((np.uint64(1) << bits) - np.uint64(1))).view(np.int64)
