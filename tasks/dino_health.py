"""What DINO's teacher says of its own health, and how a collapse shows."""

import math

import torch
from torch import Tensor

from lapbench.errors import UserError

# Of ln K, by which the loss of a healthy run stays below it or above 0.
MARGIN = 1e-3
LEAST_INFORMATION = 1e-3  # nats
LEAST_FEATURE_STD = 0.01


class CollapseWarning(UserWarning):
    """Student and teacher agree without telling images apart: there is nothing left to learn."""


class CollapseError(UserError):
    """The same, as the end of the run."""


def collapse(loss: float, information: float, feature_std: float, out_dim: int) -> str | None:
    """What is wrong with a run of which these are the means over an epoch; None if nothing is.

    Of DINO's two ways to collapse (arXiv 2104.14294, section 5.3), uniform outputs leave the loss at ln K, and one
    prototype for all images brings it to 0. In both outputs tell nothing of the images.
    """
    uniform = math.log(out_dim)
    signs = {
        f"the loss is at ln {out_dim}": abs(loss - uniform) < MARGIN * uniform,
        "the loss is at 0": loss < MARGIN * uniform,
        "the teacher's outputs are the same for all images": information < LEAST_INFORMATION,
        "the teacher's features are the same for all images": feature_std < LEAST_FEATURE_STD,
    }
    if not any(signs.values()):
        return None
    return (
        f"DINO has collapsed: {', '.join(sign for sign, seen in signs.items() if seen)} (loss {loss:.4f}, information "
        f"{information:.2g} nats, feature std {feature_std:.2g}); BatchNorm in the head, fewer prototypes, another "
        "teacher temperature or weaker augmentation may help"
    )


@torch.no_grad()
def entropy(probabilities: Tensor) -> Tensor:
    """Mean entropy in nats of distributions [..., K]: ln K where they are uniform, 0 where they are certain."""
    nats: Tensor = torch.special.entr(probabilities).sum(dim=-1).mean()
    return nats


@torch.no_grad()
def information(probabilities: Tensor) -> Tensor:
    """What outputs [..., K] tell of their images, in nats: 0 where all are the same, whether uniform or certain.

    The entropy of the mean output less the mean of their entropies.
    """
    return entropy(probabilities.flatten(0, -2).mean(dim=0)) - entropy(probabilities)


@torch.no_grad()
def feature_std(features: Tensor) -> Tensor:
    """Standard deviation of L2-normalised features [N, D] over the batch, in units of 1 / sqrt(D).

    1 where they point everywhere, 0 where they are all the same.
    """
    units = torch.nn.functional.normalize(features.float(), dim=-1)
    return units.std(dim=0, correction=0).mean() * math.sqrt(features.size(-1))
