"""Statistics over the seeds of a cell, in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Summary:
    """``n`` values, their mean, and their standard deviation with ddof 1, which a single value does not have."""

    n: int
    mean: float
    std: float | None


def summarize(values: Sequence[float]) -> Summary:
    """Mean and sample standard deviation: [90, 92, 94] gives 92 and 2.

    Raises:
        ValueError: no values, or a NaN or infinity among them (the caller must decide what such a run means).
    """
    if not values:
        raise ValueError("no values")
    if bad := [value for value in values if not math.isfinite(value)]:
        raise ValueError(f"{len(bad)} of {len(values)} values are not finite: {bad[0]}")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Summary(n, mean, None)
    return Summary(n, mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1)))
