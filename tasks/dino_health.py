"""What DINO's teacher says of its own health, and how a collapse shows."""

import math

import torch
from torch import Tensor

from lapbench.errors import UserError

# Measured on digits: a healthy run never falls below 100 and 50 times these.
LEAST_INFORMATION = 0.01
LEAST_FEATURE_STD = 0.01


class CollapseWarning(UserWarning):
    """The teacher gives all images the same output: there is nothing to learn from it."""


class CollapseError(UserError):
    """The same, as the end of the run."""


def collapse(information: float, feature_std: float) -> str | None:
    """What is wrong with a teacher of which these are the means over an epoch; None if nothing is."""
    if information >= LEAST_INFORMATION and feature_std >= LEAST_FEATURE_STD:
        return None
    return (
        f"the teacher has collapsed, it gives all images the same output: information {information:.2g} nats, "
        f"feature std {feature_std:.2g}; expected at least {LEAST_INFORMATION} and {LEAST_FEATURE_STD}; BatchNorm in the "
        "head, fewer prototypes, a lower teacher temperature or a lower learning rate may help"
    )


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
