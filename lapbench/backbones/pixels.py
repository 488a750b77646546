"""Raw pixels as a backbone: what frozen evaluations are compared with."""

from collections.abc import Sequence

from torch import Tensor, nn

from lapbench.backbones.vision_backbone import VisionBackbone
from lapbench.errors import UserError
from lapbench.heads.schedule import HeadSchedule


class Pixels(VisionBackbone):
    """Gives the pixels of each patch as its token, for images of any size in whole patches. It has no parameters.

    Its one layer has one head, which does nothing: its schedule is that of a model without Laplacian heads.

    Args:
        patch_size: Patch size P in pixels.
        in_chans: Image channels C.

    Raises:
        UserError: A patch of no pixels.
    """

    num_layers = 1
    num_heads = 1
    num_prefix_tokens = 0

    def __init__(self, patch_size: int, in_chans: int = 3) -> None:
        super().__init__()
        if patch_size < 1:
            raise UserError(f"backbone pixels: patch_size: expected at least 1, got {patch_size}")
        self.patch_size = patch_size
        self.in_chans = in_chans
        self.embed_dim = in_chans * patch_size**2
        self.schedule = HeadSchedule.parse(0, self.num_layers, self.num_heads)

    def forward_intermediates(
        self, x: Tensor, indices: int | Sequence[int] | None = None, *, norm: bool = False
    ) -> list[Tensor]:
        """The patches as tokens, row by row: one [B, N, C P P] of images [B, C, H, W].

        Args:
            x: Images.
            indices: As for other backbones; there is one layer to take.
            norm: There is no norm.

        Raises:
            UserError: An image that is not in whole patches, or a layer that is not there.
        """
        if indices not in (None, 1) and (isinstance(indices, int) or list(indices) not in ([0], [-1])):
            raise UserError(f"backbone pixels: expected its only layer (1, [0] or [-1]), got {indices}")
        if x.size(1) != self.in_chans or x.size(2) % self.patch_size or x.size(3) % self.patch_size:
            raise UserError(
                f"backbone pixels: expected images of {self.in_chans} channels and sides that are multiples of the "
                f"patch size {self.patch_size}, got {' x '.join(map(str, x.shape[1:]))}"
            )
        tokens = nn.functional.unfold(x, self.patch_size, stride=self.patch_size)
        return [tokens.transpose(1, 2)]

    def forward(self, x: Tensor) -> Tensor:
        """All pixels: [B, C H W] of images [B, C, H, W]."""
        return x.flatten(1)
