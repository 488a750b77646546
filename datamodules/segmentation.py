"""Images with masks in ADE20K's folder layout, read and augmented by mmsegmentation's data set and transforms."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from PIL import Image
from torch.utils.data import get_worker_info

from lapbench.datamodules.decoding import DAMAGE
from lapbench.datamodules.layout import LAYOUT, Layout
from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.orders import Draw, IndexOrder, Order
from lapbench.datamodules.plan import mixed
from lapbench.datamodules.sharded import ShardedData, check_at_least
from lapbench.datamodules.streaming import BatchStream, Loaded, random_state_kept, seed_sample
from lapbench.errors import UserError
from lapbench.openmmlab import mmseg_imports

Results = dict[str, Any]  # what mmsegmentation's transforms hand on: of one image, files at first, then arrays


class MaskStream(BatchStream):
    """Batches ``{"inputs": [uint8 [C, H, W], ...], "data_samples": [SegDataSample, ...]}`` of one split on one rank.

    This is the form that mmsegmentation's preprocessor takes. Training seeds every image's augmentation from (seed,
    epoch, image, repeat): it is the same for any number of workers.

    Args:
        order: Which images make up which batch.
        pipeline: From an image's files to ``{"inputs", "data_samples"}``.
        identity: What else decides the batches: settings that go into checkpoints beside those of the order.
    """

    def __init__(self, order: Order, pipeline: Callable[[Results], Results], identity: dict[str, int | str]) -> None:
        super().__init__(order)
        self.pipeline = pipeline
        self.identity = identity

    def layout(self, workers: int) -> dict[str, int | str]:
        """The settings of the order, and which data these are."""
        return {**self.order.layout(workers), **self.identity}

    def batches(self, epoch: int, start: int, worker: int, workers: int) -> Iterator[Loaded]:
        """The batches of one worker, going on at batch ``start`` of the whole rank's ``epoch``."""
        if get_worker_info() is not None:
            import cv2

            cv2.setNumThreads(0)  # workers are the parallelism, and OpenCV's threads do not survive a fork
        yield from super().batches(epoch, start, worker, workers)

    def _batch(self, epoch: int, draws: Sequence[Draw]) -> Loaded:
        with random_state_kept() if get_worker_info() is None else nullcontext():
            images = [self._image(epoch, draw) for draw in draws]
        return Loaded({name: [image[name] for image in images] for name in ("inputs", "data_samples")}, [])

    def _image(self, epoch: int, draw: Draw) -> Results:
        if self.plan.training:
            seed_sample(mixed(self.plan.seed, epoch, draw.sample["sample_idx"], draw.repeat))
        return self.pipeline(draw.sample)


