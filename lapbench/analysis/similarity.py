"""How alike the tokens of one sequence are."""

from torch import Tensor, nn


def within_sequence_similarity(tokens: Tensor) -> Tensor:
    """Mean cosine of all pairs of different tokens of a sequence (arXiv 2602.09297, section 4.1).

    With unit tokens u_t it is (|sum_t u_t|^2 - T) / (T (T - 1)): linear in T, where all pairs would be quadratic.

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
    units = nn.functional.normalize(tokens.double(), dim=-1)
    similarity: Tensor = (units.sum(dim=1).square().sum(dim=-1) - length) / (length * (length - 1))
    return similarity.clamp(-1, 1)
