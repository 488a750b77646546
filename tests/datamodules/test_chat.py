"""Chat: rows and windows against naive ones, mixtures, held-out conversations, the cache, resuming, refusals."""

import json
from collections import Counter
from itertools import zip_longest
from types import SimpleNamespace

import jsonargparse
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lapbench.datamodules import Chat, ChatSource
from lapbench.datamodules.chat_rows import PackedChats, SingleChats
from lapbench.datamodules.conversations import render
from lapbench.datamodules.convert import chat_shards
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.orders import IndexOrder, permutation
from lapbench.datamodules.plan import Plan, mixed
from lapbench.datamodules.text import IGNORED, TokenStream
from lapbench.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]


RANKS, WORKERS, BATCHES, CONTEXTS = st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(5, 80)


def conversation(name, user=8, assistant=8, turns=1):
    """Messages whose texts are as long as that, in bytes, which are tokens here."""
    return [
        {"role": role, "content": f"{name}{turn}".ljust(length, ".")}
        for turn in range(turns)
        for role, length in (("user", user), ("assistant", assistant))
    ]


def write(path, conversations):
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer of bytes, and three files: 40 conversations of 8 to 47 bytes a turn, 10 of two turns, 5 long ones."""
    folder = tmp_path_factory.mktemp("chat")
    train_tokenizer([], 265, folder / "tokenizer.json")
    write(folder / "a.jsonl", [conversation(f"a{i}-", user=8, assistant=8 + i) for i in range(40)])
    write(folder / "b.jsonl", [conversation(f"b{i}-", turns=2) for i in range(10)])
    write(folder / "long.jsonl", [conversation(f"c{i}-", user=20 * (i + 1), assistant=30) for i in range(5)])
    return folder


@pytest.fixture
def chat(folder):
    """Makes a data module that is ready: ``chat(["a", "b"], context=64)``, sources by name or as ChatSource."""

    def make(sources=("a",), stage="fit", **settings):
        sources = [
            ChatSource(str(folder / f"{source}.jsonl")) if isinstance(source, str) else source for source in sources
        ]
        settings = {"context": 128, "batch_size": 4, "seed": 0} | settings
        data = Chat(sources, str(folder / "tokenizer.json"), str(folder / "data"), **settings)
        data.prepare_data()
        data.setup(stage)
        return data

    def source(name, **settings):
        return ChatSource(str(folder / f"{name}.jsonl"), **settings)

    make.source = source
    return make


@pytest.fixture
def all_rows(chat):
    """Shards, their format and all conversations of the three files."""
    data = chat(["a", "b", "long"], loss_on="all", stage="predict")
    return data._files, data._format(), data._rows()


def naive(folder, name, tokenizer):
    """The rendered conversations of a file."""
    lines = (folder / f"{name}.jsonl").read_text().splitlines()
    return render([json.loads(line)["messages"] for line in lines], tokenizer)


def names(data, loader):
    """The names of the conversations, in order: what each row's first user message begins with."""
    start, end = data.tokenizer.special["<|user_start|>"], data.tokenizer.encode("-")[0]
    found = []
    for inputs, _ in loader:
        for row in inputs.tolist():
            row = row[row.index(start) + 1 :]
            found.append(data.tokenizer.decode(row[: row.index(end)]))
    return found