class SegmentationFolder(ShardedData):
    """Loads one data set: ``{"inputs": [uint8 [C, H, W], ...], "data_samples": [SegDataSample, ...]}``.

    Channels are in the order blue, green, red, as mmsegmentation has them; its preprocessor turns and normalises
    images. ``gt_sem_seg.data`` of a sample is its mask, int64 [1, H, W]: the classes are 0..num_classes - 1, 255 is
    unlabelled. In training both are crops. In evaluation the image has the size that the model sees, which differs
    within a batch, and the mask its own.

    Every process reads its own part of each epoch; evaluation sees each image exactly once, in as many batches on every
    process (unless eval_batch_size is 1).

    Args:
        data_dir: Folder with ``images/{training,validation}``, ``annotations/{training,validation}`` and layout.json.
        batch_size: Training images in a batch of one process.
        eval_batch_size: Evaluation images in a batch of one process; as batch_size when null.
        num_workers: Worker processes that load for one process; 0 loads in the process itself.
        crop_size: Side of the square crops of training in pixels. A smaller image is not enlarged to it.
        resize_scale: Images are resized, keeping their ratio, to the largest size within these limits of the longer and
            the shorter side in pixels, in either order.
        resize_ratio: Training multiplies both limits by a number drawn from this range.
        cat_max_ratio: A crop of which one class has this share or more of the labelled pixels is drawn again, up to ten
            times.
        hflip: Probability of a horizontal flip in training.
        photometric: Distort brightness, contrast, saturation and hue in training.
        channels: 3 (colour), or 1 (grey, by luminance, after the distortions).
        seed: Seed of order and augmentation; the run's seed when null, 0 if the run has none.
        pin_memory: Copy batches to pinned memory when there is an accelerator.
        persistent_workers: Keep worker processes from one epoch to the next.

    Attributes:
        class_names: The names of the classes; after ``setup``.

    Raises:
        UserError: a setting out of range.
    """

    num_classes: ClassVar[int]
    train_split: ClassVar[str] = "training"
    val_split: ClassVar[str] = "validation"

    class_names: tuple[str, ...]

    def __init__(
        self,
        data_dir: str,
        batch_size: int = 16,
        eval_batch_size: int | None = None,
        num_workers: int = 4,
        crop_size: int = 512,
        resize_scale: tuple[int, int] = (2048, 512),
        resize_ratio: tuple[float, float] = (0.5, 2.0),
        cat_max_ratio: float = 0.75,
        hflip: float = 0.5,
        photometric: bool = True,
        channels: Literal[1, 3] = 3,
        seed: int | None = None,
        pin_memory: bool = True,
        persistent_workers: bool = True,
    ) -> None:
        super().__init__(
            data_dir=data_dir,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            reader="index",
            shuffle_buffer=1,
            seed=seed,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            shards_url=None,
        )
        check_at_least("crop_size", crop_size, 1)
        if min(resize_scale) < 1:
            raise UserError(f"resize_scale must be two sizes of at least 1, got {list(resize_scale)}")
        if not 0 < resize_ratio[0] <= resize_ratio[1]:
            raise UserError(f"resize_ratio must be a range of factors above 0, got {list(resize_ratio)}")
        for name, value in (("cat_max_ratio", cat_max_ratio), ("hflip", hflip)):
            if not 0 <= value <= 1:
                raise UserError(f"{name} must be at least 0 and at most 1, got {value}")
        if channels not in (1, 3):
            raise UserError(f"channels must be 1 (grey) or 3 (colour), got {channels}")
        self.crop_size = crop_size
        self.resize_scale = tuple(resize_scale)
        self.resize_ratio = tuple(resize_ratio)
        self.cat_max_ratio = cat_max_ratio
        self.hflip = hflip
        self.photometric = photometric
        self.channels = channels
        self._sets: dict[str, Any] = {}

    def setup(self, stage: str | None = None) -> None:
        """Read the layout and the names of the files, and see that they describe this data set.

        Raises:
            UserError: no data, another number of classes, files that came or went, or mmsegmentation is not installed.
        """
        if self._sets:
            return
        layout = Layout.load(self.data_dir)
        if layout.num_classes != self.num_classes:
            raise UserError(
                f"{self.data_dir / LAYOUT}: {type(self).__name__} has {self.num_classes} classes, "
                f"the layout has {layout.num_classes} (data set {layout.dataset!r})"
            )
        sets = {split: self._dataset(split) for split in layout.images}
        for split, found in sets.items():
            if len(found) != layout.images[split]:  # it looks into folders below as well
                raise UserError(
                    f"{self.data_dir}: expected {layout.images[split]} images in {split} as in {LAYOUT}, "
                    f"got {len(found)}"
                )
        self.class_names = tuple(sets[self.train_split].metainfo["classes"])
        self._sets = sets

    def val_dataloader(self) -> ResumableLoader:
        """The validation split, each image once, in the order of the files' names."""
        return self._loader(self.val_split, training=False)

    def test_dataloader(self) -> ResumableLoader:
        """The validation split: the masks of the test split are not public."""
        return self._loader(self.val_split, training=False)

    def _dataset(self, split: str) -> Any:
        """mmsegmentation's data set of a split, unlabelled pixels being 0 in the files."""
        raise NotImplementedError

    def _files(self, split: str) -> dict[str, Any]:
        """Where the files of a split are, as mmsegmentation's data sets take it."""
        folders = {"img_path": f"images/{split}", "seg_map_path": f"annotations/{split}"}
        prefix = {name: str(self.data_dir / folder) for name, folder in folders.items()}
        return {"data_prefix": prefix, "serialize_data": False}  # ADE20K's names take 12 MB, packing them a second

    def _train_loader(self) -> ResumableLoader:
        return self._loader(self.train_split, training=True)

    def _loader(self, split: str, training: bool) -> ResumableLoader:
        if not self._sets:
            raise RuntimeError("call setup() before asking for a dataloader")
        files = _Files(self._sets[split])
        order = IndexOrder(self._plan(training)(counts=(len(files.dataset),)), files)
        identity: dict[str, int | str] = {"crop_size": self.crop_size, "data": files.digest()}
        return self._over(MaskStream(order, self._pipeline(training), identity))

    def _pipeline(self, training: bool) -> Any:
        """From an image's files to what the model's preprocessor takes."""
        with mmseg_imports():
            from mmcv.transforms import Compose, LoadImageFromFile, RandomFlip, RandomResize, Resize
            from mmseg.datasets import LoadAnnotations, PackSegInputs, PhotoMetricDistortion, RandomCrop
        # Pillow refuses files that are cut short, of which OpenCV makes half an image.
        image = _Reading(LoadImageFromFile(imdecode_backend="pillow"), "img_path")
        mask = _Reading(LoadAnnotations(), "seg_map_path")
        grey = [_to_grey] if self.channels == 1 else []
        if not training:
            # The mask comes after the resizing: it keeps its size.
            return Compose([image, Resize(scale=self.resize_scale, keep_ratio=True), mask, *grey, PackSegInputs()])
        resize = RandomResize(scale=self.resize_scale, ratio_range=self.resize_ratio, keep_ratio=True)
        crop = RandomCrop(crop_size=(self.crop_size, self.crop_size), cat_max_ratio=self.cat_max_ratio)
        distortion = [PhotoMetricDistortion()] if self.photometric else []
        flip = RandomFlip(prob=self.hflip)
        return Compose([image, mask, resize, crop, flip, *distortion, *grey, PackSegInputs()])


@dataclass(frozen=True)
class _Files:
    """mmsegmentation's data set as a `RandomReader`: where an image and its mask are, nothing read yet."""

    dataset: Any

    def read(self, place: int) -> Results:
        found: Results = self.dataset.get_data_info(place)
        return found

    def digest(self) -> str:
        """A hash of the images' names."""
        names = [info["img_path"].rpartition("/")[2] for info in self.dataset.data_list]
        return hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:12]


@dataclass(frozen=True)
class _Reading:
    """A transform that reads the file at ``key``, and says in one line if it cannot."""

    transform: Callable[[Results], Results | None]
    key: str

    def __call__(self, results: Results) -> Results | None:
        try:
            return self.transform(results)
        except (*DAMAGE, Image.DecompressionBombError) as error:
            raise UserError(f"cannot read {results[self.key]}: {' '.join(str(error).split())}") from error


def _to_grey(results: Results) -> Results:
    """The luminance (ITU-R BT.601) of the image, [H, W]."""
    import mmcv

    return results | {"img": mmcv.bgr2gray(results["img"])}
