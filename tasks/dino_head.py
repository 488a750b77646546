"""DINO's projection head, and a backbone with one."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapbench.backbones import VisionBackbone
from lapbench.errors import UserError


@dataclass
class ProjectionHead:
    """Settings of DINO's projection head (arXiv 2104.14294, appendix C).

    Args:
        out_dim: Prototypes K, the outputs of the head.
        hidden_dim: Width of the hidden layers.
        bottleneck_dim: Width of what is normalised and compared with the prototypes.
        layers: Linear layers before the prototypes.
        batch_norm: Whether hidden layers have BatchNorm; trainer.sync_batchnorm makes it one over all processes.
        norm_last_layer: Whether the prototypes keep norm 1; otherwise their norms are trained too.
        freeze_epochs: Epochs in which the prototypes are left as they are.
    """

    out_dim: int = 65536
    hidden_dim: int = 2048
    bottleneck_dim: int = 256
    layers: int = 3
    batch_norm: bool = False
    norm_last_layer: bool = True
    freeze_epochs: int = 1

    def check(self) -> None:
        """Raises:
        UserError: A setting out of range.
        """
        for name, least in (("out_dim", 2), ("hidden_dim", 1), ("bottleneck_dim", 1), ("layers", 1)):
            if getattr(self, name) < least:
                raise UserError(f"head.{name}: expected at least {least}, got {getattr(self, name)}")
        if self.freeze_epochs < 0:
            raise UserError(f"head.freeze_epochs: expected at least 0, got {self.freeze_epochs}")


class Prototypes(nn.Module):
    """A linear layer without bias whose rows are weight-normalised: gain * v / |v|, always in float32.

    Args:
        in_dim: Inputs D.
        out_dim: Outputs K.
        fixed_gain: Whether all rows keep norm 1.
    """

    def __init__(self, in_dim: int, out_dim: int, fixed_gain: bool) -> None:
        super().__init__()
        self.direction = nn.Parameter(nn.Linear(in_dim, out_dim, bias=False).weight.detach())
        # [K, 1], as torch's weight norm has it: to the optimizer it is a matrix, which decays, as published.
        self.gain = nn.Parameter(torch.ones(out_dim, 1), requires_grad=not fixed_gain)

    def forward(self, x: Tensor) -> Tensor:
        """[N, K] of [N, D]."""
        # Half precision would move logits, which are divided by 0.04, by tenths.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), F.normalize(self.direction.float(), dim=-1) * self.gain.float())


class DINOHead(nn.Module):
    """An MLP with GELU, L2 normalisation, then the prototypes.

    Args:
        in_dim: Width D of the features.
        settings: The rest.
    """

    def __init__(self, in_dim: int, settings: ProjectionHead) -> None:
        super().__init__()
        widths = [in_dim, *[settings.hidden_dim] * (settings.layers - 1), settings.bottleneck_dim]
        mlp: list[nn.Module] = []
        for i, (narrow, wide) in enumerate(pairwise(widths)):
            linear = nn.Linear(narrow, wide)
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
            mlp.append(linear)
            if i < settings.layers - 1:
                mlp += [nn.BatchNorm1d(wide), nn.GELU()] if settings.batch_norm else [nn.GELU()]
        self.mlp = nn.Sequential(*mlp)
        self.last_layer = Prototypes(settings.bottleneck_dim, settings.out_dim, settings.norm_last_layer)

    def forward(self, features: Tensor) -> Tensor:
        """Logits [N, K] in float32 of features [N, D]: cosines, where the prototypes have norm 1."""
        logits: Tensor = self.last_layer(F.normalize(self.mlp(features).float(), dim=-1))
        return logits


class ProjectedBackbone(nn.Module):
    """A backbone and its projection head: what DINO trains, and what it averages."""

    def __init__(self, backbone: VisionBackbone, settings: ProjectionHead) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = DINOHead(backbone.num_features, settings)  # type: ignore[arg-type]

    def no_weight_decay(self) -> set[str]:
        """The backbone's own exceptions (timm's convention)."""
        names: set[str] = self.backbone.no_weight_decay()  # type: ignore[operator]
        return {f"backbone.{name}" for name in names}

    def forward(self, crops: list[Tensor]) -> Tensor:
        """Logits of all crops of a batch: one forward of the backbone for each resolution, one of the head for all.

        Args:
            crops: For each resolution, [B, V, C, S, S].

        Returns:
            [B, sum of V, K].
        """
        pooled = [self.backbone(images.flatten(0, 1)) for images in crops]
        logits = self.head(torch.cat(pooled)).split([len(features) for features in pooled])
        return torch.cat([x.unflatten(0, images.shape[:2]) for x, images in zip(logits, crops, strict=True)], dim=1)


def check_crops(name: str, backbone: VisionBackbone, image_size: int, multicrop: Any) -> None:
    """UserError: crops that a backbone cannot take, or nothing to compare."""
    if multicrop.global_crops < 1 or multicrop.global_crops + multicrop.local_crops < 2:
        raise UserError(
            "data.multicrop: expected a global crop and at least one more, got "
            f"{multicrop.global_crops} global and {multicrop.local_crops} local ones"
        )
    embedding: Any = backbone.patch_embed
    sizes = {"data.image_size": image_size}
    if multicrop.local_crops:
        sizes["data.multicrop.local_size"] = multicrop.local_size
    for key, size in sizes.items():
        if any(size % patch for patch in embedding.patch_size):
            patch = " x ".join(str(side) for side in embedding.patch_size)
            raise UserError(f"{key}: expected a multiple of the patches of {patch} pixels of {name}, got {size}")
    if embedding.img_size != (image_size, image_size):
        made_for = " x ".join(str(side) for side in embedding.img_size)
        raise UserError(
            f"model.backbone.img_size: expected data.image_size, {image_size}, for the global crops, got {made_for}"
        )