def pairs(loader):
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in loader]


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_rows_are_padded_conversations(chat, folder, loss_on):
    data = chat(["a", "b"], batch_size=5, loss_on=loss_on)
    expected = {}
    for tokens, loss, _ in naive(folder, "a", data.tokenizer) + naive(folder, "b", data.tokenizer):
        targets = [t if flag or loss_on == "all" else IGNORED for t, flag in zip(tokens[1:], loss[1:], strict=True)]
        expected[tuple(tokens[:-1])] = targets
    batches = list(data.train_dataloader())
    assert len(batches) == len(data.train_dataloader()) == 10
    for inputs, targets in batches:
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape
        longest = 0
        for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
            length = max(i for i, token in enumerate(row) if token) + 1
            longest = max(longest, length)
            assert wanted[:length] == expected.pop(tuple(row[:length]))
            assert set(wanted[length:]) <= {IGNORED}
        assert inputs.shape[1] == -(-longest // 64) * 64
    assert not expected
    assert {inputs.shape[1] for inputs, _ in batches} <= {64, 128}


def test_the_first_target_of_the_assistant_is_predicted_from_its_start_token(chat):
    data = chat(["b"])
    inputs, targets = next(iter(data.train_dataloader()))
    start, end = (data.tokenizer.special[f"<|assistant_{word}|>"] for word in ("start", "end"))
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        for place in [i for i, token in enumerate(row) if token == start]:
            answer = wanted[place : place + 9]
            assert data.tokenizer.decode(answer[:8]).startswith("b")
            assert answer[8] == end
        assert sum(target != IGNORED for target in wanted) == 18


@pytest.mark.parametrize("loss_on", ["assistant", "all"])
def test_packed_windows_against_a_naive_concatenation(chat, folder, loss_on):
    data = chat(["a", "b"], packing=True, context=32, batch_size=2, loss_on=loss_on, seed=5)
    rendered = naive(folder, "a", data.tokenizer) + naive(folder, "b", data.tokenizer)
    rendered = [rendered[i] for i in permutation(50, mixed("packing", 5))]
    tokens = [token for row in rendered for token in row.tokens]
    loss = [flag or loss_on == "all" for row in rendered for flag in row.loss]
    windows = [
        (
            tokens[i : i + 32],
            [t if flag else IGNORED for t, flag in zip(tokens[i + 1 : i + 33], loss[i + 1 : i + 33], strict=True)],
        )
        for i in range(0, len(tokens) - 32, 32)
    ]
    got = [
        (row, wanted)
        for inputs, targets in pairs(data.train_dataloader())
        for row, wanted in zip(inputs, targets, strict=True)
    ]
    assert len(got) == len(windows) // 2 * 2
    assert Counter(map(str, got)) <= Counter(map(str, windows))
    report = data.report()
    assert report["tokens"] == len(tokens)
    assert report["tokens_left_out"] == len(tokens) - (len(windows) * 32 + 1)
    assert report["samples"] == len(windows)
    assert report["samples_left_out"] == len(windows) % 2


def test_packed_evaluation_predicts_each_token_once(chat, folder):
    data = chat(["a"], packing=True, context=50, loss_on="all", val_sources=[chat.source("b"), chat.source("long")])
    expected = [t for name in ("b", "long") for row in naive(folder, name, data.tokenizer) for t in row.tokens]
    batches = list(data.val_dataloader())
    targets = [t for _, targets in batches for row in targets.tolist() for t in row if t != IGNORED]
    assert targets == expected[1:]
    assert pairs(data.test_dataloader()) == pairs(batches)


def test_what_does_not_fit_the_context(chat, capsys):
    # A user message of 20 (i + 1) bytes, 4 special tokens before the answer, 30 bytes of answer, 1 token after it.
    data = chat(["long", "b"], context=64, batch_size=2)
    report = data.report()
    assert report["conversations"] == 5 - 2 + 10  # of 80 and 100 bytes the answer begins after token 65
    assert report["dropped"] == 2
    assert report["cut"] == 2  # 40 + 35 and 60 + 35 tokens
    assert report["tokens_left_out"] == 75 + 95 - 2 * 65
    assert report["samples"] == 13
    assert report["samples_left_out"] == 1
    kept = names(data, data.train_dataloader())
    assert not {"c3", "c4"} & set(kept)
    for _, targets in data.train_dataloader():
        assert ((targets != IGNORED).sum(1) > 0).all()
    said = (
        "13 training conversations, 2 of them cut at the context of 64 tokens; 2 others dropped, as they have nothing"
    )
    assert capsys.readouterr().err == f"{said} to predict before it\n"
    assert chat(["long"], context=64, loss_on="all", batch_size=1).report()["dropped"] == 0
    with pytest.raises(UserError, match=r"sources\[0\]: no conversation of .*long.jsonl has anything to predict"):
        chat(["long"], context=10)


def test_epochs_and_limits(chat):
    sources = [chat.source("a", epochs=0.5), chat.source("b", epochs=2.5), chat.source("long", limit=3)]
    data = chat(sources, batch_size=1)
    times = Counter(names(data, data.train_dataloader()))
    assert Counter(name[0] for name in times.elements()) == {"a": 20, "b": 25, "c": 3}
    assert {times[name] for name in times if name[0] == "a"} == {1}
    assert Counter(times[f"b{i}0"[:-1]] for i in range(10)) == {2: 5, 3: 5}
    # The choice depends on the file alone: neither on the seed nor on the place among the sources.
    again = chat(sources[::-1], batch_size=1, seed=7)
    loader = again.train_dataloader()
    first = names(again, loader)
    assert Counter(first) == times
    assert Counter(names(again, loader)) == times  # the next epoch
    assert names(again, again.train_dataloader()) == first
    assert first != names(data, data.train_dataloader())


def test_weights(chat):
    data = chat([chat.source("a", weight=1), chat.source("b", weight=3)], batch_size=1)
    times = Counter(names(data, data.train_dataloader()))
    assert Counter(name[0] for name in times.elements()) == {"a": 13, "b": 37}  # of 50: 12.5 and 37.5


def test_held_out_conversations(chat):
    data = chat(["a", "b"], val_fraction=0.2, batch_size=1)
    val, train = names(data, data.val_dataloader()), names(data, data.train_dataloader())
    assert Counter(name[0] for name in val) == {"a": 8, "b": 2}
    assert len(val) == len(set(val))
    assert len(train) == 40
    assert not set(train) & set(val)
    assert names(data, data.test_dataloader()) == val
    other = chat(["b", "a"], val_fraction=0.2, batch_size=1, seed=3)
    assert set(names(other, other.val_dataloader())) == set(val)
    another = chat(["a", "b"], val_fraction=0.2, val_seed=1)
    assert set(names(another, another.val_dataloader())) != set(val)


def test_without_validation(chat):
    data = chat(["a"], stage="fit")
    assert data.val_dataloader() == []
    with pytest.raises(UserError, match="Chat has no conversations to test on: set val_fraction or val_sources"):
        data.test_dataloader()
    with pytest.raises(UserError, match="Chat has no conversations to validate on"):
        chat(["a"], stage="validate")


def test_evaluation_copy(chat):
    data = chat(["a"], val_fraction=0.25)
    copy = data.for_evaluation(batch_size=3, seed=9)
    assert next(iter(copy.train_dataloader()))[0].shape[0] == 3
    mine, other = names(data, data.train_dataloader()), names(copy, copy.train_dataloader())
    assert len(set(other)) == len(other) == 30
    assert set(mine) < set(other)  # 28 of them are full batches of 4
    assert not set(names(copy, copy.train_dataloader())) & set(names(data, data.val_dataloader()))
    assert data.batch_size == 4


def test_files_are_rendered_once(folder, tmp_path, monkeypatch):
    source = write(tmp_path / "a b.jsonl", [conversation("x-")] * 8)
    calls = []
    monkeypatch.setattr(chat_shards, "render", lambda *arguments: calls.append(1) or render(*arguments))

    def prepared():
        data = Chat([ChatSource(source)], str(folder / "tokenizer.json"), str(tmp_path / "data"), batch_size=2)
        data.prepare_data()
        data.setup()
        return data

    prepared()
    prepared()
    assert len(calls) == 1
    assert [path.name[:4] for path in (tmp_path / "data").iterdir()] == ["a_b-"]
    write(tmp_path / "a b.jsonl", [conversation("y-")] * 6)
    data = prepared()
    assert len(calls) == 2
    assert set(names(data, data.train_dataloader())) == {"y"}
    assert len(list((tmp_path / "data").iterdir())) == 2


def test_an_interrupted_rendering_goes_on(folder, tmp_path, monkeypatch):
    tokenizer = Chat([ChatSource("x")], str(folder / "tokenizer.json"))._tokenizer_file
    tokenizer = chat_shards.Tokenizer.load(tokenizer)
    source = tmp_path / "many.jsonl"
    write(source, [conversation(f"{i}-") for i in range(3000)])
    sha256 = chat_shards.source_sha256(source)
    whole = chat_shards.render_file(source, sha256, tokenizer, tmp_path / "whole", shard_tokens=10_000)
    rendered = []

    def stopping(conversations, tokenizer):
        rendered.append(len(conversations))
        if len(rendered) == 2:
            raise KeyboardInterrupt
        return render(conversations, tokenizer)

    monkeypatch.setattr(chat_shards, "render", stopping)
    with pytest.raises(KeyboardInterrupt):
        chat_shards.render_file(source, sha256, tokenizer, tmp_path / "cut", shard_tokens=10_000)
    assert chat_shards.render_file(source, sha256, tokenizer, tmp_path / "cut", shard_tokens=10_000) == whole
    assert rendered[:2] == [1000, 1000]
    assert sum(rendered[2:]) < 3000  # those of the finished shards were not encoded again
    files = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir() if path.name != ".lock"}
    assert {name: (tmp_path / "cut" / name).read_bytes() for name in files} == files


