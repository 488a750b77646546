"""Backbones: models whose heads follow a schedule. ``build_backbone`` makes them by name."""

from typing import Any

from lapbench.backbones.decoder import Decoder, build_decoder
from lapbench.backbones.decoder_presets import DecoderSettings, is_decoder
from lapbench.backbones.pixels import Pixels
from lapbench.backbones.vision import VisionSettings, build_vision_backbone
from lapbench.backbones.vision_backbone import VisionBackbone
from lapbench.errors import UserError

__all__ = [
    "Decoder",
    "DecoderSettings",
    "Pixels",
    "VisionBackbone",
    "VisionSettings",
    "build_backbone",
    "build_decoder",
    "build_vision_backbone",
]


def build_backbone(name: str, heads: Any = 0, **settings: Any) -> VisionBackbone | Decoder:
    """Builds a backbone with a head schedule: a decoder where ``name`` is one of its presets, else a timm model.

    Args:
        name: Preset of a decoder (tiny, d4 to d32, postnorm-48) or timm model name.
        heads: Anything that ``HeadSchedule.parse`` reads.
        **settings: The other fields of ``DecoderSettings`` and ``vocab_size``, or those of ``VisionSettings`` and
            ``num_classes``.

    Raises:
        UserError: An unknown name, or settings that do not fit it.
    """
    if not is_decoder(name):
        return build_vision_backbone(name, heads, **settings)
    if "vocab_size" not in settings:
        raise UserError(f"backbone {name}: a decoder reads tokens and needs vocab_size; expected a vision transformer?")
    return build_decoder(name, heads, **settings)
