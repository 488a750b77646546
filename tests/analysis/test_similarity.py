"""Within-sequence similarity against all pairs, one by one."""

import pytest
import torch

from lapbench.analysis import within_sequence_similarity


def test_it_is_the_mean_over_all_pairs() -> None:
    tokens = torch.randn(3, 7, 5)
    expected = []
    for sequence in tokens.double():
        pairs = [
            float(sequence[s] @ sequence[t] / (sequence[s].norm() * sequence[t].norm()))
            for s in range(7)
            for t in range(7)
            if s != t
        ]
        expected.append(sum(pairs) / len(pairs))
    assert within_sequence_similarity(tokens).tolist() == pytest.approx(expected, rel=1e-12)


def test_its_bounds_are_kept() -> None:
    alike = torch.full((1, 9, 3), 0.1)
    assert within_sequence_similarity(alike).item() == pytest.approx(1.0, abs=1e-12)
    assert within_sequence_similarity(alike).item() <= 1
    opposite = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    assert within_sequence_similarity(opposite).item() == -1


def test_one_token_has_no_pair() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        within_sequence_similarity(torch.ones(2, 1, 4))
