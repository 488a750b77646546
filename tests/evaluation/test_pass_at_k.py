"""pass@k against values of the paper's formula and against counting all choices."""

from itertools import combinations

import pytest

from lapbench.errors import UserError
from lapbench.evaluation.pass_at_k import pass_at_k


def test_known_values() -> None:
    assert pass_at_k(10, 3, 5) == pytest.approx(0.91667, abs=5e-6)
    assert pass_at_k(4, 1, 4) == 1.0
    assert pass_at_k(10, 0, 10) == 0.0


@pytest.mark.parametrize("n", range(1, 7))
def test_counts_the_choices_with_a_right_answer(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            choices = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_impossible_numbers_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(UserError, match=r"pass@k: expected"):
        pass_at_k(n, c, k)
