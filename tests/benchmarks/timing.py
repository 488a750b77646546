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


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call, garbage collection outside."""
    gc.collect()
    start = clock()
    run()
    return clock() - start


def paired_ratio(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Median over rounds of ours / theirs, each round timing both, in alternating order.

    What runs on one thread may be timed with ``time.process_time``, which others on the machine disturb less.
    """
    for _ in range(warmup):
        ours(), theirs()
    ratios = []
    for i in range(rounds):
        if i % 2:
            b, a = seconds(theirs, clock), seconds(ours, clock)
        else:
            a, b = seconds(ours, clock), seconds(theirs, clock)
        ratios.append(a / b)
    return statistics.median(ratios)
