"""Any timm vision transformer, with a head schedule."""

import difflib
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import timm
import torch
from timm.layers import DropPath
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from lapbench.backbones.attention import attention_of, set_head_kinds
from lapbench.backbones.pixels import Pixels
from lapbench.backbones.vision_backbone import VisionBackbone
from lapbench.backbones.weights import load_weights
from lapbench.errors import UserError
from lapbench.heads.schedule import HeadSchedule


class ViTBackbone(VisionBackbone, VisionTransformer):
    """timm's ``VisionTransformer`` as a backbone."""


class DistilledViTBackbone(VisionBackbone, VisionTransformerDistilled):
    """timm's ``VisionTransformerDistilled`` (DeiT with a distillation token) as a backbone."""


class EvaBackbone(VisionBackbone, Eva):
    """timm's ``Eva`` (EVA, EVA-02, DINOv3, ViT with rotary embeddings) as a backbone."""


BACKBONES: dict[type[nn.Module], type[VisionBackbone]] = {
    VisionTransformer: ViTBackbone,
    VisionTransformerDistilled: DistilledViTBackbone,
    Eva: EvaBackbone,
}
PIXELS = "pixels"
_OF_PIXELS = ("name", "heads", "img_size", "patch_size", "in_chans", "dynamic_img_size")


@dataclass
class VisionSettings:
    """Settings of a vision backbone; None keeps what timm's model of that name has.

    Args:
        name: A timm model with ``Attention``, ``AttentionRope`` or ``EvaAttention``: vit_*, deit3_*, eva*, ...;
            or "pixels", raw pixels as a reference, which has img_size, patch_size and in_chans only.
        heads: Head schedule: 6 (Laplacian heads in every layer), [0, 2, 2, 0] (for each layer), a name (0-12L,
            6L@last4, 4L+2D0.5) or a mapping of kinds to counts.
        pretrained: Whether to start from timm's pretrained weights (downloaded from the hub).
        weights: Local weights to start from: a timm state dict (.pth, .safetensors) or a lapbench checkpoint (.ckpt).
        img_size: Image size in pixels.
        patch_size: Patch size in pixels.
        in_chans: Image channels.
        qk_norm: Whether to normalise queries and keys.
        layer_scale: Start value of LayerScale; 0 for none.
        drop_path: Stochastic-depth rate.
        drop_path_schedule: Over depth: "linear" from 0 to ``drop_path``, or "constant" (DeiT-III).
        global_pool: "token" (class token) or "avg".
        dynamic_img_size: Whether to accept any image size, interpolating position embeddings.
        grad_checkpointing: Whether to recompute blocks in the backward pass, to save memory.
        compile: Whether to compile the model with torch.compile.
        channels_last: Whether to keep convolution weights in channels-last layout.
        options: Further arguments of timm's model class, such as embed_dim, depth, num_heads.
    """

    name: str
    # Not a Union of its forms: HeadSchedule.parse says better than jsonargparse what does not fit.
    heads: Any = 0
    pretrained: bool = False
    weights: str | None = None
    img_size: int | None = None
    patch_size: int | None = None
    in_chans: int = 3
    qk_norm: bool | None = None
    layer_scale: float | None = None
    drop_path: float = 0.0
    drop_path_schedule: Literal["linear", "constant"] = "linear"
    global_pool: str | None = None
    dynamic_img_size: bool = False
    grad_checkpointing: bool = False
    compile: bool = False
    channels_last: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def build_vision_backbone(name: str, heads: Any = 0, *, num_classes: int = 1000, **settings: Any) -> VisionBackbone:
    """Builds a timm vision transformer with a head schedule, or ``Pixels``.

    All-attention schedules give stock timm bit for bit; every schedule has timm's state-dict keys, so pretrained
    weights load in both directions (learned kinds add ``head_coefficients``).

    Args:
        name: timm model name or "pixels".
        heads: Anything that ``HeadSchedule.parse`` reads.
        num_classes: Outputs of the classifier; 0 for none.
        **settings: The other fields of ``VisionSettings``; further names go to timm's model class.

    Raises:
        UserError: Unknown model, unsupported attention, schedule that does not fit, settings that timm refuses.
    """
    known = {f.name for f in fields(VisionSettings)}
    options = {**settings.pop("options", {}), **{k: settings.pop(k) for k in settings.keys() - known}}
    s = VisionSettings(name, heads, options=options, **settings)
    if name == PIXELS:
        return _pixels(s, num_classes)
    model = _create(s, num_classes)
    backbone = _convert(model, s)
    if s.layer_scale == 0:
        _remove_layer_scale(model)
    if s.drop_path_schedule == "constant" and s.drop_path > 0:
        _set_constant_drop_path(model, s.drop_path)
    if s.weights is not None:
        load_weights(backbone, s.weights)
    if s.grad_checkpointing:
        backbone.set_grad_checkpointing()
    if s.channels_last:
        model.to(memory_format=torch.channels_last)
    if s.compile:
        model.compile()
    return backbone


