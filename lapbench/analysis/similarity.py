"""How alike the tokens of one sequence are."""

import torch
from torch import Tensor
from torchmetrics import Metric


def within_sequence_similarity(tokens: Tensor) -> Tensor:
    """Mean cosine of all pairs of different tokens of a sequence (arXiv 2602.09297, section 4.1).

    With unit tokens u_t it is (|sum_t u_t|^2 - T) / (T (T - 1)): linear in T, where all pairs would be quadratic. A
    token of zeros has cosine 0 with every other.

    Args:
        tokens: [B, T, D], T at least 2.

    Returns:
        [B] in float64, within [-1, 1].

    Raises:
        ValueError: Sequences of a single token.
    """
    length = tokens.size(1)
    if length < 2:
        raise ValueError(f"expected sequences of at least 2 tokens, got {length}")
    wide = tokens.double()
    norms = torch.linalg.vector_norm(wide, dim=-1)
    # Weights and a product: the unit tokens themselves would be two more passes over all numbers.
    weights = torch.where(norms > 0, norms.reciprocal(), 0)
    of_all = (weights.unsqueeze(1) @ wide).squeeze(1).square().sum(dim=-1)
    similarity: Tensor = (of_all - (norms > 0).sum(dim=-1)) / (length * (length - 1))
    return similarity.clamp(-1, 1)


class WithinSequenceSimilarity(Metric):
    """Mean of ``within_sequence_similarity`` over the sequences of all processes, sums in float64.

    Sequences of a single token have no pair and do not count.
    """

    is_differentiable = False
    full_state_update = False
    total: Tensor
    sequences: Tensor
    single: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("sequences", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("single", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, tokens: Tensor) -> None:
        """Add sequences [B, T, D]."""
        if tokens.size(1) < 2:
            self.single = self.single + len(tokens)
        else:
            self.total = self.total + within_sequence_similarity(tokens).sum()
            self.sequences = self.sequences + len(tokens)

    def compute(self) -> float | None:
        """The mean, within [-1, 1]; None where all sequences were of a single token.

        Raises:
            ValueError: Nothing was seen, or tokens with NaN or infinite numbers.
        """
        if not self.sequences + self.single:
            raise ValueError(f"{type(self).__name__}: expected at least one sequence, got none")
        if not self.total.isfinite():
            raise ValueError(f"{type(self).__name__}: expected tokens of finite numbers, got NaN or infinity")
        return float(self.total / self.sequences) if self.sequences else None
