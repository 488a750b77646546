"""A backbone as it is: nothing is trained, evaluations measure it."""

from dataclasses import asdict
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from lapbench.backbones import VisionSettings, build_vision_backbone
from lapbench.errors import UserError


class FrozenBackbone(pl.LightningModule):
    """A vision backbone without classifier that is never trained: a stock or pretrained timm model, or raw pixels.

    For ``trainer.max_epochs: 0`` and ``run.test: none``: evaluations after training are all that such a run does.

    Args:
        backbone: The vision transformer and its head schedule, with the weights that it starts from.

    Raises:
        UserError: A backbone that cannot be built.
    """

    def __init__(self, backbone: VisionSettings) -> None:
        super().__init__()
        self.settings = backbone
        self.save_hyperparameters({"backbone": asdict(backbone)})
        settings = {name: getattr(backbone, name) for name in backbone.__dataclass_fields__}
        self.backbone = build_vision_backbone(num_classes=0, **settings).requires_grad_(False)
        # DDP refuses a module without anything to train.
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        """Pooled features [B, D] of images [B, C, H, W]."""
        features: Tensor = self.backbone(images)
        return features

    def setup(self, stage: str) -> None:
        """Checks that there is nothing to train, and that the backbone takes the data's images.

        Raises:
            UserError: Epochs to train, another number of channels, another image size.
        """
        if stage != "fit":
            return
        epochs = self.trainer.max_epochs
        if epochs != 0:
            raise UserError(f"trainer.max_epochs: expected 0, as a FrozenBackbone is not trained, got {epochs}")
        data: Any = getattr(self.trainer, "datamodule", None)
        name, channels = self.settings.name, getattr(data, "channels", None)
        if channels not in (None, self.settings.in_chans):
            raise UserError(
                f"backbone {name} takes images of {self.settings.in_chans} channels, {type(data).__name__} has "
                f"{channels}: set model.backbone.in_chans {channels}"
            )
        size, expected = getattr(data, "image_size", None), _fixed_size(self.backbone)
        if size is not None and expected is not None and expected != (size, size):
            raise UserError(
                f"backbone {name} takes images of {expected[0]} x {expected[1]} pixels, {type(data).__name__} gives "
                f"{size} x {size}: set data.image_size {expected[0]}, or model.backbone.img_size {size}"
            )

    def configure_optimizers(self) -> None:
        """None."""

    def training_step(self, batch: Any, batch_idx: int) -> NoReturn:
        """Lightning fits no task without one; ``setup`` has seen to it that it is not called."""
        raise UserError("a FrozenBackbone is not trained: expected trainer.max_epochs 0")


def _fixed_size(backbone: nn.Module) -> tuple[int, int] | None:
    """Height and width that the patch embedding insists on; None where any size goes."""
    embedding = getattr(backbone, "patch_embed", None)
    if embedding is None or not embedding.strict_img_size:
        return None
    height, width = embedding.img_size
    return height, width
