"""Any shards, ranks and workers, by both readers: each token once in evaluation, no window twice, exact resume."""

from collections import Counter
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.orders import IndexOrder, StreamOrder
from lapbench.datamodules.plan import Plan
from lapbench.datamodules.text import IGNORED, TokenStream
from lapbench.datamodules.token_manifest import TokenShard
from lapbench.datamodules.token_shards import Content, Format, RandomTokens, StreamedTokens, TokenFile
from lapbench.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

READERS = st.sampled_from(["stream", "index"])
LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=5)
CONTEXTS, RANKS, WORKERS, BATCHES = st.integers(1, 12), st.integers(1, 4), st.integers(0, 2), st.integers(1, 4)


def opened(file, form):
    """A shard without a file: token i of all shards together is i, and each third one is not to be predicted."""
    first = int(file.url)
    tokens = np.arange(first, first + file.shard.tokens)
    return Content(tokens, np.zeros(1, np.int64), (tokens % 3 > 0).astype(np.uint8))


@pytest.fixture(autouse=True)
def _shards_without_files(monkeypatch):
    monkeypatch.setattr("lapbench.datamodules.token_shards.open_shard", opened)


def stream_of(reader, lengths, context, batch_size, training, rank, ranks):
    firsts = np.cumsum([0, *lengths])
    files = [
        TokenFile(str(first), TokenShard("x", length, 1, 1, 1, "0" * 64))
        for first, length in zip(firsts, lengths, strict=False)
    ]
    arguments = files, Format("uint16", 1000, True), context, not training
    source = RandomTokens(*arguments) if reader == "index" else StreamedTokens(*arguments)
    plan = Plan(source.counts(), batch_size, training, 3, 1, rank, ranks)
    return TokenStream(IndexOrder(plan, source) if reader == "index" else StreamOrder(plan, source, 4), context)


def in_turn(stream, epoch, workers, start=0):
    """Inputs and targets, batch by batch, as a loader with ``workers`` processes hands them out."""
    workers = max(1, workers)
    parts = [list(stream.batches(epoch, start, worker, workers)) for worker in range(workers)]
    return [
        tuple(part.tolist() for part in loaded.batch)
        for turn in zip_longest(*parts)
        for loaded in turn
        if loaded is not None
    ]


@settings(deadline=2000, max_examples=100)
@given(READERS, LENGTHS, CONTEXTS, RANKS, WORKERS, BATCHES, st.data())
def test_evaluation(reader, lengths, context, ranks, workers, batch_size, data):
    windows = sum(-(-(length - 1) // context) for length in lengths)
    firsts = np.cumsum([0, *lengths])
    expected = Counter(token for token in range(sum(lengths)) if token % 3 and token not in firsts)
    if windows < ranks:
        with pytest.raises(UserError, match=f"{ranks} processes cannot share the evaluation of {windows} samples"):
            stream_of(reader, lengths, context, batch_size, False, 0, ranks)
        return
    found, rows = Counter(), 0
    for rank in range(ranks):
        stream = stream_of(reader, lengths, context, batch_size, False, rank, ranks)
        batches = in_turn(stream, 0, workers)
        for inputs, targets in batches:
            rows += len(inputs)
            for row, predicted in zip(inputs, targets, strict=True):
                assert len(row) == len(predicted) == context
                pairs = [pair for pair in zip(row, predicted, strict=True) if pair[1] != IGNORED]
                assert all(target == token + 1 for token, target in pairs)
                found.update(target for _, target in pairs)
        start = data.draw(st.integers(0, len(batches)))
        assert in_turn(stream, 0, workers, start) == batches[start:]
    assert found == expected
    assert rows == windows


@settings(deadline=2000, max_examples=100)
@given(READERS, LENGTHS, CONTEXTS, RANKS, WORKERS, BATCHES, st.integers(0, 3), st.data())
def test_training(reader, lengths, context, ranks, workers, batch_size, epoch, data):
    firsts = np.cumsum([0, *lengths])
    windows = [
        first + start
        for first, length in zip(firsts, lengths, strict=False)
        for start in range(0, length - context, context)
    ]
    steps = len(windows) // (batch_size * ranks)
    if not steps:
        with pytest.raises(UserError, match=f"the split holds {len(windows)}"):
            stream_of(reader, lengths, context, batch_size, True, 0, ranks)
        return
    seen = []
    for rank in range(ranks):
        stream = stream_of(reader, lengths, context, batch_size, True, rank, ranks)
        batches = in_turn(stream, epoch, workers)
        assert len(batches) == steps
        for inputs, targets in batches:
            assert len(inputs) == batch_size
            for row, predicted in zip(inputs, targets, strict=True):
                assert row == list(range(row[0], row[0] + context))
                assert predicted == [token + 1 if (token + 1) % 3 else IGNORED for token in row]
                seen.append(row[0])
        start = data.draw(st.integers(0, steps))
        assert in_turn(stream, epoch, workers, start) == batches[start:]
    assert len(set(seen)) == len(seen) == steps * batch_size * ranks
    assert {*seen} <= {*windows}


@settings(deadline=None, max_examples=4)
@given(READERS, LENGTHS.filter(lambda lengths: max(lengths) > 20), st.integers(1, 2), st.booleans())
def test_worker_processes(reader, lengths, workers, training):
    stream = stream_of(reader, lengths, 3, 2, training, 0, 1)
    loader = ResumableLoader(stream, num_workers=workers, persistent_workers=True)
    for epoch in range(2):
        expected = in_turn(stream, epoch if training else 0, workers)
        assert [tuple(part.tolist() for part in batch) for batch in loader] == expected
