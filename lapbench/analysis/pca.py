"""Principal components of tokens: of a whole data set, and of one image as colours."""

import math

import torch
from torch import Tensor
from torchmetrics import Metric

# Entries of a component that are as large as its largest but for rounding.
_AS_LARGE = 1 - 1e-6
# Variance that is rounding, as a fraction of the total.
_ROUNDING = 1e-12


class PrincipalComponents:
    """Directions of largest variance.

    No dataclass: torchmetrics would take the tensors out of it, and dimensions of size 1 off them.

    Attributes:
        mean: Of all tokens, [D] float64.
        components: Of unit length, largest variance first, [n, D] float64. Of the entries of a component that have its
            largest modulus (within a millionth), the first is positive, so signs do not depend on the order of data.
        variances: Of the tokens along the components, [n] float64, per token as in ANOVA: divided by N.
        total: Variance per token, summed over the features.
    """

    def __init__(self, mean: Tensor, components: Tensor, variances: Tensor, total: float) -> None:
        self.mean = mean
        self.components = components * component_signs(components)
        self.variances = variances
        self.total = total

    @property
    def explained(self) -> list[float] | None:
        """The fraction of the total variance along each component; None where all tokens are equal."""
        return (self.variances / self.total).tolist() if self.total else None

    def project(self, tokens: Tensor) -> Tensor:
        """Coordinates [..., n] float64 of tokens [..., D] about the mean."""
        coordinates: Tensor = (tokens - self.mean) @ self.components.T
        return coordinates


def component_signs(components: Tensor) -> Tensor:
    """[n, 1] of 1 and -1 that make the first of the largest entries of each component [n, D] positive."""
    sizes = components.abs()
    largest = (sizes >= _AS_LARGE * sizes.amax(dim=1, keepdim=True)).int().argmax(dim=1, keepdim=True)
    return torch.where(components.gather(1, largest) < 0, -1.0, 1.0).to(components.dtype)


def merged_scatter(one: Tensor, other: Tensor) -> Tensor:
    """Count, mean and scatter of two sets of tokens together (Chan et al. 1979), exact but for rounding.

    Args:
        one: [D + 2, D]: the count in each column, the mean, and D rows of sum (x - mean) (x - mean)^T.
        other: As ``one``.
    """
    count = one[0] + other[0]
    share, shift = other[0] / count.clamp(min=1), other[1] - one[1]
    mean = one[1] + share * shift
    scatter = torch.addcmul(one[2:] + other[2:], shift[:, None] * (one[0] * share), shift)
    return torch.cat([count[None], mean[None], scatter])


def _of_processes(states: Tensor) -> Tensor:
    merged = states[0]
    for state in states[1:]:
        merged = merged_scatter(merged, state)
    return merged


class TokenPCA(Metric):
    """Principal components of all tokens of a data set, exact whatever the batches (arXiv 2602.09297, section 4.1).

    The state is the mean and the scatter of the tokens, (D + 2) D numbers in float64: 13 MB at D = 1,280.

    Args:
        embed_dim: Features D of a token.
    """

    is_differentiable = False
    full_state_update = False
    scatter: Tensor

    def __init__(self, embed_dim: int) -> None:
        # With its cache, compute(3) after compute(2) would give two components.
        super().__init__(compute_with_cache=False)
        self.add_state(
            "scatter", torch.zeros(embed_dim + 2, embed_dim, dtype=torch.float64), dist_reduce_fx=_of_processes
        )

    def update(self, tokens: Tensor) -> None:
        """Add tokens [..., D]."""
        tokens = tokens.reshape(-1, self.scatter.size(1))
        if not len(tokens):
            return
        mean, centred = _centred(tokens)
        count = torch.full_like(mean, len(tokens))
        batch = torch.cat([count[None], mean[None], centred.T @ centred])
        self.scatter = merged_scatter(self.scatter, batch)

    def compute(self, n: int = 2) -> PrincipalComponents:
        """The ``n`` leading components of all tokens.

        Raises:
            ValueError: Nothing was seen, tokens with NaN or infinite numbers, or ``n`` is not from 1 to D.
        """
        tokens, features = float(self.scatter[0, 0]), self.scatter.size(1)
        if not tokens:
            raise ValueError(f"{type(self).__name__}: expected at least one token, got none")
        if not 1 <= n <= features:
            raise ValueError(f"expected 1 to {features} components, got {n}")
        scatter = self.scatter[2:]
        if not scatter.isfinite().all():
            raise ValueError(f"{type(self).__name__}: expected tokens of finite numbers, got NaN or infinity")
        values, vectors = torch.linalg.eigh(scatter)
        variances = values.flip(0)[:n].clamp(min=0) / tokens
        total = float(scatter.trace()) / tokens
        return PrincipalComponents(self.scatter[1].clone(), vectors.T.flip(0)[:n], variances, total)


def feature_maps(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The three leading principal components of one image's patch tokens as red, green and blue.

    As Siméoni et al. 2025 (https://arxiv.org/abs/2508.10104) draw them, and figure 9 of arXiv 2602.09297: coordinates z
    along each component are brought to unit variance over the patches, and sigmoid(2 z) is the colour, so single
    outliers saturate and leave the others their contrast. A component without variance (equal patches, fewer than four
    patches or three features) is mid grey, 0.5. Signs are those of ``PrincipalComponents``.

    Args:
        tokens: Patch tokens [P, D], row by row, without prefix tokens.
        grid: Rows h and columns w of patches; P = h w.

    Returns:
        [h, w, 3] float64 within [0, 1].

    Raises:
        ValueError: The grid does not fit the number of patches, or tokens with NaN or infinite numbers.
    """
    if tokens.ndim != 2 or math.prod(grid) != len(tokens) or not len(tokens):
        raise ValueError(f"expected [P, D] with P = {grid[0]} x {grid[1]} patches, got {list(tokens.shape)}")
    _, centred = _centred(tokens)
    if not centred.isfinite().all():
        raise ValueError("feature maps: expected tokens of finite numbers, got NaN or infinity")
    # The left singular vectors are the coordinates, of unit length: no D x D matrix.
    left, values, right = torch.linalg.svd(centred, full_matrices=False)
    n = min(3, len(values))
    units = left[:, :n] * component_signs(right[:n]).T * math.sqrt(len(tokens))
    total = values.square().sum()
    varies = values[:n].square() > _ROUNDING * total
    colours = torch.full((len(tokens), 3), 0.5, dtype=torch.float64, device=tokens.device)
    colours[:, :n] = torch.where(varies, units, 0).mul(2).sigmoid()
    return colours.view(*grid, 3)


def _centred(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Mean [D] of tokens [N, D] and the tokens about it, float64; exact zeros where all are equal."""
    # About the first token before the mean, whatever the mean is rounded to.
    first = tokens[0].double()
    centred = tokens - first
    shift = centred.mean(dim=0)
    return first + shift, centred.sub_(shift)
