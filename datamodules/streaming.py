"""The stream of batches: a plan's draws, read, shuffled, decoded and augmented, the same for any number of workers.

``Reader`` is the seam to the data: ``shards.ShardReader`` streams tar files; one with random access needs the plan's
ranges as well, and nothing else.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from lapbench.datamodules.decoding import Pixels, decode_image
from lapbench.datamodules.plan import Plan, Read, Share, cut, mixed
from lapbench.errors import UserError

T = TypeVar("T")


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


def seed_sample(seed: int) -> None:
    """Seed the three generators that augmentations draw from (some microseconds; ``torch.manual_seed`` takes 100x)."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)  # noqa: NPY002 (timm's augmentations draw from numpy's global generator)
    torch.default_generator.manual_seed(seed)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the process's generators as they were: loading in the main process must not steer the model's dropout."""
    states = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


class Sample(NamedTuple):
    """An undecoded sample: ``number`` counts all samples of the split in manifest order; ``shard`` names its file."""

    number: int
    shard: str
    key: str
    image: bytes
    label: int


class Reader(Protocol):
    """Turns ranges of the plan into samples."""

    def read(self, reads: Sequence[Read]) -> Iterator[Sample]:
        """Yield exactly the samples of ``reads``, in order."""
        ...


class Failure(NamedTuple):
    """A user's mistake found in a worker, sent as an item: raised there, torch would wrap it in a traceback."""

    message: str


class ShardStream(IterableDataset[Any]):
    """Batches ``(images [B, C, H, W], labels [B] int64)`` of one split on one rank.

    Training seeds every sample's augmentation from (seed, epoch, sample, repeat): it is the same for any number of
    workers. Iterating starts at ``set_position``; in a loader's worker process it yields that worker's share.

    Args:
        plan: Who produces what.
        reader: Where undecoded samples come from.
        transform: Decoded pixels (uint8 [H, W] or [H, W, 3]) to tensor [C, H, W].
        channels: 3 (RGB) or 1 (grey) for decoding.
        shuffle_buffer: Samples that each worker holds to shuffle them; training only.
        with_keys: Yield ``(images, labels, keys)``, keys being the samples' names.
    """

    def __init__(
        self,
        plan: Plan,
        reader: Reader,
        transform: Callable[[Pixels], Tensor],
        channels: int = 3,
        shuffle_buffer: int = 0,
        with_keys: bool = False,
    ) -> None:
        self.plan = plan
        self.reader = reader
        self.transform = transform
        self.channels = channels
        self.shuffle_buffer = shuffle_buffer
        self.with_keys = with_keys
        # Epoch and batch to start at, in shared memory so that workers that live on see it change.
        self._position = torch.zeros(2, dtype=torch.int64)
        self._position.share_memory_()  # type: ignore[no-untyped-call]

    def set_position(self, epoch: int, batch: int) -> None:
        """Start the next iteration at batch ``batch`` of epoch ``epoch``."""
        self._position.copy_(torch.tensor([epoch, batch]))

    def layout(self) -> dict[str, int]:
        """The settings that decide the order of the samples: a position means nothing under others."""
        return {
            "seed": self.plan.seed,
            "batch_size": self.plan.batch_size,
            "world_size": self.plan.world_size,
            "repeats": self.plan.repeats,
            "shuffle_buffer": self.shuffle_buffer,
            "samples": self.plan.samples,
            "shards": len(self.plan.counts),
        }

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self._position.tolist()
        worker = get_worker_info()
        batches = (
            self.batches(epoch, start, worker.id, worker.num_workers) if worker else self.batches(epoch, start, 0, 1)
        )
        try:
            yield from batches
        except UserError as error:
            yield Failure(str(error))

    def batches(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Any]:
        """The batches of one worker, going on at batch ``start`` of the whole rank's ``epoch``."""
        share = self.plan.share(worker, workers, start)
        draws = islice(self._draws(epoch, share), sum(share.sizes[: share.skip]), None)
        kept = random_state_kept if get_worker_info() is None else nullcontext
        for size in share.sizes[share.skip :]:
            with kept():
                batch = self._batch(epoch, islice(draws, size))
            yield batch

    def _draws(self, epoch: int, share: Share) -> Iterator[tuple[Sample, int]]:
        """The samples of a share in drawing order, each with the number of its repeat."""
        repeats = self.plan.repeats if self.plan.training else 1
        first, last = share.first, share.first + sum(share.sizes)
        begin, end = first // repeats, -(-last // repeats)
        samples = self.reader.read(cut(self.plan.sequence(epoch), begin, end))
        placed: Iterator[tuple[int, Sample]] = zip(range(begin, end), samples, strict=True)
        if self.plan.training:
            rng = random.Random(mixed("buffer", self.plan.seed, epoch, self.plan.rank, share.slot))
            placed = shuffled(placed, self.shuffle_buffer, rng)
        for place, sample in placed:
            for draw in range(max(first, place * repeats), min(last, (place + 1) * repeats)):
                yield sample, draw % repeats

    def _batch(self, epoch: int, draws: Iterable[tuple[Sample, int]]) -> Any:
        images, labels, keys = [], [], []
        for sample, repeat in draws:
            if self.plan.training:
                seed_sample(mixed(self.plan.seed, epoch, sample.number, repeat))
            try:
                image = decode_image(sample.image, self.channels)
            except UserError as error:
                raise UserError(f"shard {sample.shard}, sample {sample.key}: {error}") from error
            images.append(self.transform(image))
            labels.append(sample.label)
            keys.append(sample.key)
        # default_collate stacks straight into shared memory when it runs in a worker.
        batch = default_collate(images), torch.tensor(labels)
        return (*batch, keys) if self.with_keys else batch
