"""Shards of JPEG images against torchvision's ImageFolder, same transforms, two workers."""

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.benchmarks.timing import Result, paired_ratio

IMAGES, CLASSES, SIDE, WORKERS, BATCH = 512, 4, 224, 2, 32


def make_folders(root: Path) -> None:
    """Class folders of JPEGs with smooth content and noise, of ImageNet's usual size, train and val."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for i in range(IMAGES + CLASSES):
        split = "train" if i < IMAGES else "val"
        folder = root / split / f"n{i % CLASSES:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        small = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        image = np.asarray(Image.fromarray(small).resize((500, 375), Image.Resampling.BICUBIC)).astype(np.int16)
        image += generator.integers(-12, 13, image.shape, dtype=np.int16)
        Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.JPEG", quality=90)


def epoch(loader: Iterable[tuple[object, object]]) -> Callable[[], None]:
    """One pass over a loader."""

    def run() -> None:
        for _ in loader:
            pass

    return run


def results() -> Iterator[Result]:
    """Samples/s of both, as a ratio."""
    import torch
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    from lapbench.datamodules import ImageShards, TrainTransform
    from lapbench.datamodules.convert import main as convert
    from lapbench.datamodules.transforms import build_train_transform

    class Folders(ImageShards):
        num_classes = CLASSES

    with tempfile.TemporaryDirectory() as root:
        make_folders(Path(root) / "folders")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            convert(["imagenet", "--source", f"{root}/folders", "--out", f"{root}/shards", "--shard-size", "64"])
        data = Folders(f"{root}/shards", batch_size=BATCH, num_workers=WORKERS, image_size=SIDE)
        data.setup("test")
        shards = data.train_dataloader()
        transform = build_train_transform(TrainTransform(), SIDE, data.mean, data.std)
        files = DataLoader(
            ImageFolder(f"{root}/folders/train", transform),
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            num_workers=WORKERS,
            persistent_workers=True,
            generator=torch.Generator().manual_seed(0),
        )
        ratio = paired_ratio(epoch(files), epoch(shards), rounds=7)  # ImageFolder's time over ours
    yield Result("shards / ImageFolder, 224 px JPEG, samples/s", ratio, 0.9, False, f"7 pairs of {IMAGES} images")
