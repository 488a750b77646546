"""Mixtures: how many rows an epoch takes of each source, and which."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapbench.datamodules.mixtures import chosen, repeated, rows_by_epochs, rows_by_weights
from lapbench.errors import UserError

COUNTS = st.lists(st.integers(1, 1000), min_size=1, max_size=5)


def test_epochs():
    assert rows_by_epochs([10, 7, 4], [1, 0.5, 2.25]) == [10, 4, 9]
    with pytest.raises(UserError, match=r"sources\[1\]: 0\.01 epochs of 7 rows are no row"):
        rows_by_epochs([10, 7], [1, 0.01])


def test_weights():
    assert rows_by_weights([10, 90], [1, 1]) == [50, 50]
    assert rows_by_weights([90, 9, 1], [3, 2, 2]) == [43, 29, 28]  # 42.86, 28.57, 28.57
    with pytest.raises(UserError, match=r"sources\[1\]: its weight 0\.001 of 1\.001 is no row of 20"):
        rows_by_weights([10, 10], [1, 0.001])


@given(COUNTS, st.data())
def test_weights_keep_the_length_and_are_within_one_row(counts, data):
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(counts), max_size=len(counts)))
    try:
        taken = rows_by_weights(counts, weights)
    except UserError:
        assert min(weights) / sum(weights) * sum(counts) < 1
        return
    assert sum(taken) == sum(counts)
    for count, weight in zip(taken, weights, strict=True):
        assert abs(count - sum(counts) * weight / sum(weights)) < 1


@given(st.integers(1, 50), st.integers(1, 200), st.integers(0, 9))
def test_rows_are_repeated_evenly(rows, count, seed):
    taken = repeated(rows, count, seed)
    times = Counter(taken.tolist())
    assert len(taken) == count
    assert set(times) <= set(range(rows))
    assert {times[row] for row in range(rows)} <= {count // rows, count // rows + 1}
    assert np.array_equal(taken, repeated(rows, count, seed))


def test_a_choice_depends_on_the_seed():
    one, other = chosen(1000, 100, 0), chosen(1000, 100, 1)
    assert len(set(one.tolist())) == len(set(other.tolist())) == 100
    assert (np.diff(one) > 0).all()
    assert set(one.tolist()) != set(other.tolist())
    assert abs(one.mean() - 500) < 100  # from all over
