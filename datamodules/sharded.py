"""What all data modules over shards share: settings, where the files are, loaders that resume, checkpoints' layout."""

import copy
import os
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch.distributed as dist
from lightning.pytorch import LightningDataModule

from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.plan import Plan
from lapbench.datamodules.shards import check_url, local_path
from lapbench.datamodules.streaming import BatchStream
from lapbench.errors import UserError

Data = TypeVar("Data", bound="ShardedData")


class ShardedData(LightningDataModule):
    """A data set in shards; subclasses say what a sample is, and in how many ``repeats`` an epoch draws it.

    Every process reads its own part of each epoch; evaluation sees each sample exactly once. The arguments are those
    of the subclasses, which explain them.

    Raises:
        UserError: a setting out of range.
    """

    repeats: int = 1

    def __init__(
        self,
        data_dir: str,
        batch_size: int,
        eval_batch_size: int | None,
        num_workers: int,
        reader: Literal["index", "stream"],
        shuffle_buffer: int,
        seed: int | None,
        pin_memory: bool,
        persistent_workers: bool,
        shards_url: str | None,
    ) -> None:
        super().__init__()
        check_at_least("batch_size", batch_size, 1)
        check_at_least("eval_batch_size", eval_batch_size, 1)
        check_at_least("num_workers", num_workers, 0)
        check_at_least("shuffle_buffer", shuffle_buffer, 1)
        check_at_least("seed", seed, 0)
        if reader not in ("index", "stream"):
            raise UserError(f"reader must be index or stream, got {reader!r}")
        self.data_dir = Path(data_dir)
        self.shards_url = check_url(shards_url) if shards_url is not None else None
        self.reader = reader
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size or batch_size
        self.num_workers = num_workers
        self.shuffle_buffer = shuffle_buffer
        self.seed = seed
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers
        self._layout: dict[str, int | str] = {}
        self._restored: dict[str, int | str] = {}

    def train_dataloader(self) -> ResumableLoader:
        """Shuffled full batches, going on where the trainer's checkpoint left off.

        Raises:
            UserError: the checkpoint was made with a layout under which its position means other samples.
        """
        loader = self._train_loader()
        if self._restored:
            loader.load_state_dict(self._restored)
        self._layout = loader.state_dict()
        return loader

    def state_dict(self) -> dict[str, int | str]:
        """The layout of the training stream, for checkpoints: Lightning shows the loader's own only in mid-epoch."""
        return self._layout

    def load_state_dict(self, state_dict: dict[str, int | str]) -> None:
        """Keep a checkpoint's layout to compare it when training data are asked for: evaluation may differ freely."""
        self._restored = dict(state_dict)

    def for_evaluation(self: Data, batch_size: int, seed: int) -> Data:
        """A copy for a second trainer: of its own batch size and order, each sample once an epoch.

        It knows neither the trainer nor the position of this one, which stays as it is.
        """
        other = copy.copy(self)
        other.trainer = None
        other.batch_size, other.seed, other.repeats = batch_size, seed, 1
        other._layout, other._restored = {}, {}
        return other

    def _train_loader(self) -> ResumableLoader:
        raise NotImplementedError

    def _check_file(self, file: str, size: int) -> None:
        """UserError if a shard that should be on this machine is missing or not of ``size`` bytes."""
        path = local_path(self._url(file))
        if path is None:
            return
        if not path.is_file():
            raise UserError(f"shard {path} is missing; the manifest lists it")
        if path.stat().st_size != size:
            raise UserError(f"shard {path}: expected {size} bytes as in the manifest, got {path.stat().st_size}")

    def _plan(self, training: bool) -> "partial[Plan]":
        """The plan of this process, still without the counts."""
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if _distributed() else (0, 1)
        return partial(
            Plan,
            batch_size=self.batch_size if training else self.eval_batch_size,
            training=training,
            seed=self._run_seed(),
            repeats=self.repeats if training else 1,
            rank=rank,
            world_size=world_size,
        )

    def _over(self, stream: BatchStream) -> ResumableLoader:
        """The loader of a stream."""
        return ResumableLoader(
            stream,
            trainer=self.trainer if stream.plan.training else None,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            persistent_workers=self.persistent_workers,
        )

    def _url(self, file: str) -> str:
        return str(self.data_dir / file) if self.shards_url is None else f"{self.shards_url.rstrip('/')}/{file}"

    def _run_seed(self) -> int:
        """Lightning keeps the seed of ``seed_everything`` in this variable."""
        return int(os.environ.get("PL_GLOBAL_SEED", "0")) if self.seed is None else self.seed


def check_at_least(name: str, value: int | None, least: int) -> None:
    """UserError if the setting ``name`` is given and below ``least``."""
    if value is not None and value < least:
        raise UserError(f"{name} must be at least {least}, got {value}")


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
