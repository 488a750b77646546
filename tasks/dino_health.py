"""What DINO's teacher says of its own health, and how a collapse shows."""

import math

import torch
from torch import Tensor


class CollapseWarning(UserWarning):
    """The teacher gives all images the same output: what it learns is of no use."""


@torch.no_grad()
def entropy(probabilities: Tensor) -> Tensor:
    """Mean entropy in nats of distributions [..., K]: ln K where they are uniform, 0 where they are certain."""
    return torch.special.entr(probabilities).sum(dim=-1).mean()


@torch.no_grad()
def information(probabilities: Tensor) -> Tensor:
    """What the outputs [..., K] tell of the images, in nats: the entropy of their mean less the mean of their entropies.

    0 where all outputs are the same, whether uniform or certain.
    """
    return entropy(probabilities.flatten(0, -2).mean(dim=0)) - entropy(probabilities)


@torch.no_grad()
def feature_std(features: Tensor) -> Tensor:
    """Standard deviation of L2-normalised features [N, D] over the batch, in units of 1 / sqrt(D).

    1 where they point everywhere, 0 where they are all the same.
    """
    units = torch.nn.functional.normalize(features.float(), dim=-1)
    return units.std(dim=0, correction=0).mean() * math.sqrt(features.size(-1))
