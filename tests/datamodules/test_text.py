"""Text data modules: each token predicted once, exact resume, what is dropped, and data that do not fit."""

import os
import shutil
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from lapbench.datamodules import FineWebEdu, PyDocs, TextShards
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.datamodules.token_shards import Format, TokenFile, open_shard
from lapbench.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
]
both = pytest.mark.parametrize("reader", ["index", "stream"])

TRAIN = [[30, 11], [1, 1, 20], [7]]  # 41, 22 and 7 tokens
VAL = [[9, 8], [3], [2, 1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, write_tokens):
    path = tmp_path_factory.mktemp("numbers")
    write_tokens(path, train=TRAIN, val=VAL)
    return path


def data_of(folder, **settings):
    data = TextShards(str(folder), **{"context": 5, "batch_size": 3, "seed": 1, "pin_memory": False, **settings})
    data.setup()
    return data


def arrays(folder, split):
    """Tokens and loss flags of each shard."""
    manifest = TokenManifest.load(folder)
    files = [TokenFile(str(folder / shard.file), shard) for shard in manifest.split(split)]
    return [(content.tokens.tolist(), content.loss) for content in (open_shard(f, Format.of(manifest)) for f in files)]


def full_windows(folder, context):
    """Inputs and targets of every window that training may use, as the definition has it."""
    return sorted(
        (tokens[start : start + context], tokens[start + 1 : start + context + 1])
        for tokens, _ in arrays(folder, "train")
        for start in range(0, len(tokens) - context, context)
    )


def rows(batches):
    return [(i.tolist(), t.tolist()) for inputs, targets in batches for i, t in zip(inputs, targets, strict=True)]


@both
@pytest.mark.parametrize("workers", [0, 2])
def test_training_takes_each_full_window_at_most_once(folder, reader, workers):
    loader = data_of(folder, reader=reader, num_workers=workers).train_dataloader()
    windows = full_windows(folder, 5)
    assert len(windows) == 8 + 4 + 1
    epochs = []
    for _ in range(3):
        batches = list(loader)
        assert len(batches) == len(loader) == 4
        for inputs, targets in batches:
            assert inputs.shape == targets.shape == (3, 5)
            assert inputs.dtype == targets.dtype == torch.int64
        epochs.append(rows(batches))
        left = list(windows)
        for row in epochs[-1]:
            left.remove(row)
        assert len(left) == 1
    assert epochs[0] != epochs[1] != epochs[2]


@both
@pytest.mark.parametrize("eval_batch_size", [1, 2, 100])
def test_evaluation_predicts_each_token_once_in_order(folder, reader, eval_batch_size):
    data = data_of(folder, reader=reader, eval_batch_size=eval_batch_size)
    found = rows(data.val_dataloader())
    assert rows(data.test_dataloader()) == found
    targets = [token for _, row in found for token in row if token != -100]
    assert targets == [token for tokens, _ in arrays(folder, "val") for token in tokens[1:]]
    pairs = [pair for row in found for pair in zip(*row, strict=True)]
    expected = [pair for tokens, _ in arrays(folder, "val") for pair in pairwise(tokens)]
    assert [pair for pair in pairs if pair[1] != -100] == expected
    assert {pair for pair in pairs if pair[1] == -100} == {(0, -100)}
    assert all(any(token != -100 for token in row) for _, row in found)


@both
def test_tokens_that_are_not_to_be_predicted(tmp_path, write_tokens, reader):
    write_tokens(tmp_path, loss=True, train=TRAIN, val=VAL)
    data = data_of(tmp_path, reader=reader)
    found = rows(data.val_dataloader())
    got = [target for _, row in found for target in row]
    expected = []
    for tokens, loss in arrays(tmp_path, "val"):
        targets = [token if flag else -100 for token, flag in zip(tokens[1:], loss[1:], strict=True)]
        expected += targets + [-100] * (-len(targets) % 5)
    assert got == expected
    assert got.count(-100) > len(got) // 2
    inputs = [token for row, _ in found for token in row]
    assert [i for i in inputs if i] == [i for tokens, _ in arrays(tmp_path, "val") for i in tokens[:-1] if i]


def test_a_context_longer_than_every_validation_shard(folder):
    ((inputs, targets),) = data_of(folder, context=30, eval_batch_size=9).val_dataloader()
    assert inputs.shape == (3, 30)
    assert (targets != -100).sum(1).tolist() == [16, 2, 2]


def test_report(folder):
    report = data_of(folder).report()
    assert report == {"tokens": 70, "predicted": 60, "dropped_tails": 70 - 13 * 5, "dropped_windows": 5}
    for context in (1, 2, 5, 20):
        report = data_of(folder, context=context, batch_size=2).report()
        assert report["tokens"] == 70 == sum(report.values()) - report["tokens"]


def test_what_a_task_needs_to_know(folder, tokenizer):
    data = data_of(folder)
    assert data.vocab_size == 300
    assert (data.tokenizer.sha256, data.tokenizer.path) == (tokenizer.sha256, folder / "tokenizer.json")
    assert data.token_bytes.tolist() == tokenizer.token_bytes().tolist()


def test_a_copy_for_another_trainer(folder):
    data = data_of(folder)
    data.train_dataloader()
    other = data.for_evaluation(batch_size=4, seed=7)
    assert [len(inputs) for inputs, _ in other.train_dataloader()] == [4, 4, 4]
    assert (data.batch_size, data.state_dict()["seed"], other.state_dict()["seed"]) == (3, 1, 7)


@pytest.mark.parametrize("scheme", ["{}", "file://{}", "{}/"])
def test_shards_in_another_folder(folder, tmp_path, scheme):
    (tmp_path / "shards").mkdir()
    (tmp_path / "data").mkdir()
    for path in folder.iterdir():
        shutil.copy(path, tmp_path / ("shards" if path.suffix == ".tar" else "data"))
    for reader in ("index", "stream"):
        data = data_of(tmp_path / "data", reader=reader, shards_url=scheme.format(tmp_path / "shards"))
        assert rows(data.val_dataloader()) == rows(data_of(folder).val_dataloader())


def test_shards_from_https(folder, monkeypatch):
    from lapbench.datamodules import token_shards

    monkeypatch.setattr(token_shards, "gopen_curl", lambda url: (folder / url.rpartition("/")[2]).open("rb"))
    data = data_of(folder, reader="stream", shards_url="https://host/numbers")
    assert rows(data.val_dataloader()) == rows(data_of(folder).val_dataloader())
    assert rows(data.train_dataloader()) == rows(data_of(folder, reader="stream").train_dataloader())


class Recorder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []
        self.validated = 0

    def training_step(self, batch, _):
        self.seen += rows([batch])
        return self.layer(batch[0].float().mean().view(1, 1)).mean() * 0

    def validation_step(self, batch, _):
        self.validated += (batch[1] != -100).sum().item()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Killed(Exception):
    pass


class KilledAfter(pl.Callback):
    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/last.ckpt")
            raise Killed


def record(tmp_path, folder, killed=0, resume=False, **settings):
    """The windows that a fit of three epochs was given, in order."""
    module = Recorder()
    trainer = pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        max_epochs=3,
        num_sanity_val_steps=0,
        callbacks=[KilledAfter(killed)] if killed else None,
    )
    data = TextShards(str(folder), **{"context": 5, "batch_size": 3, "pin_memory": False, **settings})
    with pytest.raises(Killed) if killed else nullcontext():
        trainer.fit(
            module,
            datamodule=data,
            ckpt_path=tmp_path / "last.ckpt" if resume else None,
            weights_only=True if resume else None,
        )
    if not killed and not resume:
        assert module.validated == 3 * sum(len(tokens) - 1 for tokens, _ in arrays(folder, "val"))
    return module.seen


