"""Spectra of sequences against numpy, sequence by sequence; batches, processes, and what has no spread."""

import statistics
from typing import Any

import numpy as np
import pytest
import torch

from lapbench.analysis import TokenSpectrum
from lapbench.analysis.spectrum import components_holding, sequence_eigenvalues


def naive(sequences: list[torch.Tensor], size: int, alpha: float = 0.99) -> dict[str, Any]:
    """One sequence after the other: singular values of the centred tokens, squared."""
    rows, ks = [], []
    for sequence in sequences:
        x = sequence.double().numpy()
        values = np.linalg.svd(x - x.mean(0), compute_uv=False) ** 2
        k = 1
        while values[:k].sum() < alpha * values.sum():
            k += 1
        ks.append(k)
        rows.append([*values, *[0.0] * (size - len(values))])
    columns = list(zip(*rows, strict=True))
    return {
        "eigenvalues_mean": [statistics.fmean(column) for column in columns],
        "eigenvalues_std": [statistics.stdev(column) for column in columns],
        "k_alpha": statistics.fmean(ks),
        "k_alpha_std": statistics.stdev(ks),
        "sequences": len(ks),
    }


def assert_alike(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """To 1e-9; an eigenvalue that is zero but for rounding, to 1e-9 of the largest one."""
    assert found.keys() == expected.keys()
    rounding = 1e-12 * expected["eigenvalues_mean"][0]
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-9, abs=rounding), key


def spectrum(*batches: torch.Tensor, size: int, alpha: float = 0.99) -> dict[str, Any]:
    metric = TokenSpectrum(size, alpha)
    for batch in batches:
        metric.update(batch)
    found: dict[str, Any] = metric.compute()
    return found


def decaying(*shape: int) -> torch.Tensor:
    """Tokens whose features have different variances."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * torch.logspace(0, -2, shape[-1]) + 1


@pytest.mark.parametrize("shape", [(9, 6, 11), (9, 11, 6), (9, 6, 6), (4, 2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eigenvalues_and_k_alpha_are_those_of_numpy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    tokens, size = decaying(*shape).to(dtype), min(shape[1:])
    expected = naive(list(tokens), size)
    assert_alike(spectrum(tokens, size=size), expected)
    assert_alike(spectrum(*tokens.split(2), size=size), expected)
    assert_alike(spectrum(*tokens.flip(0).split([1, 3, len(tokens) - 4]), size=size), expected)
    assert_alike(spectrum(tokens.double() + 1000, size=size), expected)
    assert_alike(spectrum(tokens, size=size, alpha=0.5), naive(list(tokens), size, 0.5))


@pytest.mark.parametrize("shape", [(2, 6, 11), (2, 11, 6)])
def test_the_smaller_gram_matrix_is_taken(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    eigvalsh = torch.linalg.eigvalsh
    monkeypatch.setattr(torch.linalg, "eigvalsh", lambda gram: sizes.append(gram.shape) or eigvalsh(gram))
    sequence_eigenvalues(decaying(*shape))
    assert sizes == [(2, 6, 6)]


def test_shorter_sequences_have_zeros_for_the_rest() -> None:
    batches = [decaying(3, 8, 6), decaying(2, 4, 6), decaying(0, 8, 6), decaying(2, 1, 6)]
    sequences = [sequence for batch in batches[:2] for sequence in batch]
    found = spectrum(*batches[:3], size=8)
    assert_alike(found, naive(sequences, 8))
    assert found["eigenvalues_mean"][6:] == [0, 0]
    # Single tokens have no variance and need no component.
    with_single = spectrum(*batches, size=6)
    assert with_single["sequences"] == 7
    assert with_single["k_alpha"] == pytest.approx(found["k_alpha"] * 5 / 7)
    with pytest.raises(ValueError, match=r"at most 5 tokens or features, got \[8, 6\]"):
        spectrum(batches[0], size=5)


def test_known_spectra() -> None:
    # Tokens at plus and minus the unit vectors, scaled: scatter diag(2 s^2).
    scales = torch.tensor([3.0, 1.0, 0.5])
    tokens = torch.cat([torch.diag(scales), -torch.diag(scales)]).unsqueeze(0)
    assert sequence_eigenvalues(tokens)[0].tolist() == pytest.approx([18, 2, 0.5])
    values = torch.tensor([[18, 2, 0.5], [0, 0, 0], [5, 0, 0], [1, 1, 1], [9, 1, 0]], dtype=torch.float64)
    assert components_holding(values, 0.9).tolist() == [2, 0, 1, 3, 1]
    assert components_holding(values, 0.99).tolist() == [3, 0, 1, 3, 2]


@pytest.mark.parametrize("tokens", [torch.tensor([0.1, 0.7, 0.3]).expand(2, 7, 3), torch.randn(2, 1, 3) + 1000])
def test_equal_tokens_have_zeros_exactly(tokens: torch.Tensor) -> None:
    found = spectrum(tokens, size=3)
    zeros = [0.0, 0.0, 0.0]
    assert found["eigenvalues_mean"] == found["eigenvalues_std"] == zeros
    assert (found["k_alpha"], found["k_alpha_std"]) == (0, 0)


def test_one_feature_and_one_sequence() -> None:
    found = spectrum(torch.tensor([[[1.0], [2.0], [6.0]]]), size=1)
    assert found["eigenvalues_mean"] == pytest.approx([14])
    assert found["k_alpha"] == 1
    assert found["eigenvalues_std"] is found["k_alpha_std"] is None


def test_nothing_seen_and_settings_out_of_range() -> None:
    metric = TokenSpectrum(4)
    metric.update(torch.ones(0, 4, 4))
    with pytest.raises(ValueError, match="TokenSpectrum: expected at least one sequence, got none"):
        metric.compute()
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        metric.update(torch.ones(2, 0, 4))
    with pytest.raises(ValueError, match="expected finite numbers, got NaN or infinity"):
        metric.update(torch.full((1, 4, 4), torch.inf))
    for size, alpha in ((0, 0.5), (4, 0), (4, 1)):
        with pytest.raises(ValueError, match="size of at least 1 and alpha above 0 and below 1"):
            TokenSpectrum(size, alpha)
