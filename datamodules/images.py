"""Image classification data, streamed from WebDataset shards that a manifest describes."""

import random
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from lapbench.datamodules.indexed import IndexReader
from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.manifest import MANIFEST, Manifest
from lapbench.datamodules.multicrop import MultiCrop, build_multicrop
from lapbench.datamodules.normalization import Normalize
from lapbench.datamodules.offsets import check_offsets
from lapbench.datamodules.orders import IndexOrder, Order, StreamOrder
from lapbench.datamodules.plan import mixed
from lapbench.datamodules.sharded import ShardedData, check_at_least
from lapbench.datamodules.shards import ShardFile, ShardReader, local_path
from lapbench.datamodules.streaming import ShardStream
from lapbench.datamodules.transforms import TrainTransform, build_eval_transform, build_train_transform
from lapbench.errors import UserError

LARGE = TrainTransform()
# The parts of a data set; no two share a sample, except that ImageNet tests on its validation split.
Part = Literal["train", "select", "val", "test"]
Images = TypeVar("Images", bound="ImageShards")


class ImageShards(ShardedData):
    """Loads one data set: ``(images [B, C, S, S] float32, labels [B] int64)``, predict batches with keys.

    With ``multicrop`` the images of a training batch are a list with one tensor for each resolution: global crops
    [B, V, C, S, S], then local crops [B, V', C, S', S'].

    Every process reads its own part of each epoch; evaluation sees each sample exactly once. The constants below say
    what the data set is. The loaders themselves yield uint8 images: a trainer has them normalised on the device,
    whoever iterates by hand calls ``normalize``.

    Args:
        data_dir: Folder with the manifest (and the shards, unless shards_url says otherwise).
        batch_size: Training samples in a batch of one process.
        eval_batch_size: Evaluation samples in a batch of one process; as batch_size when null.
        num_workers: Worker processes that load for one process; 0 loads in the process itself.
        image_size: Side of the square images in pixels that the model sees.
        train_transform: Augmentation of training images.
        multicrop: Trains on several crops of each image, augmented as these settings say; train_transform then
            augments only what evaluations train on (linear probes).
        crop_pct: Share of the shorter side that the evaluation's centre crop keeps.
        interpolation: Resizing in evaluation: bilinear, bicubic, nearest, lanczos, box or hamming.
        val_fraction: Share of the training split held out for validation; 0 holds out none. The held-out samples
            depend on val_seed alone, so all runs and processes agree on them.
        val_seed: Seed that chooses the held-out samples.
        repeats: Times that an epoch draws each of its samples (repeated augmentation). An epoch keeps its length.
        reader: ``index`` draws each epoch's order from the whole split, the same for any number of workers, and
            resumes at once; it needs local shards with the offsets that ``lapbench data`` writes. ``stream`` reads
            shards from front to back, also from https.
        shuffle_buffer: Undecoded samples that each worker of the stream holds in memory to shuffle them.
        seed: Seed of order and augmentation; the run's seed when null, 0 if the run has none.
        pin_memory: Copy batches to pinned memory when there is an accelerator.
        persistent_workers: Keep worker processes from one epoch to the next.
        shards_url: Where the shards are, if not in data_dir: a folder, file: or https: URL.

    Raises:
        UserError: a setting out of range.
    """

    num_classes: ClassVar[int]
    channels: ClassVar[int] = 3
    mean: ClassVar[tuple[float, ...]] = IMAGENET_DEFAULT_MEAN
    std: ClassVar[tuple[float, ...]] = IMAGENET_DEFAULT_STD
    train_split: ClassVar[str] = "train"
    val_split: ClassVar[str | None] = None
    test_split: ClassVar[str] = "test"

    def __init__(
        self,
        data_dir: str,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        image_size: int = 224,
        train_transform: TrainTransform = LARGE,
        multicrop: MultiCrop | None = None,
        crop_pct: float = 1.0,
        interpolation: str = "bicubic",
        val_fraction: float = 0.0,
        val_seed: int = 0,
        repeats: int = 1,
        reader: Literal["index", "stream"] = "index",
        shuffle_buffer: int = 2048,
        seed: int | None = None,
        pin_memory: bool = True,
        persistent_workers: bool = True,
        shards_url: str | None = None,
    ) -> None:
        super().__init__(
            data_dir,
            batch_size,
            eval_batch_size,
            num_workers,
            reader,
            shuffle_buffer,
            seed,
            pin_memory,
            persistent_workers,
            shards_url,
        )
        check_at_least("repeats", repeats, 1)
        if not 0 <= val_fraction < 1:
            raise UserError(f"val_fraction must be at least 0 and below 1, got {val_fraction}")
        if reader == "index" and shards_url is not None and local_path(shards_url) is None:
            raise UserError(
                f"reader index needs local shards, got {shards_url}: set reader to stream, or copy the shards to "
                f"{data_dir} and run `lapbench data index {data_dir}`"
            )
        self.image_size = image_size
        self.val_fraction = val_fraction
        self.val_seed = val_seed
        self.select_fraction = 0.0
        self.repeats = repeats
        self._train_transform = build_train_transform(train_transform, image_size, self.mean, self.std)
        self.multicrop = multicrop
        self._multicrop = build_multicrop(multicrop, image_size, self.channels) if multicrop is not None else None
        self._eval_transform = build_eval_transform(image_size, crop_pct, interpolation)
        self.normalize = Normalize(self.mean, self.std)
        self._manifest: Manifest | None = None
        self._offsets: dict[str, Path] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read the manifest and see that it describes this data set, and that local shards and their offsets are there.

        Raises:
            UserError: no data, another number of classes, a missing or cut shard, no offsets or stale ones;
                ``validate`` without samples for it.
        """
        if not self._has_validation:
            if stage == "validate":
                raise UserError(f"{type(self).__name__} has no validation split: hold one out with val_fraction > 0")
            if stage == "fit" and self.trainer is not None:
                # Lightning has no quiet way to say that a data module has no validation data this time.
                self.trainer.limit_val_batches = 0
        if self._manifest is not None:
            return
        manifest = Manifest.load(self.data_dir)
        if manifest.num_classes != self.num_classes:
            raise UserError(
                f"{self.data_dir / MANIFEST}: {type(self).__name__} has {self.num_classes} classes, "
                f"the manifest lists {manifest.num_classes} (data set {manifest.dataset!r})"
            )
        for shard in (shard for shards in manifest.splits.values() for shard in shards):
            self._check_file(shard.file, shard.bytes)
        if self.reader == "index":
            self._offsets = {split: check_offsets(self.data_dir, manifest, split) for split in manifest.splits}
        self._manifest = manifest

    def for_evaluation(self: Images, batch_size: int, seed: int, select_fraction: float = 0.0) -> Images:
        """A copy for a second trainer, which trains on single images augmented by train_transform.

        Args:
            batch_size: Training samples in a batch of one process.
            seed: Seed of order and augmentation.
            select_fraction: Share of the training samples that the copy does not train on: ``select_dataloader`` has
                them. Which ones depends on val_seed alone.

        Raises:
            UserError: select_fraction is out of range.
        """
        if not 0 <= select_fraction < 1:
            raise UserError(f"select_fraction must be at least 0 and below 1, got {select_fraction}")
        other = super().for_evaluation(batch_size, seed)
        other.select_fraction = select_fraction
        other.multicrop = other._multicrop = None
        return other

    def val_dataloader(self) -> ResumableLoader | list[Any]:
        """The held-out samples, else the data set's own validation split, else nothing."""
        return self._loader("val") if self._has_validation else []

    @property
    def _has_validation(self) -> bool:
        return self.val_fraction > 0 or self.val_split is not None

    def select_dataloader(self) -> ResumableLoader:
        """What ``for_evaluation`` held out of training to choose by, each sample once, in order."""
        return self._loader("select")

    def test_dataloader(self) -> ResumableLoader:
        """The test split, each sample once, in order."""
        return self._loader("test")

    def predict_dataloader(self) -> ResumableLoader:
        """The test split as ``(images, labels, keys)``."""
        return self.plain_dataloader("test")

    def plain_dataloader(self, part: Part) -> ResumableLoader:
        """``(images, labels, keys)`` of a part without augmentation: each sample once, in order.

        Raises:
            UserError: there is no such part.
        """
        return self._loader(part, with_keys=True)

    def samples_of(self, part: Part) -> int:
        """Samples of a part, in all processes together.

        Raises:
            UserError: there is no such part.
        """
        split, in_use = self._members(part)
        return self._described.samples(split) if in_use is None else int(in_use.sum())

    def on_after_batch_transfer(self, batch: tuple[Any, ...], dataloader_idx: int) -> tuple[Any, ...]:
        """Normalise the images on the device that the batch was moved to; Lightning calls this in every stage."""
        images, *rest = batch
        normalized = [self.normalize(crops) for crops in images] if isinstance(images, list) else self.normalize(images)
        return (normalized, *rest)

    def _train_loader(self) -> ResumableLoader:
        return self._loader("train", training=True)

    def _loader(self, part: Part, training: bool = False, with_keys: bool = False) -> ResumableLoader:
        split, in_use = self._members(part)
        stream = ShardStream(
            self._order(split, training, in_use),
            (self._multicrop or self._train_transform) if training else self._eval_transform,
            channels=self.channels,
            with_keys=with_keys,
        )
        return self._over(stream)

    @property
    def _described(self) -> Manifest:
        if self._manifest is None:
            raise RuntimeError("call setup() before asking for samples")
        return self._manifest

    def _members(self, part: Part) -> tuple[str, npt.NDArray[np.bool_] | None]:
        """The split that a part is in, and which of its samples belong to it: bool [samples], None for all."""
        if part == "test":
            return self.test_split, None
        if part == "val" and not self.val_fraction:
            if self.val_split is None:
                raise UserError(f"{type(self).__name__} has no validation split: hold one out with val_fraction > 0")
            return self.val_split, None
        if part == "select" and not self.select_fraction:
            raise UserError(f"{type(self).__name__} holds no samples out to choose by: select_fraction is 0")
        left = np.ones(self._described.samples(self.train_split), np.bool_)
        for name, fraction in (("val", self.val_fraction), ("select", self.select_fraction)):
            if fraction:
                chosen = np.zeros_like(left)
                chosen[left] = held_out_samples(int(left.sum()), fraction, self.val_seed, name)
                if part == name:
                    return self.train_split, chosen
                left &= ~chosen
        return self.train_split, None if left.all() else left

    def _order(self, split: str, training: bool, in_use: npt.NDArray[np.bool_] | None) -> Order:
        """Which samples make up the batches of this process."""
        shards = [ShardFile(self._url(shard.file), shard.samples) for shard in self._described.split(split)]
        plan = self._plan(training)
        if self.reader == "index":
            reader = IndexReader(shards, self._offsets[split], self.num_classes, in_use)
            return IndexOrder(plan(reader.counts()), reader)
        stream = ShardReader(shards, self.num_classes, in_use)
        return StreamOrder(plan(stream.counts()), stream, self.shuffle_buffer)


def held_out_samples(samples: int, fraction: float, seed: int, part: str = "val") -> npt.NDArray[np.bool_]:
    """Choose the samples that training does without: bool [samples], ``round(samples * fraction)`` of them true.

    Args:
        samples: Number of samples to choose from.
        fraction: Share of them, above 0 and below 1.
        seed: Seed of the choice.
        part: What they are for, ``val`` or ``select``: each draws its own.

    Raises:
        UserError: the fraction leaves one side without samples.
    """
    count = round(samples * fraction)
    if not 0 < count < samples:
        raise UserError(f"{part}_fraction {fraction} of {samples} samples holds out {count}: both sides need some")
    chosen = np.zeros(samples, np.bool_)
    purpose = "validation" if part == "val" else part
    chosen[random.Random(mixed(purpose, seed)).sample(range(samples), count)] = True
    return chosen
