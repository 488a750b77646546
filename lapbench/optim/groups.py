"""Parameter groups: weight decay for matrices, none for what only scales, shifts or places."""

from typing import Any

from torch import nn
from torch.optim import Optimizer

# Tokens and position embeddings are matrices by shape only; learned head coefficients are three numbers for each head.
_NO_DECAY = ("pos_embed", "cls_token", "dist_token", "reg_token", "mask_token", "head_coefficients")


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Splits the trainable parameters of ``model`` into two groups, decayed and not.

    No decay: biases, norms, LayerScale (all at most one-dimensional), class, distillation and register tokens, position
    embeddings, learned head coefficients, and whatever ``model.no_weight_decay()`` names (timm's convention).

    Returns:
        Groups for a torch optimizer, each parameter in exactly one. Empty groups are left out.
    """
    own: set[str] = getattr(model, "no_weight_decay", set)()
    decayed: list[nn.Parameter] = []
    not_decayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        exempt = parameter.ndim <= 1 or name in own or name.rsplit(".", 1)[-1] in _NO_DECAY
        (not_decayed if exempt else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_weight_decay(optimizer: Optimizer, weight_decay: float) -> None:
    """Gives the decayed parameters of ``parameter_groups``, its first group, another weight decay."""
    optimizer.param_groups[0]["weight_decay"] = weight_decay
