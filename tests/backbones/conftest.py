"""Small models of every family, and the stock timm models that they are compared with."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from lapbench.backbones import VisionBackbone, build_backbone
from lapbench.heads import recompute

SIZES: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4}
# One of each attention type at least, with what makes the families differ.
FAMILIES: dict[str, dict[str, Any]] = {
    "deit3_small_patch16_224": {"init_values": 0.1},  # Attention; LayerScale, no position for the class token
    "vit_small_patch14_reg4_dinov2": {"init_values": 0.1},  # Attention; register tokens
    "vit_base_patch16_siglip_224": {},  # Attention; no prefix tokens, attention pooling
    "deit_tiny_distilled_patch16_224": {},  # Attention; two prefix tokens, two classifiers
    "vit_small_patch16_rope_mixed_224": {"init_values": 0.1},  # AttentionRope; learned frequencies
    "vit_small_patch16_rope_ape_224": {"init_values": 0.1, "qk_norm": True},  # AttentionRope; QK-norm
    "eva02_tiny_patch14_224": {},  # EvaAttention; separate biases, SwiGLU
    "vit_small_patch16_dinov3": {"init_values": 0.1},  # EvaAttention; register tokens, no position embedding
}


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors are slower on several threads."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small mixtures too are recomputed in the backward pass, as those of full-size models are."""
    monkeypatch.setattr(recompute, "LEAST_BYTES", 0)


class Zoo:
    """Builds a family's small model twice: by lapbench and by timm alone, with equal weights."""

    families = tuple(FAMILIES)

    @staticmethod
    def mixed(name: str, heads: Any, seed: int = 0, **settings: Any) -> VisionBackbone:
        torch.manual_seed(seed)
        return build_backbone(name, heads, **{"num_classes": 5, **SIZES, **FAMILIES.get(name, {}), **settings})

    @staticmethod
    def stock(name: str, seed: int = 0, **settings: Any) -> nn.Module:
        torch.manual_seed(seed)
        model: nn.Module = timm.create_model(name, **{"num_classes": 5, **SIZES, **FAMILIES.get(name, {}), **settings})
        return model

    @staticmethod
    def images(size: int | tuple[int, int] = 16, batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
        height, width = (size, size) if isinstance(size, int) else size
        generator = torch.Generator().manual_seed(1)
        return torch.randn(batch, 3, height, width, generator=generator, dtype=torch.float64).to(dtype)


@pytest.fixture
def zoo() -> type[Zoo]:
    return Zoo


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``family``: one run for each family."""
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", Zoo.families)
