"""Within-sequence similarity against all pairs, one by one; its mean over batches and processes."""

import pytest
import torch

from lapbench.analysis import WithinSequenceSimilarity, within_sequence_similarity


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def all_pairs(sequence: torch.Tensor) -> float:
    """Pair by pair; a token of zeros is at cosine 0."""
    rows, length = sequence.double(), len(sequence)
    cosines = [
        float(rows[s] @ rows[t] / (rows[s].norm() * rows[t].norm())) if rows[s].any() and rows[t].any() else 0.0
        for s in range(length)
        for t in range(length)
        if s != t
    ]
    return sum(cosines) / len(cosines)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_mean_over_all_pairs(dtype: torch.dtype) -> None:
    tokens = (torch.randn(3, 7, 5) + 0.3).to(dtype)
    expected = [all_pairs(sequence) for sequence in tokens]
    assert within_sequence_similarity(tokens).tolist() == pytest.approx(expected, rel=1e-12)
    far = tokens.double() + 1000
    assert within_sequence_similarity(far).tolist() == pytest.approx([all_pairs(s) for s in far], rel=1e-12)
    assert within_sequence_similarity(tokens.double() * 1e-30).tolist() == pytest.approx(expected, rel=1e-12)


def test_its_bounds_are_kept() -> None:
    alike = torch.full((1, 9, 3), 0.1)
    assert within_sequence_similarity(alike).item() == pytest.approx(1.0, abs=1e-12)
    assert within_sequence_similarity(alike).item() <= 1
    opposite = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    assert within_sequence_similarity(opposite).item() == -1
    # D = 1: cosines are signs.
    assert within_sequence_similarity(torch.tensor([[[2.0], [3.0], [-1.0]]])).item() == pytest.approx(-1 / 3)


def test_a_token_of_zeros_is_alike_to_none() -> None:
    tokens = torch.randn(2, 6, 4)
    tokens[0, 2] = 0
    assert within_sequence_similarity(tokens).tolist() == pytest.approx([all_pairs(s) for s in tokens], rel=1e-12)
    assert within_sequence_similarity(torch.zeros(1, 4, 3)).item() == 0


def test_one_token_has_no_pair() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        within_sequence_similarity(torch.ones(2, 1, 4))


def test_the_metric_is_the_mean_over_sequences_of_any_lengths() -> None:
    groups = [torch.randn(4, 7, 5), torch.randn(2, 3, 5), torch.randn(3, 1, 5), torch.randn(0, 7, 5)]
    values = [all_pairs(sequence) for group in groups[:2] for sequence in group]
    metric = WithinSequenceSimilarity()
    for group in groups:
        metric.update(group)
    assert metric.compute() == pytest.approx(sum(values) / 6, rel=1e-10)
    metric.reset()
    for piece in (groups[2], groups[1], *groups[0].split(1)):
        metric.update(piece)
    assert metric.compute() == pytest.approx(sum(values) / 6, rel=1e-10)


def test_the_metric_of_single_tokens_is_none_and_of_nothing_an_error() -> None:
    metric = WithinSequenceSimilarity()
    metric.update(torch.ones(0, 7, 4))
    with pytest.raises(ValueError, match="WithinSequenceSimilarity: expected at least one sequence"):
        metric.compute()
    metric.update(torch.ones(2, 1, 4))
    assert metric.compute() is None


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    metric = WithinSequenceSimilarity()
    metric.update(torch.tensor([[[bad, 1.0], [1.0, 2.0]]]))
    with pytest.raises(ValueError, match="WithinSequenceSimilarity: expected tokens of finite numbers"):
        metric.compute()