def test_two_processes_at_once(folder, tmp_path, start_forked):
    source = tmp_path / "many.jsonl"
    write(source, [conversation(f"{i}-") for i in range(2000)])
    code = (
        "from pathlib import Path; from lapbench.datamodules.convert.chat_shards import *; "
        f"t = Tokenizer.load(Path({str(folder / 'tokenizer.json')!r})); s = Path({str(source)!r}); "
        f"print(render_file(s, source_sha256(s), t, Path({str(tmp_path / 'out')!r}), shard_tokens=5000))"
    )
    processes = [start_forked("-c", code) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0] == outputs[1]
    assert "documents=" in outputs[0][0]


@pytest.mark.parametrize("packing", [False, True])
def test_worker_processes_change_nothing(chat, packing):
    expected = pairs(chat(["a", "b"], packing=packing, context=64).train_dataloader())
    assert pairs(chat(["a", "b"], packing=packing, context=64, num_workers=2).train_dataloader()) == expected


@pytest.mark.parametrize("packing", [False, True])
def test_going_on_where_a_checkpoint_was_made(chat, packing):
    def at(done):
        """A data module in a trainer that has processed that many batches."""
        data = chat(["a", "b"], packing=packing, context=64)
        progress = SimpleNamespace(total=SimpleNamespace(processed=done))
        loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress))
        data.trainer = SimpleNamespace(fit_loop=loop, limit_train_batches=1.0)
        return data

    whole = chat(["a", "b"], packing=packing, context=64).train_dataloader()
    first, second = pairs(whole), pairs(whole)
    assert first != second
    state = at(0)
    state.train_dataloader()
    for done in (0, 5, len(first) - 1, len(first), len(first) + 3):
        data = at(done)
        data.load_state_dict(state.state_dict())
        epoch, batch = divmod(done, len(first))
        assert pairs(data.train_dataloader()) == (first, second)[epoch][batch:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 32}, "context was 64 and is 32"),
        ({"packing": True}, "packing was False and is True"),
        ({"loss_on": "all"}, "loss_on was assistant and is all"),
        ({"batch_size": 3}, "global_batch_size was 4 and is 3"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"sources": ["a"]}, "mixture was "),
        ({"val_fraction": 0.1}, "mixture was "),
    ],
)
def test_another_layout_is_refused_by_name(chat, change, message):
    settings = {"sources": ["a", "b"], "context": 64}
    data = chat(**settings)
    data.train_dataloader()
    other = chat(**settings | change)
    other.load_state_dict(data.state_dict())
    with pytest.raises(UserError, match="cannot resume the data stream") as error:
        other.train_dataloader()
    assert message in str(error.value)
    assert "--allow_layout_change" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": []}, "sources must name at least one file of conversations, got none"),
        ({"loss_on": "user"}, "loss_on must be assistant or all, got 'user'"),
        ({"context": 0}, "context must be at least 1, got 0"),
        ({"val_fraction": 1}, "val_fraction must be at least 0 and below 1, got 1"),
        ({"val_fraction": 0.1, "val_sources": [ChatSource("v")]}, "val_fraction and val_sources exclude each other"),
        ({"val_sources": [ChatSource("v", epochs=2)]}, "val_sources[0]: each conversation is evaluated once"),
        ({"sources": [ChatSource("a", epochs=0)]}, "sources[0]: epochs must be above 0, got 0"),
        ({"sources": [ChatSource("a", epochs=float("nan"))]}, "sources[0]: epochs must be above 0, got nan"),
        ({"sources": [ChatSource("a"), ChatSource("a", limit=0)]}, "sources[1]: limit must be at least 1, got 0"),
        ({"sources": [ChatSource("a", weight=-1)]}, "sources[0]: weight must be above 0, got -1"),
        ({"sources": [ChatSource("a", epochs=2, weight=1)]}, "sources[0]: epochs and weight exclude each other"),
        ({"sources": [ChatSource("a", weight=1), ChatSource("b")]}, "sources: either all have a weight or none"),
    ],
)
def test_settings_that_make_no_sense(settings, message):
    with pytest.raises(UserError) as error:
        Chat(**{"sources": [ChatSource("a")], "tokenizer": "t"} | settings)
    assert message in str(error.value)


