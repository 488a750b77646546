"""Fair timing on a shared machine: alternate what is compared, and take the median of the paired ratios."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One measured line of `make bench`."""

    name: str
    value: float
    bound: float
    at_most: bool
    detail: str

    @property
    def holds(self) -> bool:
        """Whether the value keeps its bound."""
        return self.value <= self.bound if self.at_most else self.value >= self.bound


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call, garbage collection outside."""
    gc.collect()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def paired_ratio(ours: Callable[[], object], theirs: Callable[[], object], rounds: int, warmup: int = 1) -> float:
    """Median over rounds of ours / theirs, each round timing both, in alternating order."""
    for _ in range(warmup):
        ours(), theirs()
    ratios = []
    for i in range(rounds):
        if i % 2:
            b, a = seconds(theirs), seconds(ours)
        else:
            a, b = seconds(ours), seconds(theirs)
        ratios.append(a / b)
    return statistics.median(ratios)
