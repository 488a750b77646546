"""The stream of batches: the draws of an order, decoded and augmented, the same for any number of workers."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from lapbench.datamodules.decoding import Pixels, decode_image
from lapbench.datamodules.orders import Draw, Order, Sample
from lapbench.datamodules.plan import Plan, mixed
from lapbench.errors import UserError


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


class Loaded(NamedTuple):
    """A batch, and the damaged images that were to be in it, ``shard ..., sample ...`` each."""

    batch: Any
    damaged: list[str]


class Failure(NamedTuple):
    """A user's mistake found in a worker, sent as an item: raised there, torch would wrap it in a traceback."""

    message: str


class BatchStream(IterableDataset[Any]):
    """The batches of one split on one rank, each in a ``Loaded``; subclasses make them of an order's draws.

    Iterating starts at ``set_position``; in a loader's worker process it yields that worker's share.

    Args:
        order: Which samples make up which batch.
    """

    def __init__(self, order: Order) -> None:
        self.order = order
        # Epoch and batch to start at, in shared memory so that workers that live on see it change.
        self._position = torch.zeros(2, dtype=torch.int64)
        self._position.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def plan(self) -> Plan:
        """Sizes and steps."""
        return self.order.plan

    def layout(self, workers: int) -> dict[str, int | str]:
        """The settings on which the batches depend, with ``workers`` workers."""
        return self.order.layout(workers)

    def set_position(self, epoch: int, batch: int) -> None:
        """Start the next iteration at batch ``batch`` of epoch ``epoch``."""
        self._position.copy_(torch.tensor([epoch, batch]))

    def __iter__(self) -> Iterator[Loaded | Failure]:
        epoch, start = self._position.tolist()
        worker = get_worker_info()
        try:
            if worker is None:
                yield from self.batches(epoch, start, 0, 1)
            else:
                yield from self.batches(epoch, start, worker.id, worker.num_workers)
        except UserError as error:
            yield Failure(str(error))

    def batches(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Loaded]:
        """The batches of one worker, going on at batch ``start`` of the whole rank's ``epoch``."""
        for draws in self.order.batches(epoch, start, worker, workers):
            yield self._batch(epoch, draws)

    def _batch(self, epoch: int, draws: Sequence[Draw]) -> Loaded:
        raise NotImplementedError


class ShardStream(BatchStream):
    """Batches ``(images [B, C, H, W], labels [B] int64)`` of one split on one rank.

    Training seeds every sample's augmentation from (seed, epoch, sample, repeat): it is the same for any number of
    workers.

    In training a damaged image's place in its batch is taken by the next good image of the batch (after the last one
    comes the first), augmented by the seed of the damaged one: every batch keeps its size, every other image its
    place. In evaluation a damaged image is an error.

    Args:
        order: Which samples make up which batch.
        transform: Decoded pixels (uint8 [H, W] or [H, W, 3]) to tensor [C, H, W], or to a list
            of such tensors, which makes a list of batches.
        channels: 3 (RGB) or 1 (grey) for decoding.
        with_keys: Yield ``(images, labels, keys)``, keys being the samples' names.
    """

    def __init__(
        self,
        order: Order,
        transform: Callable[[Pixels], Tensor | list[Tensor]],
        channels: int = 3,
        with_keys: bool = False,
    ) -> None:
        super().__init__(order)
        self.transform = transform
        self.channels = channels
        self.with_keys = with_keys

    def _batch(self, epoch: int, draws: Sequence[Draw]) -> Loaded:
        with random_state_kept() if get_worker_info() is None else nullcontext():
            return self._augmented(epoch, draws)

    def _augmented(self, epoch: int, draws: Sequence[Draw]) -> Loaded:
        samples = [draw.sample for draw in draws]
        images = [self._image(epoch, draw, draw.sample) for draw in draws]
        damaged = {place: image.message for place, image in enumerate(images) if isinstance(image, Failure)}
        if damaged:
            place = min(damaged)
            first = f"{_name(draws[place].sample)}: {damaged[place]}"
            if not self.plan.training:
                raise UserError(first)
            if len(damaged) == len(draws):
                raise UserError(f"{first}; none of the {len(draws)} images of its batch can be decoded")
        for place in damaged:
            after = (*range(place + 1, len(draws)), *range(place))
            samples[place] = draws[next(other for other in after if other not in damaged)].sample
            images[place] = self._image(epoch, draws[place], samples[place])
        # default_collate stacks straight into shared memory when it runs in a worker.
        batch = default_collate(images), torch.tensor([sample.label for sample in samples])
        content = (*batch, [sample.key for sample in samples]) if self.with_keys else batch
        return Loaded(content, [_name(draws[place].sample) for place in damaged])

    def _image(self, epoch: int, draw: Draw, sample: Sample) -> Tensor | list[Tensor] | Failure:
        """The image of ``sample``, augmented as ``draw``; or why it cannot be decoded."""
        if self.plan.training:
            seed_sample(mixed(self.plan.seed, epoch, draw.sample.number, draw.repeat))
        try:
            image = decode_image(sample.image, self.channels)
        except UserError as error:
            return Failure(str(error))
        return self.transform(image)


def _name(sample: Sample) -> str:
    return f"shard {sample.shard}, sample {sample.key}"
