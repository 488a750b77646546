"""How many directions the tokens of one sequence spread over."""

from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric


def sequence_eigenvalues(tokens: Tensor) -> Tensor:
    """Eigenvalues of the scatter X~^T X~ of each sequence about its mean (arXiv 2602.09297, section 4.2).

    They are those of the smaller of X~ X~^T, [T, T], and X~^T X~, [D, D], but for zeros.

    Args:
        tokens: [B, T, D] in any precision, T at least 1.

    Returns:
        [B, min(T, D)] float64, largest first, none below 0. Sequences of equal tokens have exact zeros.

    Raises:
        ValueError: Sequences without tokens, or tokens with NaN or infinite numbers.
    """
    if not tokens.size(1):
        raise ValueError("expected sequences of at least 1 token, got 0")
    # About the first token before the mean: equal tokens become exact zeros, whatever the mean is rounded to.
    centred = tokens - tokens[:, :1].double()
    centred -= centred.mean(dim=1, keepdim=True)
    wide = tokens.size(1) < tokens.size(2)
    gram = centred @ centred.mT if wide else centred.mT @ centred
    if not gram.isfinite().all():
        raise ValueError("spectrum of tokens: expected finite numbers, got NaN or infinity")
    eigenvalues: Tensor = torch.linalg.eigvalsh(gram)
    return eigenvalues.flip(-1).clamp(min=0)


def components_holding(eigenvalues: Tensor, alpha: float) -> Tensor:
    """The fewest leading eigenvalues that hold a fraction alpha of their sum.

    Args:
        eigenvalues: [..., K], largest first, none below 0.
        alpha: Above 0 and below 1.

    Returns:
        [...] int64, from 1 to K; 0 where all eigenvalues are 0.
    """
    sums = eigenvalues.cumsum(dim=-1)
    everything = sums[..., -1:]
    return ((sums < alpha * everything).sum(dim=-1) + 1) * (everything.squeeze(-1) > 0)


def merged_moments(one: Tensor, other: Tensor) -> Tensor:
    """Count, mean and summed squared deviations of two samples together (Chan et al. 1979, equation 2.1).

    Args:
        one: [3, K]: for each of K quantities, the count, the mean and the sum of (x - mean)^2.
        other: As ``one``.
    """
    count = one[0] + other[0]
    share, shift = other[0] / count.clamp(min=1), other[1] - one[1]
    return torch.stack([count, one[1] + share * shift, one[2] + other[2] + one[0] * share * shift.square()])


def _of_processes(states: Tensor) -> Tensor:
    merged = states[0]
    for state in states[1:]:
        merged = merged_moments(merged, state)
    return merged


class TokenSpectrum(Metric):
    """Spectrum of the tokens of a sequence about their mean: mean and spread over sequences of each eigenvalue.

    Measures of section 4.2 of arXiv 2602.09297 (figures 7 and 10): the j-th largest eigenvalue of X~^T X~, averaged
    over sequences, and k_alpha, the mean number of components that hold a fraction alpha of a sequence's variance
    (the "singular value energy" of figure 10 too: eigenvalues, not their roots).
    Sequences with fewer than ``size`` eigenvalues have zeros for the rest, which they are. The state is 3 (size + 1)
    numbers in float64.

    Args:
        size: Eigenvalues kept: the smaller of the largest number of tokens T and of features D.
        alpha: The fraction, above 0 and below 1.

    Raises:
        ValueError: A setting out of range.
    """

    is_differentiable = False
    full_state_update = False
    moments: Tensor

    def __init__(self, size: int, alpha: float = 0.99) -> None:
        super().__init__()
        if size < 1 or not 0 < alpha < 1:
            raise ValueError(f"expected size of at least 1 and alpha above 0 and below 1, got {size} and {alpha}")
        self.size = size
        self.alpha = alpha
        # Rows: count, mean, squared deviations; columns: the eigenvalues, then k_alpha.
        self.add_state("moments", torch.zeros(3, size + 1, dtype=torch.float64), dist_reduce_fx=_of_processes)

    def update(self, tokens: Tensor) -> None:
        """Add sequences [B, T, D].

        Raises:
            ValueError: Sequences without tokens or with more than ``size`` eigenvalues, numbers that are not finite.
        """
        kept = min(tokens.shape[1:])
        if kept > self.size:
            raise ValueError(f"expected at most {self.size} tokens or features, got {list(tokens.shape[1:])}")
        if not len(tokens):
            return
        eigenvalues = sequence_eigenvalues(tokens)
        values = torch.cat(
            [
                nn.functional.pad(eigenvalues, (0, self.size - kept)),
                components_holding(eigenvalues, self.alpha).unsqueeze(1),
            ],
            dim=1,
        )
        mean = values.mean(dim=0)
        count = torch.full_like(mean, len(values))
        batch = torch.stack([count, mean, (values - mean).square().sum(dim=0)])
        self.moments = merged_moments(self.moments, batch)

    def compute(self) -> dict[str, Any]:
        """Statistics over all sequences.

        Returns:
            ``eigenvalues_mean`` and ``eigenvalues_std``, lists of ``size``, ``k_alpha`` and ``k_alpha_std``, and
            ``sequences``. Standard deviations (ddof 1) are None for a single sequence. A sequence of equal tokens
            counts with eigenvalues 0 and k_alpha 0.

        Raises:
            ValueError: Nothing was seen.
        """
        sequences = int(self.moments[0, 0])
        if not sequences:
            raise ValueError(f"{type(self).__name__}: expected at least one sequence, got none")
        means = self.moments[1].tolist()
        spread = (self.moments[2] / (sequences - 1)).sqrt().tolist() if sequences > 1 else None
        return {
            "eigenvalues_mean": means[:-1],
            "eigenvalues_std": spread and spread[:-1],
            "k_alpha": means[-1],
            "k_alpha_std": spread and spread[-1],
            "sequences": sequences,
        }
