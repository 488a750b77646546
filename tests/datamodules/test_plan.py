"""The plan against a simulation: whatever the layout, no duplicates, full coverage, equal steps, exact resume."""

import random
from itertools import zip_longest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lapbench.datamodules.plan import Plan, Read, cut, mixed
from lapbench.errors import UserError

SHARDS = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any)


def ids(counts, reads):
    """Global sample numbers of a list of reads."""
    return [sum(counts[: read.shard]) + i for read in reads for i in range(read.first, read.last)]


def rank_batches(plan, epoch, workers, start=0):
    """Draw numbers batch by batch, as a DataLoader's round robin over ``workers`` hands them out."""
    parts = []
    for worker in range(workers):
        share = plan.share(worker, workers, start)
        first, batches = share.first, []
        for size in share.sizes:
            batches.append(list(range(first, first + size)))
            first += size
        parts.append(batches[share.skip :])
    return [batch for turn in zip_longest(*parts) for batch in turn if batch is not None]


@given(SHARDS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 7), st.integers(0, 3), st.integers(0, 2))
def test_training_draws_each_sample_at_most_once_in_equal_steps(counts, world, workers, batch_size, seed, epoch):
    needed = batch_size * world
    if needed > sum(counts):
        with pytest.raises(UserError, match=f"takes {needed} samples"):
            Plan(tuple(counts), batch_size, True, seed, 1, 0, world)
        return
    plans = [Plan(tuple(counts), batch_size, True, seed, 1, rank, world) for rank in range(world)]
    order = ids(counts, plans[0].sequence(epoch))
    assert sorted(order) == list(range(sum(counts)))
    steps = sum(counts) // needed
    drawn = []
    for plan in plans:
        batches = rank_batches(plan, epoch, workers)
        assert plan.batches == len(batches) == steps
        assert all(len(batch) == batch_size for batch in batches)
        drawn += [order[draw] for batch in batches for draw in batch]
    assert len(set(drawn)) == len(drawn) == steps * needed


@given(SHARDS, st.integers(1, 4), st.integers(1, 5), st.integers(1, 40))
def test_evaluation_sees_each_sample_once_in_equal_steps(counts, world, workers, batch_size):
    if world > sum(counts):
        with pytest.raises(UserError, match=f"{world} processes cannot share"):
            Plan(tuple(counts), batch_size, False, 0, 1, 0, world)
        return
    plans = [Plan(tuple(counts), batch_size, False, 0, 1, rank, world) for rank in range(world)]
    assert ids(counts, plans[0].sequence(0)) == list(range(sum(counts)))
    seen, steps = [], set()
    for rank, plan in enumerate(plans):
        batches = rank_batches(plan, 0, workers)
        mine = sorted(draw for batch in batches for draw in batch)
        assert mine == list(range(rank * sum(counts) // world, (rank + 1) * sum(counts) // world))
        assert len(batches) == plan.batches
        assert all(1 <= len(batch) <= batch_size for batch in batches)
        seen += mine
        steps.add(plan.batches)
    assert seen == list(range(sum(counts)))
    # Ranks whose shares differ by one sample still take the same steps, unless a step is one sample.
    assert len(steps) == 1 or batch_size == 1


@given(SHARDS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.data())
def test_resume_goes_on_with_the_next_batch(counts, world, workers, batch_size, training, data):
    if sum(counts) < batch_size * world:
        return
    rank = data.draw(st.integers(0, world - 1))
    plan = Plan(tuple(counts), batch_size, training, 1, 1, rank, world)
    start = data.draw(st.integers(0, plan.batches))
    assert rank_batches(plan, 3, workers, start) == rank_batches(plan, 3, workers)[start:]


@given(SHARDS, st.integers(0, 200), st.integers(0, 200))
def test_cut_is_a_slice_of_the_sequence(counts, first, last):
    sequence = [Read(shard, 0, count) for shard, count in enumerate(counts)]
    random.Random(first).shuffle(sequence)
    assert ids(counts, cut(sequence, first, last)) == ids(counts, sequence)[first:last]


def test_evaluation_order_without_workers_is_the_order_of_the_shards():
    plan = Plan((50, 40, 11), 8, False)
    assert [draw for batch in rank_batches(plan, 0, 1) for draw in batch] == list(range(101))
    assert [len(batch) for batch in rank_batches(plan, 0, 1)] == [8] * 12 + [5]
    assert [len(batch) for batch in rank_batches(plan, 0, 4)] == [8] * 12 + [5]


def test_epochs_differ_and_seeds_reproduce():
    plan = Plan((9,) * 20, 4, True, seed=7)
    assert plan.sequence(0) != plan.sequence(1)
    assert [read.shard for read in plan.sequence(0)] != [read.shard for read in plan.sequence(1)]
    assert plan.sequence(1) == Plan((9,) * 20, 4, True, seed=7).sequence(1)
    assert plan.sequence(1) != Plan((9,) * 20, 4, True, seed=8).sequence(1)


def test_every_sample_is_dropped_in_some_epoch_and_none_in_all():
    # 10 samples in batches of 4: two are left out of each epoch, by the random offset not always the same.
    plan = Plan((10,), 4, True)
    left_out = [set(range(10)) - set(ids((10,), plan.sequence(epoch))[:8]) for epoch in range(60)]
    assert all(len(which) == 2 for which in left_out)
    assert set.union(*left_out) == set(range(10))


def test_more_workers_than_batches():
    plan = Plan((6,), 3, True)
    assert plan.share(4, 5).sizes == ()
    assert len(rank_batches(plan, 0, 5)) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"rank": 2, "world_size": 2}, "rank must be in 0..1, got 2"),
        ({"counts": (0,)}, "the split holds 0"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(UserError, match=message):
        Plan(**{"counts": (10,), "batch_size": 2, "training": True, **settings})


def test_mixed_is_stable_across_processes_and_versions():
    assert mixed(0, 1, 2) != mixed(0, 2, 1)
    assert mixed("shards", 1) == 5506064221967005259
    assert 0 <= mixed("x") < 2**64
