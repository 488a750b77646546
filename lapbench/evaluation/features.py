"""What evaluations read off a frozen backbone, the same to the bit however samples fall into batches."""

import torch
from torch import Tensor, nn

from lapbench.backbones import Pixels, VisionBackbone

AT_ONCE = 32


def last_tokens(backbone: VisionBackbone, images: Tensor, blocks: int = 1) -> list[Tensor]:
    """Tokens of the last ``blocks`` blocks, after the model's final norm, without gradients.

    The backbone sees ``AT_ONCE`` images each time, the last of them blank where there are no more: the last bits of a
    matrix product depend on its shape, so features would depend on how samples fall into the batches of processes.

    Args:
        backbone: In evaluation mode.
        images: [B, C, H, W].
        blocks: How many of the last blocks to take.

    Returns:
        For each of these blocks in order of depth, [B, T, D], prefix tokens first.
    """
    pieces: list[list[Tensor]] = []
    with torch.no_grad():
        for piece in torch.split(images, AT_ONCE):
            padded = nn.functional.pad(piece, (0, 0) * (images.ndim - 1) + (0, AT_ONCE - len(piece)))
            taken = backbone.forward_intermediates(padded, blocks, norm=True)
            pieces.append([tokens[: len(piece)] for tokens in taken])
    return [torch.cat(of_one_block) for of_one_block in zip(*pieces, strict=True)]


def mean_patch_token(backbone: VisionBackbone, tokens: Tensor) -> Tensor:
    """Mean of the patch tokens: [B, D] of tokens [B, T, D]."""
    return tokens[:, backbone.num_prefix_tokens :].mean(dim=1)


def image_token(backbone: VisionBackbone, tokens: Tensor) -> Tensor:
    """What stands for the image: its class token, or the mean of its patch tokens where there is none.

    Raw pixels stand for themselves: of ``Pixels`` it is all tokens, one after the other.

    Args:
        backbone: Whose tokens they are.
        tokens: [B, T, D].

    Returns:
        [B, D]; of ``Pixels`` [B, T D].
    """
    if isinstance(backbone, Pixels):
        return tokens.flatten(1)
    return tokens[:, 0] if has_class_token(backbone) else mean_patch_token(backbone, tokens)


def has_class_token(backbone: VisionBackbone) -> bool:
    """Whether the first token is a class token; prefix tokens may be registers only."""
    return getattr(backbone, "cls_token", None) is not None
