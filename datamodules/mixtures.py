"""How many of each source's rows an epoch takes, and which: arithmetic on counts."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lapbench.datamodules.orders import permutation
from lapbench.errors import UserError


def rows_by_epochs(rows: Sequence[int], epochs: Sequence[float]) -> list[int]:
    """``round(rows * epochs)`` rows of each source.

    Raises:
        UserError: a source of which nothing is left.
    """
    taken = [round(count * times) for count, times in zip(rows, epochs, strict=True)]
    for number, count in enumerate(taken):
        if not count:
            raise UserError(f"sources[{number}]: {epochs[number]} epochs of {rows[number]} rows are no row")
    return taken


def rows_by_weights(rows: Sequence[int], weights: Sequence[float]) -> list[int]:
    """As many rows as all sources have, in proportion to the weights; the largest remainders are rounded up.

    Raises:
        UserError: a source of which nothing is left.
    """
    total = sum(rows)
    shares = [total * weight / sum(weights) for weight in weights]
    taken = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda number: taken[number] - shares[number])
    for number in by_remainder[: total - sum(taken)]:
        taken[number] += 1
    for number, count in enumerate(taken):
        if not count:
            raise UserError(f"sources[{number}]: its weight {weights[number]} of {sum(weights)} is no row of {total}")
    return taken


def chosen(rows: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """``count`` of the rows 0..rows - 1, the same for a seed, in ascending order."""
    return np.sort(permutation(rows, seed)[:count])


def repeated(rows: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """``count`` rows of 0..rows - 1: all of them as often as they go into ``count``, then a choice by ``seed``."""
    times, rest = divmod(count, rows)
    return np.concatenate([np.tile(np.arange(rows), times), chosen(rows, rest, seed)])
