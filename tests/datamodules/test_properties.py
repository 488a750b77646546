"""Any layout of shards, ranks and workers, by both readers: no duplicates, full coverage, equal steps, exact resume."""

import io
import signal
import tarfile
from collections import Counter
from contextlib import contextmanager
from functools import cache
from itertools import zip_longest

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image

from lapbench.datamodules.indexed import IndexReader
from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.orders import IndexOrder, StreamOrder
from lapbench.datamodules.plan import Plan
from lapbench.datamodules.shards import ShardFile, ShardReader
from lapbench.datamodules.streaming import ShardStream
from lapbench.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]
LARGEST = 12  # samples in a shard

READERS = st.sampled_from(["stream", "index"])
COUNTS = st.lists(st.integers(0, LARGEST), min_size=1, max_size=5).filter(any)
RANKS, WORKERS, BATCHES = st.integers(1, 4), st.integers(0, 4), st.integers(1, 5)
# Which samples exist for the plan: a seed of a random choice, or all of them.
CHOICES = st.none() | st.integers(0, 100)


@contextmanager
def limit(seconds):
    """Fails a case that hangs, whatever it hangs in."""

    def fail(*_):
        raise AssertionError(f"this case took more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    """Makes shards of the given counts; shard s, sample i has key ``s-i``. The files of a shard are made once."""
    folder = tmp_path_factory.mktemp("shards")
    stream = io.BytesIO()
    Image.new("L", (2, 2)).save(stream, "PNG")

    @cache
    def shard(place, count):
        path = folder / f"{place}-{count}.tar"
        rows = []
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for i in range(count):
                for name, data in ((f"{place}-{i}.png", stream.getvalue()), (f"{place}-{i}.cls", b"%d" % place)):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    rows += [(tar.offset, 512, len(data), place)] if name.endswith("png") else []
                    tar.addfile(info, io.BytesIO(data))
        return ShardFile(str(path), count), rows

    def make(counts):
        parts = [shard(place, count) for place, count in enumerate(counts)]
        rows = [row for _, part in parts for row in part]
        index = folder / f"{'-'.join(map(str, counts))}.npy"
        np.save(index, np.array(rows, [("start", "<u8"), ("headers", "<u4"), ("size", "<u4"), ("label", "<u4")]))
        return [file for file, _ in parts], index

    return make


def order_of(split, reader, counts, in_use, batch_size, training, repeats=1, rank=0, world_size=1):
    files, index = split(counts)
    source = IndexReader(files, index, 5, in_use) if reader == "index" else ShardReader(files, 5, in_use)
    plan = Plan(source.counts(), batch_size, training, 3, repeats, rank, world_size)
    return IndexOrder(plan, source) if reader == "index" else StreamOrder(plan, source, 4)


def keys_in_use(counts, in_use):
    keys = [f"{place}-{i}" for place, count in enumerate(counts) for i in range(count)]
    return keys if in_use is None else [key for key, used in zip(keys, in_use, strict=True) if used]


def chosen(counts, choice):
    if choice is None:
        return None
    in_use = np.random.default_rng(choice).random(sum(counts)) < 0.6
    assume(in_use.any())
    return in_use


def in_turn(order, epoch, workers, start=0):
    """Keys and repeats, batch by batch, as a loader with ``workers`` processes hands them out."""
    workers = max(1, workers)
    parts = [list(order.batches(epoch, start, worker, workers)) for worker in range(workers)]
    batches = [batch for turn in zip_longest(*parts) for batch in turn if batch is not None]
    return [[(draw.sample.key, draw.repeat) for draw in batch] for batch in batches]


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(READERS, COUNTS, CHOICES, RANKS, WORKERS, BATCHES, st.integers(1, 3), st.integers(0, 3), st.data())
def test_training(split, reader, counts, choice, ranks, workers, batch_size, repeats, epoch, data):
    with limit(20):
        in_use = chosen(counts, choice)
        keys = keys_in_use(counts, in_use)
        steps = len(keys) // (batch_size * ranks)
        arguments = (split, reader, counts, in_use, batch_size, True, repeats)
        if not steps:
            with pytest.raises(UserError, match=f"the split holds {len(keys)}"):
                order_of(*arguments, 0, ranks)
            return
        drawn = []
        for rank in range(ranks):
            order = order_of(*arguments, rank, ranks)
            batches = in_turn(order, epoch, workers)
            assert [len(batch) for batch in batches] == [batch_size] * steps
            start = data.draw(st.integers(0, steps))
            assert in_turn(order, epoch, workers, start) == batches[start:]
            drawn += [draw for batch in batches for draw in batch]
        assert len(set(drawn)) == len(drawn)
        times = Counter(key for key, _ in drawn)
        assert times.keys() <= {*keys}
        # Each sample in all its repeats, but for the one at which the epoch ends.
        draws = steps * batch_size * ranks
        whole, rest = divmod(draws, repeats)
        assert sorted(times.values(), reverse=True) == [repeats] * whole + [rest] * (rest > 0)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(READERS, COUNTS, CHOICES, RANKS, WORKERS, BATCHES, st.data())
def test_evaluation(split, reader, counts, choice, ranks, workers, batch_size, data):
    with limit(20):
        in_use = chosen(counts, choice)
        keys = keys_in_use(counts, in_use)
        arguments = (split, reader, counts, in_use, batch_size, False, 1)
        if len(keys) < ranks:
            with pytest.raises(UserError, match=f"{ranks} processes cannot share"):
                order_of(*arguments, 0, ranks)
            return
        steps = set()
        for rank in range(ranks):
            order = order_of(*arguments, rank, ranks)
            batches = in_turn(order, 0, workers)
            mine = keys[rank * len(keys) // ranks : (rank + 1) * len(keys) // ranks]
            seen = [key for batch in batches for key, _ in batch]
            assert sorted(seen) == sorted(mine)
            if reader == "index" or workers < 2:
                assert seen == mine
            assert len(batches) == order.plan.batches
            steps.add(len(batches))
            start = data.draw(st.integers(0, len(batches)))
            assert in_turn(order, 0, workers, start) == batches[start:]
        assert len(steps) == 1 or batch_size == 1


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(COUNTS, st.integers(1, 12), WORKERS, WORKERS, st.integers(1, 3), st.data())
def test_the_index_has_one_order_for_all_layouts(split, counts, batch_size, workers, others, repeats, data):
    with limit(20):
        assume(sum(counts) >= batch_size)
        alone = in_turn(order_of(split, "index", counts, None, batch_size, True, repeats), 1, workers)
        ranks = data.draw(st.sampled_from([n for n in range(1, 13) if batch_size % n == 0]))
        parts = [
            in_turn(order_of(split, "index", counts, None, batch_size // ranks, True, repeats, rank, ranks), 1, others)
            for rank in range(ranks)
        ]
        assert [[draw for part in turn for draw in part] for turn in zip(*parts, strict=True)] == alone


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(READERS, COUNTS, st.integers(1, 2), st.integers(1, 3), BATCHES, st.booleans(), st.booleans(), st.data())
def test_worker_processes(split, reader, counts, ranks, workers, batch_size, training, persistent, data):
    assume(sum(counts) >= batch_size * ranks)
    with limit(60):
        rank = data.draw(st.integers(0, ranks - 1))
        order = order_of(split, reader, counts, None, batch_size, training, 1, rank, ranks)
        stream = ShardStream(order, lambda _image: torch.zeros(1), channels=1, with_keys=True)
        loader = ResumableLoader(stream, num_workers=workers, persistent_workers=persistent)
        for epoch in range(2):
            expected = in_turn(order, epoch if training else 0, workers)
            assert [keys for _, _, keys in loader] == [[key for key, _ in batch] for batch in expected]
        assert len(loader) == len(expected)
