"""mmsegmentation's model around a backbone: its heads, loss and inference, without its runner.

This module imports mmseg, which takes seconds: import it where a model is built, not before.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from timm.layers import to_2tuple
from torch import Tensor, nn

from lapbench.backbones import VisionBackbone
from lapbench.errors import UserError
from lapbench.openmmlab import mmseg_imports
from lapbench.tasks.segmentation import Head, Inference
from lapbench.tasks.segmentation_scores import IGNORED

with mmseg_imports():
    from mmengine.config import ConfigDict
    from mmengine.model import normal_init
    from mmseg.models.data_preprocessor import SegDataPreProcessor
    from mmseg.models.decode_heads import UPerHead
    from mmseg.models.decode_heads.decode_head import BaseDecodeHead
    from mmseg.models.losses import CrossEntropyLoss
    from mmseg.models.necks import Feature2Pyramid
    from mmseg.models.segmentors import EncoderDecoder


class TokenMaps(nn.Module):
    """A backbone as mmseg takes one: maps of the tokens after chosen blocks, with the model's final norm.

    Args:
        backbone: Of any image size.
        blocks: Which blocks, in order of depth.
        frozen: Whether it stays as it is, in evaluation mode and without gradients.
    """

    def __init__(self, backbone: VisionBackbone, blocks: Sequence[int], frozen: bool) -> None:
        super().__init__()
        self.backbone = backbone
        self.blocks = list(blocks)
        self.frozen = frozen
        self.patch = patch_size(backbone)
        # What only a classifier uses gets no gradient here, which DDP takes for a mistake.
        unused = [getattr(backbone, name, None) for name in ("fc_norm", "attn_pool")]
        for module in [backbone] if frozen else filter(None, unused):
            module.requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> "TokenMaps":
        """As ``nn.Module``'s; a frozen backbone stays in evaluation mode."""
        return super().train(mode and not self.frozen)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """[B, D, H / patch, W / patch] for each block, of images [B, C, H, W]."""
        rows, columns = images.size(2) // self.patch[0], images.size(3) // self.patch[1]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            taken = self.backbone.forward_intermediates(images, self.blocks, norm=True)
        patches = [tokens[:, self.backbone.num_prefix_tokens :] for tokens in taken]
        return tuple(tokens.transpose(1, 2).reshape(len(images), -1, rows, columns) for tokens in patches)


class _Total(torch.autograd.Function):
    """The sum over all processes; so is its gradient, as each has a loss of its own."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return _Total.forward(ctx, gradient)


class SharedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm over the images of all processes, which have equally many: torch's ``SyncBatchNorm`` needs GPUs."""

    def forward(self, maps: Tensor) -> Tensor:
        """[B, C, H, W] to the same."""
        if not self.training or _processes() == 1:
            return super().forward(maps)
        axes = (0, 2, 3)
        mean = _total(maps.mean(axes)) / _processes()
        centred = maps - mean[:, None, None]
        variance = _total(centred.square().mean(axes)) / _processes()
        count = maps.numel() // maps.size(1) * _processes()
        with torch.no_grad():
            assert self.running_mean is not None
            assert self.running_var is not None
            assert self.num_batches_tracked is not None
            assert self.momentum is not None
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean.float(), self.momentum)
            self.running_var.lerp_(variance.float() * count / (count - 1), self.momentum)
        scale = self.weight * (variance + self.eps).rsqrt()
        return centred * scale[:, None, None] + self.bias[:, None, None]


class LinearHead(BaseDecodeHead):  # type: ignore[misc]  # mmseg is not typed
    """Batch norm and a 1 x 1 convolution on the concatenated maps (the linear head of DINOv2, arXiv 2304.07193)."""

    def __init__(self, in_channels: Sequence[int], **settings: Any) -> None:
        super().__init__(
            in_channels=list(in_channels),
            channels=sum(in_channels),
            in_index=list(range(len(in_channels))),
            input_transform="resize_concat",
            **settings,
        )
        self.norm = SharedBatchNorm2d(self.channels)

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """Logits [B, classes, h, w] of maps [B, D, h, w]."""
        logits: Tensor = self.cls_seg(self.norm(self._transform_inputs(inputs)))
        return logits


