"""Principal components against numpy's singular vectors; signs, batches, and what has no variance."""

import numpy as np
import pytest
import torch

from lapbench.analysis import PrincipalComponents, TokenPCA, feature_maps
from lapbench.analysis.pca import component_signs


def naive(tokens: torch.Tensor, n: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Components, variances and total of [N, D] from singular vectors; the largest entry is made positive."""
    x = tokens.double().numpy()
    x = x - x.mean(0)
    _, values, vectors = np.linalg.svd(x)
    for vector in vectors[:n]:
        vector *= np.sign(vector[np.abs(vector).argmax()])
    return vectors[:n], values[:n] ** 2 / len(x), float((x**2).sum() / len(x))


def pca(*batches: torch.Tensor, n: int = 2) -> PrincipalComponents:
    metric = TokenPCA(batches[0].size(-1))
    for batch in batches:
        metric.update(batch)
    found: PrincipalComponents = metric.compute(n)
    return found


def tokens_of(*shape: int) -> torch.Tensor:
    """Tokens whose features have different variances and are correlated."""
    generator = torch.Generator().manual_seed(sum(shape))
    turn = torch.linalg.qr(torch.randn(shape[-1], shape[-1], generator=generator)).Q
    return torch.randn(*shape, generator=generator) * torch.logspace(0, -1, shape[-1]) @ turn + 1


def assert_alike(found: PrincipalComponents, expected: PrincipalComponents) -> None:
    # Vectors move by the rounding of the tokens over the gap between eigenvalues, here above a tenth of the largest.
    assert torch.allclose(found.components, expected.components, rtol=0, atol=1e-9)
    assert torch.allclose(found.variances, expected.variances, rtol=1e-9, atol=0)
    assert found.total == pytest.approx(expected.total, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_components_are_those_of_numpy_in_any_batches(dtype: torch.dtype) -> None:
    tokens = tokens_of(12, 5, 6).to(dtype)
    components, variances, total = naive(tokens.flatten(0, 1), 2)
    found = pca(tokens)
    assert np.allclose(found.components, components, rtol=0, atol=1e-9)
    assert np.allclose(found.variances, variances, rtol=1e-9, atol=0)
    assert found.total == pytest.approx(total, rel=1e-9)
    assert found.explained == pytest.approx(list(variances / total), rel=1e-9)
    mean = tokens.double().mean((0, 1))
    assert torch.allclose(found.mean, mean, rtol=1e-12)
    projected = found.project(tokens)
    assert projected.shape == (12, 5, 2)
    assert torch.allclose(projected, (tokens.double() - mean) @ torch.from_numpy(components.T), atol=1e-9)
    assert_alike(pca(*tokens.split(5)), found)
    assert_alike(pca(*tokens.flip(0, 1).flatten(0, 1).split([1, 40, 0, 19])), found)
    assert_alike(pca(*(tokens.double() + 1000).split(5)), found)


def test_signs_do_not_flip_with_the_order_of_data() -> None:
    # The leading component is (1, -1)/sqrt(2) but for rounding: which of its two entries is the larger is chance.
    along, across = torch.linspace(-1, 1, 31), torch.tensor([[0.011, 0.011]])
    line = along[:, None] * torch.tensor([[0.1, -0.1]]) + 0.3
    tokens = torch.cat([line + across, line - across]).double()
    larger = set()
    for seed in range(20):
        order = torch.randperm(62, generator=torch.Generator().manual_seed(seed))
        (leading, _) = pca(*tokens[order].split(7)).components.tolist()
        assert leading == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-6)
        larger.add(abs(leading[0]) > abs(leading[1]))
    assert larger == {True, False}
    rows = torch.tensor([[-0.5, 0.5], [1e-9 - 1, 1], [0.2, -0.9], [0, 1], [0, 0]])
    assert component_signs(rows).flatten().tolist() == [-1, -1, -1, 1, 1]


def test_equal_tokens_and_a_single_feature() -> None:
    equal = pca(torch.tensor([0.1, 0.7, 0.3]).expand(7, 3), torch.tensor([[0.1, 0.7, 0.3]]))
    assert equal.total == 0
    assert equal.variances.tolist() == [0, 0]
    assert equal.explained is None
    assert equal.project(torch.tensor([0.1, 0.7, 0.3])).tolist() == [0, 0]
    one = pca(torch.tensor([[1.0], [2.0], [6.0]]), n=1)
    assert (one.components.tolist(), one.mean.tolist(), one.explained) == ([[1]], [3], [1])
    assert one.variances.tolist() == pytest.approx([14 / 3])


def test_numbers_of_components() -> None:
    metric = TokenPCA(4)
    metric.update(torch.ones(0, 4))
    with pytest.raises(ValueError, match="TokenPCA: expected at least one token, got none"):
        metric.compute(2)
    metric.update(tokens_of(9, 4))
    assert [metric.compute(n).components.size(0) for n in (2, 4, 1)] == [2, 4, 1]
    for n in (0, 5):
        with pytest.raises(ValueError, match=f"expected 1 to 4 components, got {n}"):
            metric.compute(n)
    metric.update(torch.full((1, 4), torch.nan))
    with pytest.raises(ValueError, match="TokenPCA: expected tokens of finite numbers"):
        metric.compute(2)


@pytest.mark.parametrize("features", [5, 40])
def test_feature_maps_are_components_of_unit_variance_as_colours(features: int) -> None:
    tokens = tokens_of(24, features)
    maps = feature_maps(tokens, (4, 6))
    components, variances, _ = naive(tokens, 3)
    x = tokens.double().numpy()
    z = (x - x.mean(0)) @ components.T / np.sqrt(variances)
    assert np.allclose(maps.reshape(24, 3), 1 / (1 + np.exp(-2 * z)), rtol=0, atol=1e-9)
    assert torch.allclose(feature_maps(tokens.double() + 1000, (4, 6)), maps, rtol=0, atol=1e-9)


def test_feature_maps_are_grey_where_nothing_varies() -> None:
    assert feature_maps(torch.full((6, 2), 0.1), (2, 3)).unique().tolist() == [0.5]
    assert feature_maps(torch.randn(1, 8), (1, 1)).tolist() == [[[0.5, 0.5, 0.5]]]
    # One direction: green and blue are rounding, and grey.
    line = feature_maps(torch.arange(6.0)[:, None] * torch.randn(1, 8) + 3, (2, 3))
    assert line[..., 0].unique().numel() == 6
    assert line[..., 1:].unique().tolist() == [0.5]
    with pytest.raises(ValueError, match=r"P = 2 x 2 patches, got \[6, 8\]"):
        feature_maps(torch.randn(6, 8), (2, 2))
    with pytest.raises(ValueError, match="feature maps: expected tokens of finite numbers"):
        feature_maps(torch.full((6, 8), torch.inf), (2, 3))
