"""The image data sets that lapbench knows: what ``ImageShards`` needs to know of each.

A new data set is a subclass with a few constants, and a converter that writes its shards and manifest.
"""

from typing import Any

from lapbench.datamodules.images import ImageShards
from lapbench.datamodules.manifest import MANIFEST
from lapbench.datamodules.transforms import TrainTransform

SMALL_GREY = TrainTransform(crop="src", padding=1, padding_mode="constant", hflip=0.0)
SMALL_COLOR = TrainTransform(crop="src", padding=4, padding_mode="constant", hflip=0.5)


class Digits(ImageShards):
    """scikit-learn's 8 x 8 grey digits: 1437 train and 360 test images; made on first use."""

    num_classes = 10
    channels = 1
    mean = (0.3053,)
    std = (0.3759,)

    def __init__(
        self,
        data_dir: str = "data/digits",
        batch_size: int = 64,
        num_workers: int = 0,
        image_size: int = 8,
        train_transform: TrainTransform = SMALL_GREY,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            data_dir=data_dir,
            batch_size=batch_size,
            num_workers=num_workers,
            image_size=image_size,
            train_transform=train_transform,
            **kwargs,
        )

    def prepare_data(self) -> None:
        """Convert the bundled digits unless the folder holds a data set already."""
        if not (self.data_dir / MANIFEST).is_file():
            from lapbench.datamodules.convert.digits import convert

            convert(self.data_dir)


class CIFAR10(ImageShards):
    """CIFAR-10: 50,000 train and 10,000 test images of 32 x 32 in 10 classes."""

    num_classes = 10
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def __init__(
        self,
        data_dir: str = "data/cifar10",
        batch_size: int = 128,
        num_workers: int = 2,
        image_size: int = 32,
        train_transform: TrainTransform = SMALL_COLOR,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            data_dir=data_dir,
            batch_size=batch_size,
            num_workers=num_workers,
            image_size=image_size,
            train_transform=train_transform,
            **kwargs,
        )


class CIFAR100(CIFAR10):
    """CIFAR-100: 50,000 train and 10,000 test images of 32 x 32 in 100 classes."""

    num_classes = 100
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)

    def __init__(self, data_dir: str = "data/cifar100", **kwargs: Any) -> None:
        super().__init__(data_dir=data_dir, **kwargs)


class Shapes(ImageShards):
    """Synthetic coloured shapes: 2400 train and 480 test images of 64 x 64 in 24 classes; made on first use."""

    num_classes = 24
    mean = (0.476, 0.481, 0.463)
    std = (0.201, 0.193, 0.198)

    def __init__(
        self,
        data_dir: str = "data/shapes",
        batch_size: int = 64,
        num_workers: int = 0,
        image_size: int = 64,
        train_transform: TrainTransform = SMALL_COLOR,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            data_dir=data_dir,
            batch_size=batch_size,
            num_workers=num_workers,
            image_size=image_size,
            train_transform=train_transform,
            **kwargs,
        )

    def prepare_data(self) -> None:
        """Draw the images, and the scenes beside them, unless the folder holds a data set already."""
        if not (self.data_dir / MANIFEST).is_file():
            from lapbench.datamodules.convert.shapes import convert

            convert(self.data_dir)


class ImageNet(ImageShards):
    """ImageNet-1k: 1,281,167 train and 50,000 validation images in 1000 classes; tests on the validation split."""

    num_classes = 1000
    val_split = "val"
    test_split = "val"

    def __init__(self, data_dir: str = "data/imagenet", batch_size: int = 128, **kwargs: Any) -> None:
        super().__init__(data_dir=data_dir, batch_size=batch_size, **kwargs)
