"""Mean and standard deviation against hand-computed values and the standard library."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapbench.results.statistics import Summary, summarize


def test_hand_computed() -> None:
    assert summarize([90, 92, 94]) == Summary(3, 92.0, 2.0)


def test_one_value_has_no_deviation() -> None:
    assert summarize([0.25]) == Summary(1, 0.25, None)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2))
def test_agrees_with_exact_rational_arithmetic(values: list[float]) -> None:
    summary = summarize(values)
    assert math.isclose(summary.mean, statistics.fmean(values), rel_tol=1e-12, abs_tol=1e-9)
    assert summary.std is not None
    assert math.isclose(summary.std, statistics.stdev(values), rel_tol=1e-9, abs_tol=1e-9)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_values_are_never_averaged(bad: float) -> None:
    with pytest.raises(ValueError, match="1 of 2 values are not finite"):
        summarize([0.5, bad])
    with pytest.raises(ValueError, match="no values"):
        summarize([])
