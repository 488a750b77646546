"""Tokens in the plane of three classifier rows, where collapsed classes make a triangle."""

import torch
from torch import Tensor

# The simplex ETF of three classes in the plane: unit vectors, class 0 at the top, then counterclockwise. [3, 2]
VERTICES = torch.tensor([[0.0, 1.0], [-(0.75**0.5), -0.5], [0.75**0.5, -0.5]], dtype=torch.float64)


def simplex_projection(tokens: Tensor, classifier_rows: Tensor) -> Tensor:
    """Tokens in the plane of three classifier rows, turned to fit a simplex (arXiv 2402.06171, Algorithm 1).

    With W~ = U S V^T the rows less their mean, Q = U V^T is the nearest frame to them, of orthonormal rows but for the
    one direction that centring takes. A token x is drawn at sqrt(2/3) VERTICES^T Q (x - mean of the rows): distances
    within the plane of the rows are kept, and the rows decide how it is turned, so reruns agree. Rows that are a
    simplex ETF land on their norm times `VERTICES`, and zero on the centre; other rows land as near as turning allows.

    Args:
        tokens: [N, D], as the classifier reads them.
        classifier_rows: [3, D], the weights of the three classes.

    Returns:
        [N, 2] in float64. Three equal rows have no plane: all tokens are at the centre. Rows on a line have a line.

    Raises:
        ValueError: Shapes that do not fit.
    """
    if tokens.ndim != 2 or classifier_rows.shape != (3, tokens.size(1)):
        expected = "tokens [N, D] and classifier rows [3, D]"
        raise ValueError(f"expected {expected}, got {tuple(tokens.shape)} and {tuple(classifier_rows.shape)}")
    rows = classifier_rows.double()
    centre = rows.mean(dim=0)
    left, singular, right = torch.linalg.svd(rows - centre, full_matrices=False)
    # What is left of a direction that the rows do not have is the rounding error of their entries.
    kept = singular > torch.finfo(torch.float64).eps * max(rows.shape) * rows.norm()
    frame = left[:, kept] @ right[kept]  # [3, D]
    plane = (2 / 3) ** 0.5 * VERTICES.to(rows.device).T @ frame  # [2, D]
    projected: Tensor = (tokens.double() - centre) @ plane.T
    return projected