@both
@pytest.mark.parametrize(("workers", "killed"), [(0, 1), (0, 4), (2, 7)])
def test_a_fit_resumes_with_the_next_batch(tmp_path, folder, reader, workers, killed):
    settings = {"reader": reader, "num_workers": workers}
    whole = record(tmp_path, folder, **settings)
    assert len(whole) == 3 * 4 * 3
    before = record(tmp_path, folder, killed=killed, **settings)
    assert before == whole[: 3 * killed]
    assert before + record(tmp_path, folder, resume=True, **settings) == whole


def test_a_checkpoint_of_other_data_is_refused_by_name(tmp_path, folder, write_tokens):
    record(tmp_path, folder, killed=2)
    with pytest.raises(UserError, match=r"samples was 13 and is 16, context was 5 and is 4; --allow_layout_change"):
        record(tmp_path, folder, resume=True, context=4)
    write_tokens(tmp_path / "other", train=[[30, 11], [1, 2, 19], [7]], val=VAL)
    with pytest.raises(UserError, match=r"from this checkpoint: data was [0-9a-f]{12} and is [0-9a-f]{12}; --allow"):
        record(tmp_path, tmp_path / "other", resume=True)
    # Where the shards lie and how many workers load them changes nothing.
    shutil.copytree(folder, tmp_path / "moved")
    record(tmp_path, tmp_path / "moved", resume=True, num_workers=2)


