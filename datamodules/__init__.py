"""LightningDataModules that stream WebDataset shards.

The names below are imported when they are first used: the package itself must stay light, because ``lapbench data``
needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lapbench.datamodules.builtin import CIFAR10, CIFAR100, Digits, ImageNet
    from lapbench.datamodules.images import ImageShards
    from lapbench.datamodules.manifest import Manifest, Shard
    from lapbench.datamodules.transforms import TrainTransform

__all__ = ["CIFAR10", "CIFAR100", "Digits", "ImageNet", "ImageShards", "Manifest", "Shard", "TrainTransform"]

_HOMES = {"ImageShards": "images", "Manifest": "manifest", "Shard": "manifest", "TrainTransform": "transforms"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'builtin')}"), name)