def test_mistakes_in_the_files(chat, folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    (tmp_path / "empty.jsonl").write_text("")
    for source, message in (
        (ChatSource(str(tmp_path / "bad.jsonl")), "bad.jsonl, line 1: expected at least one assistant turn, got none"),
        (ChatSource(str(tmp_path / "empty.jsonl")), "empty.jsonl: no documents"),
        (ChatSource(str(tmp_path / "no.jsonl")), "cannot read the conversations"),
        (chat.source("b", limit=11), "sources[0]: limit 11 is above the 10 conversations of"),
        (chat.source("b", epochs=0.01), "sources[0]: 0.01 epochs of 10 rows are no row"),
    ):
        with pytest.raises(UserError) as error:
            chat([source])
        assert message in str(error.value)
    with pytest.raises(UserError, match=r"val_sources\[0\] has the same conversations as sources\[1\]: .*b\.jsonl"):
        chat(["a", "b"], val_sources=[chat.source("b")])
    with pytest.raises(UserError, match=r"val_fraction 0\.01 of 10 conversations of sources\[0\] .* holds out 0"):
        chat(["b"], val_fraction=0.01)
    with pytest.raises(UserError, match=r"one training step takes 64 samples .*in Chat, a sample is a conv"):
        chat(["a"], batch_size=64).train_dataloader()
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        Chat([ChatSource(str(folder / "a.jsonl"))], str(tmp_path / "none.json")).prepare_data()


def test_damaged_shards(chat, folder, tmp_path):
    source = ChatSource(write(tmp_path / "d.jsonl", [conversation("d-")] * 8))
    data = chat([source])
    [shard] = (folder / "data").glob("d-*/*.tar")
    content = bytearray(shard.read_bytes())
    shard.write_bytes(content[:-512])
    with pytest.raises(UserError, match="bytes in the manifest"):
        chat([source])
    content[700:702] = b"\xff" * 2  # token 30: headers are 512 + 128 bytes, conversations 21 tokens
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"conversation at token 21: expected tokens in 0\.\.264, got 65535"):
        list(data.train_dataloader())


