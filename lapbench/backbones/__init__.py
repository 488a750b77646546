"""Backbones: models whose heads follow a schedule. ``build_backbone`` makes them by name."""

from lapbench.backbones.vision import VisionBackbone, VisionSettings, build_backbone

__all__ = ["VisionBackbone", "VisionSettings", "build_backbone"]
