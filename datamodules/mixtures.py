"""Mixtures of conversations: their settings, and how many rows of each source an epoch takes, and which."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lapbench.datamodules.orders import permutation
from lapbench.datamodules.sharded import check_at_least
from lapbench.errors import UserError


@dataclass(frozen=True)
class ChatSource:
    """A file of conversations in a mixture.

    Args:
        file: Conversation JSONL (see `conversations`).
        epochs: How often an epoch of the mixture takes each conversation; 0.5 takes half of them, always the same.
        limit: Use this many conversations, chosen by the file's content alone; all when null.
        weight: The source's share in the mixture, in proportion to the other sources' weights, instead of epochs.
    """

    file: str
    epochs: float = 1.0
    limit: int | None = None
    weight: float | None = None


def taken(sources: Sequence[ChatSource], rows: Sequence[int]) -> list[int]:
    """How many of the ``rows`` of each source an epoch takes, by weights if there are any.

    Raises:
        UserError: a source of which nothing is left.
    """
    weights = [source.weight for source in sources if source.weight is not None]
    return rows_by_weights(rows, weights) if weights else rows_by_epochs(rows, [source.epochs for source in sources])


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


def check_sources(sources: Sequence[ChatSource], val_sources: Sequence[ChatSource]) -> None:
    """UserError if a source's settings are out of range or exclude each other."""
    if not sources:
        raise UserError("sources must name at least one file of conversations, got none")
    for key, source in [
        *((f"sources[{i}]", source) for i, source in enumerate(sources)),
        *((f"val_sources[{i}]", source) for i, source in enumerate(val_sources)),
    ]:
        check_at_least(f"{key}: limit", source.limit, 1)
        if not 0 < source.epochs < math.inf:
            raise UserError(f"{key}: epochs must be above 0, got {source.epochs}")
        if source.weight is not None and not 0 < source.weight < math.inf:
            raise UserError(f"{key}: weight must be above 0, got {source.weight}")
        if source.weight is not None and source.epochs != 1:
            raise UserError(f"{key}: epochs and weight exclude each other, got {source.epochs} and {source.weight}")
    for i, source in enumerate(val_sources):
        if source.epochs != 1 or source.weight is not None:
            raise UserError(f"val_sources[{i}]: each conversation is evaluated once, so epochs and weight mean nothing")
    if 0 < sum(source.weight is None for source in sources) < len(sources):
        raise UserError("sources: either all have a weight or none, got some of both")
