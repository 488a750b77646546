"""pass@k, the probability that at least one of k answers is right, estimated without bias from n of them."""

from math import comb

from lapbench.errors import UserError


def pass_at_k(n: int, c: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k) (Chen et al. 2021, https://arxiv.org/abs/2107.03374, eq. 1), in exact integers.

    Args:
        n: Answers.
        c: Those of them that are right.
        k: Answers that one may choose from.

    Raises:
        UserError: Not 1 <= k <= n, or not 0 <= c <= n.
    """
    if not 1 <= k <= n:
        raise UserError(f"pass@k: expected k from 1 to the number of answers {n}, got {k}")
    if not 0 <= c <= n:
        raise UserError(f"pass@k: expected 0 to {n} right answers, got {c}")
    return 1 - comb(n - c, k) / comb(n, k)