def test_settings_out_of_range():
    for name in ("context", "batch_size", "eval_batch_size", "shuffle_buffer"):
        with pytest.raises(UserError, match=f"{name} must be at least 1, got 0"):
            TextShards("x", **{name: 0})
    with pytest.raises(UserError, match="reader must be index or stream, got 'random'"):
        TextShards("x", reader="random")
    with pytest.raises(UserError, match=r"reader index needs local shards, got https://h/x: set reader to stream, or"):
        TextShards("x", shards_url="https://h/x")
    with pytest.raises(UserError, match="only paths, file: and https: URLs are read"):
        TextShards("x", reader="stream", shards_url="pipe:cat")


def test_contexts_and_batches_that_the_data_do_not_fill(folder):
    with pytest.raises(UserError, match=r"context 41 is longer than every shard of 'train' in .*: the longest has 41"):
        data_of(folder, context=41).train_dataloader()
    data_of(folder, context=40, batch_size=1).train_dataloader()
    message = r"takes 14 samples .*, the split holds 13 \(in .*, a sample is a window of 5 tokens\)"
    with pytest.raises(UserError, match=message):
        data_of(folder, batch_size=14).train_dataloader()
    with pytest.raises(UserError, match="has no split 'test'; it has train, val"):
        data_of(folder, test_split="test").test_dataloader()


def test_no_validation(folder):
    data = TextShards(str(folder), val_split=None)
    data.setup("fit")
    assert data.val_dataloader() == []
    with pytest.raises(UserError, match="TextShards has no validation split: set val_split"):
        data.setup("validate")
    with pytest.raises(RuntimeError, match="call setup"):
        TextShards(str(folder)).train_dataloader()


def test_data_that_are_not_whole(folder, tmp_path):
    def broken(change):
        shutil.rmtree(tmp_path / "data", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "data")
        change(tmp_path / "data")
        return TextShards(str(tmp_path / "data"))

    shard = "numbers-train-00001.tar"
    for change, message in (
        (lambda path: (path / shard).unlink(), rf"shard .*{shard} is missing; the manifest lists it"),
        (
            lambda path: os.truncate(path / shard, 99),
            rf"shard .*{shard}: expected \d+ bytes as in the manifest, got 99",
        ),
        (lambda path: (path / "tokenizer.json").unlink(), r"cannot read the tokenizer .*tokenizer\.json: No such file"),
        (
            lambda path: train_tokenizer(["ab" * 9], 266, path / "tokenizer.json"),
            r"tokenizer\.json has 266 tokens, the shards of .*manifest\.json were made with 300",
        ),
        (lambda path: (path / "manifest.json").unlink(), r"no manifest\.json in"),
    ):
        with pytest.raises(UserError, match=message):
            broken(change).setup()
    with pytest.raises(UserError, match=r"no data folder .*nowhere: make it with `lapbench data"):
        FineWebEdu(str(tmp_path / "nowhere")).setup()


@both
@pytest.mark.parametrize("workers", [0, 1])
def test_a_damaged_token_is_named_in_one_line(folder, tmp_path, reader, workers):
    shutil.copytree(folder, tmp_path / "data")
    path = tmp_path / "data/numbers-val-00001.tar"
    data = bytearray(path.read_bytes())
    data[512 + 128 + 2 : 512 + 128 + 4] = np.uint16(300).tobytes()
    path.write_bytes(data)
    loader = data_of(tmp_path / "data", reader=reader, num_workers=workers).val_dataloader()
    with pytest.raises(UserError, match=rf"^shard {path}, window 0: expected tokens in 0\.\.299, got 300$"):
        list(loader)


def test_pydocs_are_made_on_first_use(tmp_path):
    data = PyDocs(str(tmp_path / "pydocs"), vocab_size=512, num_workers=0, seed=0)
    data.prepare_data()
    data.setup("fit")
    assert (data.context, data.batch_size, data.vocab_size) == (256, 8, 512)
    inputs, targets = next(iter(data.train_dataloader()))
    assert inputs.shape == (8, 256)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    report = data.report()
    assert report["predicted"] > 0.98 * report["tokens"]
    made = {path: path.stat().st_mtime_ns for path in Path(tmp_path / "pydocs").iterdir()}
    data.prepare_data()
    assert {path: path.stat().st_mtime_ns for path in Path(tmp_path / "pydocs").iterdir()} == made
    other = PyDocs(str(tmp_path / "pydocs"))
    other.prepare_data()
    with pytest.raises(UserError, match=r"pydocs has a vocabulary of 512 tokens, asked for 2048: set vocab_size to"):
        other.setup("fit")