def test_settings_from_yaml(folder):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Chat, "data")
    config = parser.parse_string(
        f"""
data:
  class_path: lapbench.datamodules.Chat
  init_args:
    sources:
    - {{file: {folder}/a.jsonl, epochs: 2}}
    - {{file: {folder}/b.jsonl, limit: 5}}
    tokenizer: {folder}/tokenizer.json
    data_dir: {folder}/data
    packing: true
    context: 64
    val_fraction: 0.2
"""
    )
    data = parser.instantiate(config).data
    data.prepare_data()
    data.setup("fit")
    assert data.sources[1] == ChatSource(f"{folder}/b.jsonl", limit=5)
    assert data.vocab_size == len(data.token_bytes) == 265
    assert data.report()["conversations"] == 2 * 32 + 4


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([PackedChats, SingleChats]), st.booleans(), RANKS, WORKERS, BATCHES, CONTEXTS, st.data())
def test_any_layout(all_rows, kind, training, ranks, workers, batch_size, context, data):
    files, form, rows = all_rows
    drawn, predicted = [], 0
    for rank in range(ranks):
        reader = kind(files, form, context, rows, masked=False, whole=not training)
        (samples,) = reader.counts()
        try:
            order = IndexOrder(Plan((samples,), batch_size, training, 3, 1, rank, ranks), reader)
        except UserError:
            assert samples < batch_size * ranks
            return
        stream = TokenStream(order, context)

        def in_turn(start, stream=stream):
            parts = [list(stream.batches(1, start, worker, workers)) for worker in range(workers)]
            return [batch for turn in zip_longest(*parts) for batch in turn if batch is not None]

        batches = in_turn(0)
        assert len(batches) == order.plan.batches
        start = data.draw(st.integers(0, len(batches)))
        for one, other in zip(in_turn(start), batches[start:], strict=True):
            assert all(map(torch.equal, one.batch, other.batch))
        drawn += [tuple(row) for batch in batches for row in batch.batch[0].tolist()]
        predicted += sum(int((batch.batch[1] != IGNORED).sum()) for batch in batches)
    samples_of_all = [tuple(stream._pair(reader.read(place))[0].tolist()) for place in range(samples)]
    if training:
        assert len(drawn) == samples // (batch_size * ranks) * batch_size * ranks
        assert not Counter(drawn) - Counter(samples_of_all)
    else:
        assert drawn == samples_of_all
        tokens = int(rows.length.sum()) - 1, int(np.minimum(rows.length - 1, context).sum())
        assert predicted == tokens[kind is SingleChats]
