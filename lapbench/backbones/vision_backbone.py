"""What lapbench asks of every vision backbone."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lapbench.backbones.attention import MixedHeads
from lapbench.heads.schedule import HeadSchedule


class VisionBackbone(nn.Module):
    """Mixed in before a timm model class: what lapbench asks of every backbone. Keys and forward stay timm's.

    Attributes:
        embed_dim: Width D of the tokens.
        num_layers: Number of blocks L.
        num_heads: Heads H of each block.
        num_prefix_tokens: Class and register tokens, first in the sequence.
        schedule: Kind of each head.
    """

    embed_dim: int
    num_layers: int
    num_heads: int
    num_prefix_tokens: int
    schedule: HeadSchedule

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turns recomputation of blocks in the backward pass on or off; heads then keep nothing of their own."""
        super().set_grad_checkpointing(enable)  # type: ignore[misc]
        for module in self.modules():
            if isinstance(module, MixedHeads):
                module.lean = not enable

    def forward_intermediates(
        self, x: Tensor, indices: int | Sequence[int] | None = None, *, norm: bool = False
    ) -> list[Tensor]:
        """Tokens after the chosen blocks.

        Args:
            x: Images, [B, C, H, W].
            indices: The last n blocks for an int, all for None, or the blocks to take (negative ones from the end).
            norm: Whether to apply the model's final norm.

        Returns:
            For each block in order of depth, [B, T, D], prefix tokens first.
        """
        taken = super().forward_intermediates(  # type: ignore[misc]
            x,
            indices=indices if indices is None or isinstance(indices, int) else list(indices),
            norm=norm,
            return_prefix_tokens=self.num_prefix_tokens > 0,  # timm's Eva fails where there are none to return
            output_fmt="NLC",
            intermediates_only=True,
        )
        if self.num_prefix_tokens == 0:
            return list(taken)
        return [torch.cat([prefix, tokens], dim=1) for tokens, prefix in taken]
