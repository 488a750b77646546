"""The settings of a linear probe."""

from dataclasses import dataclass, replace
from typing import Literal

from lapbench.backbones import VisionBackbone
from lapbench.evaluation.features import has_class_token
from lapbench.evaluation.probe_head import Head, Pooling, grid

DINOV2_LRS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
DINOV2_BLOCKS = (1, 4)
POOLINGS: tuple[Pooling, ...] = ("token", "token+avg", "avg")
Split = Literal["val", "test"]


@dataclass(frozen=True)
class ProbeSettings:
    """The settings of a ``LinearProbe``, as its section in the record shows them."""

    epochs: int
    batch_size: int
    lrs: tuple[float, ...]
    lr_batch_size: int | None
    blocks: tuple[int, ...] | None
    poolings: tuple[Pooling, ...] | None
    momentum: float
    weight_decay: float
    init_std: float
    cosine: Literal["step", "epoch"]
    batch_norm: bool
    select_fraction: float
    split: Split
    cache_features: bool

    @property
    def lr_scale(self) -> float:
        """What each learning rate is multiplied by."""
        return 1.0 if self.lr_batch_size is None else self.batch_size / self.lr_batch_size

    @property
    def heads(self) -> list[Head]:
        """The grid, once the backbone is known."""
        assert self.blocks is not None
        assert self.poolings is not None
        return grid(self.lrs, self.blocks, self.poolings)

    def of(self, backbone: VisionBackbone) -> "ProbeSettings":
        """These settings with what null leaves to the backbone, and without samples to choose by for a single head."""
        token = has_class_token(backbone)
        blocks = self.blocks or tuple(n for n in DINOV2_BLOCKS if n <= backbone.num_layers)
        poolings = self.poolings or (("token", "token+avg") if token else ("avg",))
        settings = replace(self, blocks=blocks, poolings=poolings)
        return settings if len(settings.heads) > 1 else replace(settings, select_fraction=0.0)