def build_model(
    backbone: VisionBackbone,
    *,
    num_classes: int,
    head: Head,
    channels: int,
    dropout: float,
    frozen: bool,
    inference: Inference,
    mean: Sequence[float],
    std: Sequence[float],
) -> EncoderDecoder:
    """mmseg's ``EncoderDecoder`` around ``backbone``, whose weights stay as they are.

    Its preprocessor takes 8-bit images (BGR, or grey), and in evaluation pads them to whole patches on the right and at
    the bottom; what is predicted has the size of the label again.

    Args:
        backbone: Of any image size.
        num_classes: Number of classes.
        head: Which head.
        channels: Width of UPerNet.
        dropout: Share of channels that are dropped before the classifier.
        frozen: Whether the backbone is not trained.
        inference: How whole images are labelled.
        mean: Mean of each channel in RGB order, of values in 0..1.
        std: Their standard deviation.

    Raises:
        UserError: The backbone has too few layers for the head.
    """
    width = backbone.embed_dim
    blocks = blocks_of(head, backbone.num_layers)
    norm = {"type": SharedBatchNorm2d}
    shared = {
        "num_classes": num_classes,
        "out_channels": num_classes,
        "dropout_ratio": dropout,
        "ignore_index": IGNORED,
        # By default mmseg averages over ignored pixels too.
        "loss_decode": {"type": CrossEntropyLoss, "avg_non_ignore": True},
    }
    neck = None
    if head == "upernet":
        neck = {"type": Feature2Pyramid, "embed_dim": width, "norm_cfg": norm}
        decode_head: dict[str, Any] = {
            "type": UPerHead,
            "in_channels": [width] * 4,
            "in_index": [0, 1, 2, 3],
            "channels": channels,
            "norm_cfg": norm,
        }
    else:
        decode_head = {"type": LinearHead, "in_channels": [width] * len(blocks)}
    patch = patch_size(backbone)
    model = EncoderDecoder(
        backbone={"type": TokenMaps, "backbone": backbone, "blocks": blocks, "frozen": frozen},
        neck=neck,
        decode_head={**decode_head, **shared},
        test_cfg=ConfigDict(mode=inference.mode, crop_size=(inference.crop_size,) * 2, stride=(inference.stride,) * 2),
        data_preprocessor={
            "type": SegDataPreProcessor,
            "mean": [255 * value for value in mean],
            "std": [255 * value for value in std],
            "bgr_to_rgb": len(mean) == 3,
            "size_divisor": max(patch),
            "seg_pad_val": IGNORED,
            "test_cfg": {"size_divisor": max(patch)},
        },
    )
    # Not `init_weights`, which would begin with the backbone; mmcv's other layers have their first weights already.
    normal_init(model.decode_head.conv_seg, std=0.01)
    return model


def blocks_of(head: Head, num_layers: int) -> list[int]:
    """The blocks whose tokens a head reads: the last, the last four, or four at even distances.

    Raises:
        UserError: Fewer than four layers for a head that reads four.
    """
    if head == "linear":
        return [num_layers - 1]
    if num_layers < 4:
        raise UserError(f"head {head}: it reads four layers, the backbone has {num_layers}; expected head linear")
    if head == "linear4":
        return list(range(num_layers - 4, num_layers))
    return [num_layers * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]


def patch_size(backbone: VisionBackbone) -> tuple[int, int]:
    """Height and width of a patch in pixels."""
    height, width = to_2tuple(getattr(backbone, "patch_embed", backbone).patch_size)
    return height, width


def _total(values: Tensor) -> Tensor:
    total: Tensor = _Total.apply(values)
    return total


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
