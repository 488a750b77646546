"""LightningDataModules that stream WebDataset shards.

The names below are imported when they are first used: the package itself must stay light, because ``lapbench data``
needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lapbench.datamodules.builtin import CIFAR10, CIFAR100, Digits, ImageNet, Shapes
    from lapbench.datamodules.builtin_masks import ADE20K, ShapesSegmentation
    from lapbench.datamodules.builtin_text import FineWebEdu, PyDocs
    from lapbench.datamodules.chat import Chat
    from lapbench.datamodules.images import ImageShards
    from lapbench.datamodules.manifest import Manifest, Shard
    from lapbench.datamodules.mixtures import ChatSource
    from lapbench.datamodules.multicrop import MultiCrop
    from lapbench.datamodules.segmentation import SegmentationFolder
    from lapbench.datamodules.text import TextShards
    from lapbench.datamodules.token_manifest import TokenManifest
    from lapbench.datamodules.tokenizer import Tokenizer
    from lapbench.datamodules.transforms import TrainTransform

__all__ = [
    "ADE20K",
    "CIFAR10",
    "CIFAR100",
    "Chat",
    "ChatSource",
    "Digits",
    "FineWebEdu",
    "ImageNet",
    "ImageShards",
    "Manifest",
    "MultiCrop",
    "PyDocs",
    "SegmentationFolder",
    "Shapes",
    "ShapesSegmentation",
    "Shard",
    "TextShards",
    "TokenManifest",
    "Tokenizer",
    "TrainTransform",
]

_HOMES = {
    "ADE20K": "builtin_masks",
    "Chat": "chat",
    "ChatSource": "mixtures",
    "FineWebEdu": "builtin_text",
    "ImageShards": "images",
    "Manifest": "manifest",
    "MultiCrop": "multicrop",
    "PyDocs": "builtin_text",
    "SegmentationFolder": "segmentation",
    "ShapesSegmentation": "builtin_masks",
    "Shard": "manifest",
    "TextShards": "text",
    "TokenManifest": "token_manifest",
    "Tokenizer": "tokenizer",
    "TrainTransform": "transforms",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'builtin')}"), name)
