"""The data sets of images with masks that lapbench knows: what each consists of, and how it is made if it can be."""

from pathlib import Path
from typing import Any

from lapbench.datamodules.convert.shapes import SCENES, SHAPES_CLASSES, convert
from lapbench.datamodules.layout import LAYOUT, SUFFIXES
from lapbench.datamodules.segmentation import SegmentationFolder
from lapbench.openmmlab import mmseg_imports


class ADE20K(SegmentationFolder):
    """ADE20K's scene parsing benchmark: 20,210 training and 2,000 validation images, 150 classes."""

    num_classes = 150

    def __init__(self, data_dir: str = "data/ade20k", **kwargs: Any) -> None:
        super().__init__(data_dir=data_dir, **kwargs)

    def _dataset(self, split: str) -> Any:
        with mmseg_imports():
            from mmseg.datasets import ADE20KDataset
        return ADE20KDataset(**self._files(split))


class ShapesSegmentation(SegmentationFolder):
    """Scenes of synthetic shapes: 400 training and 100 validation images of 96 x 96, 30 classes; made on first use.

    They are as large as the model sees them. Half of the classes differ from another one in colour alone, so training
    distorts no colours by default.

    Args:
        data_dir: The folder of ``lapbench data shapes``; the scenes are in ``ade20k`` below it.
    """

    num_classes = len(SHAPES_CLASSES)

    def __init__(
        self,
        data_dir: str = "data/shapes",
        num_workers: int = 0,
        crop_size: int = 96,
        resize_scale: tuple[int, int] = (96, 96),
        resize_ratio: tuple[float, float] = (0.75, 1.5),
        photometric: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            data_dir=str(Path(data_dir) / SCENES),
            num_workers=num_workers,
            crop_size=crop_size,
            resize_scale=resize_scale,
            resize_ratio=resize_ratio,
            photometric=photometric,
            **kwargs,
        )

    def prepare_data(self) -> None:
        """Draw the scenes, and the images of single objects beside them, unless the folder holds scenes already."""
        if not (self.data_dir / LAYOUT).is_file():
            convert(self.data_dir.parent)

    def _dataset(self, split: str) -> Any:
        with mmseg_imports():
            from mmseg.datasets import BaseSegDataset
        return BaseSegDataset(
            **self._files(split),
            img_suffix=SUFFIXES["images"],
            seg_map_suffix=SUFFIXES["annotations"],
            metainfo={"classes": SHAPES_CLASSES},
            reduce_zero_label=True,
        )
