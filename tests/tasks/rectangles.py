"""A small data set in ADE20K's layout, made by numpy: coloured rectangles of four classes, a strip unlabelled."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lapbench.datamodules.layout import Layout
from lapbench.datamodules.segmentation import SegmentationFolder
from lapbench.openmmlab import mmseg_imports

COLOURS = np.array([[0, 0, 0], [220, 40, 40], [40, 200, 60], [50, 60, 220], [230, 210, 60]], np.uint8)
SIZES = [(40, 56), (33, 47), (64, 64), (48, 31), (57, 50), (32, 32), (45, 70)]
CLASSES = 4


def make(folder: Path, training: int = 12, validation: int = 7) -> Path:
    """Writes the images and masks of both splits."""
    rng = np.random.default_rng(0)
    for split, count in (("training", training), ("validation", validation)):
        for kind in ("images", "annotations"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(count):
            height, width = SIZES[number % len(SIZES)]
            mask = np.full((height, width), 1 + number % CLASSES, np.uint8)
            for _ in range(3):
                top, left = rng.integers(height - 16), rng.integers(width - 16)
                mask[top : top + 16, left : left + 24] = rng.integers(1, CLASSES + 1)
            mask[:3] = 0
            image = np.clip(COLOURS[mask] + rng.normal(0, 12, (height, width, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(image).save(folder / f"images/{split}/{number:03}.jpg", quality=95)
            Image.fromarray(mask).save(folder / f"annotations/{split}/{number:03}.png")
    Layout("rectangles", CLASSES, {"training": training, "validation": validation}).save(folder)
    return folder


class Rectangles(SegmentationFolder):
    """The data set of `make`."""

    num_classes = CLASSES

    def __init__(self, data_dir: str, **settings: Any) -> None:
        small = {"resize_scale": (96, 96), "resize_ratio": (1.0, 1.0), "crop_size": 32, "num_workers": 0}
        super().__init__(data_dir, **small | {"photometric": False, "batch_size": 4} | settings)

    def _dataset(self, split: str) -> Any:
        with mmseg_imports():
            from mmseg.datasets import BaseSegDataset
        return BaseSegDataset(
            metainfo={"classes": ["red", "green", "blue", "yellow"]},
            img_suffix=".jpg",
            seg_map_suffix=".png",
            reduce_zero_label=True,
            **self._files(split),
        )