def _pixels(s: VisionSettings, num_classes: int) -> Pixels:
    unset = VisionSettings(s.name)
    for setting in (f.name for f in fields(s) if f.name not in _OF_PIXELS):
        if getattr(s, setting) != getattr(unset, setting):
            raise UserError(
                f"backbone {s.name}: expected no settings but {', '.join(_OF_PIXELS[2:])}, "
                f"got {setting} {getattr(s, setting)!r}"
            )
    if num_classes:
        raise UserError(
            f"backbone {s.name}: nothing in it can be trained, it has no classifier: expected num_classes 0 "
            f"(lapbench.tasks.FrozenBackbone, to evaluate it), got {num_classes}"
        )
    if s.patch_size is None:
        raise UserError(f"backbone {s.name}: expected a patch_size in pixels, got none")
    pixels = Pixels(s.patch_size, s.in_chans)
    if s.img_size is not None and s.img_size % s.patch_size:
        raise UserError(
            f"backbone {s.name}: img_size: expected a multiple of the patch size {s.patch_size}, got {s.img_size}"
        )
    if HeadSchedule.parse(s.heads, pixels.num_layers, pixels.num_heads) != pixels.schedule:
        raise UserError(f"backbone {s.name}: it has no heads: expected heads 0, got {s.heads!r}")
    return pixels


def _create(s: VisionSettings, num_classes: int) -> nn.Module:
    if not timm.is_model(s.name.split(".")[0]):
        near = difflib.get_close_matches(s.name, timm.list_models(), n=3)
        hint = f"; did you mean {', '.join(near)}?" if near else " (timm.list_models() names them)"
        raise UserError(f"backbone.name: timm {timm.__version__} has no model {s.name!r}{hint}")
    arguments = dict(s.options)
    optional = {
        "img_size": s.img_size,
        "patch_size": s.patch_size,
        "qk_norm": s.qk_norm,
        "global_pool": s.global_pool,
        # 0 is "no LayerScale" to timm's ViT, not to Eva: see _remove_layer_scale. Both ignore None where they have one.
        "init_values": s.layer_scale,
    }
    arguments |= {key: value for key, value in optional.items() if value is not None}
    if s.dynamic_img_size:
        arguments["dynamic_img_size"] = True
    try:
        model: nn.Module = timm.create_model(
            s.name,
            pretrained=s.pretrained,
            num_classes=num_classes,
            in_chans=s.in_chans,
            drop_path_rate=s.drop_path,
            **arguments,
        )
    except (TypeError, AssertionError, ValueError, RuntimeError, OSError) as error:
        what = "weights or settings" if s.pretrained else "settings"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"backbone {s.name}: timm cannot build it with these {what}: {reason}") from error
    return model


def _convert(model: nn.Module, s: VisionSettings) -> VisionBackbone:
    if type(model) not in BACKBONES:
        expected = ", ".join(t.__name__ for t in BACKBONES)
        raise UserError(f"backbone {s.name}: expected a model of class {expected}, got {type(model).__name__}")
    blocks = list(model.blocks)  # type: ignore[arg-type]
    attentions = [attention_of(block, f"backbone {s.name}, block {i}") for i, block in enumerate(blocks)]
    num_heads: int = attentions[0].num_heads  # type: ignore[assignment]
    schedule = HeadSchedule.parse(s.heads, len(blocks), num_heads)
    model.__class__ = BACKBONES[type(model)]
    assert isinstance(model, VisionBackbone)
    model.num_layers, model.num_heads, model.schedule = len(blocks), num_heads, schedule
    for attention, kinds in zip(attentions, schedule.layers, strict=True):
        set_head_kinds(attention, kinds)
    return model


def _remove_layer_scale(model: nn.Module) -> None:
    """Takes out the LayerScale of Eva blocks, which at 0 would silence them for good."""
    for block in model.blocks:  # type: ignore[union-attr]
        for name in ("gamma_1", "gamma_2"):
            if getattr(block, name, None) is not None:
                setattr(block, name, None)


def _set_constant_drop_path(model: nn.Module, rate: float) -> None:
    """DeiT-III's constant stochastic depth; timm only has the linear one, whose first block drops nothing."""
    for block in model.blocks:  # type: ignore[union-attr]
        for name in ("drop_path1", "drop_path2"):
            if not hasattr(block, name):
                raise UserError(f"drop_path_schedule constant: {type(block).__name__} has no {name}; use linear")
            setattr(block, name, DropPath(rate))
