"""Shards against torchvision's ImageFolder: same augmentation, two workers, from files to normalised batches."""

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.timing import Result, paired_ratio

CLASSES, WORKERS, ROUNDS = 4, 2, 7


@contextlib.contextmanager
def data_set(images: int, size: tuple[int, int], suffix: str) -> Iterator[Path]:
    """A folder with class folders and their shards: smooth content and noise; ``size`` is width, height in pixels."""
    import numpy as np
    from PIL import Image

    from lapbench.datamodules.convert import main as convert

    generator = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as root:
        for i in range(images + CLASSES):
            folder = Path(root) / "folders" / ("train" if i < images else "val") / f"n{i % CLASSES:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            small = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            image = np.asarray(Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)).astype(np.int16)
            image += generator.integers(-12, 13, image.shape, dtype=np.int16)
            Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{i}{suffix}", quality=90)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            convert(["imagenet", "--source", f"{root}/folders", "--out", f"{root}/shards", "--shard-size", "64"])
        yield Path(root)


def epoch(loader: Any, finish: Callable[[Any], object]) -> Callable[[], None]:
    """One pass over a loader, ``finish`` on the images of each batch."""

    def run() -> None:
        for images, _ in loader:
            finish(images)

    return run


def compared(root: Path, what: str, bound: float, batch: int, side: int, ours: Any, theirs: list[Any]) -> Result:
    """Samples/s of shards over ImageFolder's; ``theirs`` is what ImageFolder does before ToTensor and Normalize."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    from lapbench.datamodules import ImageShards

    class Shards(ImageShards):
        num_classes = CLASSES

    data = Shards(str(root / "shards"), batch_size=batch, num_workers=WORKERS, image_size=side, train_transform=ours)
    data.setup("test")
    finish = [transforms.ToTensor(), transforms.Normalize(data.mean, data.std)]
    files = DataLoader(
        ImageFolder(root / "folders/train", transforms.Compose([*theirs, *finish])),
        batch_size=batch,
        shuffle=True,
        drop_last=True,
        num_workers=WORKERS,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(0),
    )
    shards = data.train_dataloader()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the workers have the cores: more threads would wait for each other
    try:
        # ImageFolder's seconds over ours. Ours include what the trainer does with a batch on its device.
        ratio = paired_ratio(epoch(files, lambda images: images), epoch(shards, data.normalize), ROUNDS)
    finally:
        torch.set_num_threads(threads)
    detail = f"{ROUNDS} pairs of {len(shards) * batch} images"
    return Result(f"shards / ImageFolder, {what}, samples/s", ratio, bound, False, detail)


def results() -> Iterator[Result]:
    """CIFAR's size and ImageNet's usual one, the latter with both backends."""
    from torchvision import transforms

    from lapbench.datamodules import TrainTransform
    from lapbench.datamodules.builtin import SMALL_COLOR

    flip = transforms.RandomHorizontalFlip()
    with data_set(4096, (32, 32), ".png") as root:
        theirs = [transforms.RandomCrop(32, padding=4), flip]
        yield compared(root, "32 px PNG", 1.0, 128, 32, SMALL_COLOR, theirs)
    with data_set(512, (500, 375), ".JPEG") as root:
        theirs = [transforms.RandomResizedCrop(224, interpolation=transforms.InterpolationMode.BICUBIC), flip]
        yield compared(root, "224 px JPEG", 1.0, 32, 224, TrainTransform(), theirs)
        yield compared(root, "the same, backend tensor", 1.5, 32, 224, TrainTransform(backend="tensor"), theirs)
