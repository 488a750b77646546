"""Writing token shards: what lands in them, killed and finished at any moment, folders that hold something else."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lapbench.datamodules import token_manifest
from lapbench.datamodules.convert.token_shards import TokenShardWriter
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.datamodules.token_shards import Format, TokenFile, open_shard
from lapbench.errors import UserError

TEXTS = ["the cat", "", "sat on", "the mat", "<|bos|>", "漢字", "", "x" * 40, "end", ""]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_tokenizer(TEXTS, 270, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


def write(out: Path, tokenizer: Any, texts: list[str] = TEXTS, **settings: Any) -> tuple[TokenManifest, bool]:
    """Every third text is for validation."""
    with TokenShardWriter(out, "few", tokenizer, **{"shard_tokens": 12, **settings}) as writer:
        for i, text in enumerate(texts):
            writer.add("train" if i % 3 else "val", [tokenizer.bos, *tokenizer.encode(text)], len(text.encode()))
        return writer.close(), writer.finished


def content(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.iterdir()}


def test_shards(tmp_path: Path, tokenizer: Any) -> None:
    manifest, finished = write(tmp_path / "out", tokenizer, origin="here", settings={"of": 3})
    assert not finished
    assert manifest == TokenManifest.load(tmp_path / "out")
    assert content(tmp_path / "out")["tokenizer.json"] == tokenizer.path.read_bytes()
    assert manifest.source == {
        "origin": "here",
        "of": 3,
        "shard_tokens": 12,
        "loss": False,
        "tokenizer_sha256": tokenizer.sha256,
        "empty_documents": {"train": 1, "val": 2},
    }
    for split, texts in (("train", ["sat on", "<|bos|>", "漢字", "x" * 40, "end"]), ("val", ["the cat", "the mat"])):
        expected = [[tokenizer.bos, *tokenizer.encode(text)] for text in texts if text]
        got: list[list[int]] = []
        for shard in manifest.split(split):
            opened = open_shard(TokenFile(str(tmp_path / "out" / shard.file), shard), Format.of(manifest))
            # A shard is closed by the document with which it is full.
            assert shard.tokens >= 12 or shard is manifest.split(split)[-1]
            assert shard.tokens - np.diff([*opened.documents, shard.tokens])[-1] < 12
            got += [part.tolist() for part in np.split(opened.tokens, opened.documents[1:])]
            assert shard.text_bytes == sum(len(tokenizer.decode(ids[1:]).encode()) for ids in got[-shard.documents :])
        assert got == expected
        assert sum(ids.count(tokenizer.bos) for ids in got) == len(got)  # N documents, N separators
        assert sum(shard.documents for shard in manifest.split(split)) == len(got)
        assert manifest.tokens(split) == sum(map(len, got))
    names = [shard.file for shards in manifest.splits.values() for shard in shards]
    assert names == ["few-val-00000.tar", "few-train-00000.tar", "few-train-00001.tar"]


def test_large_vocabularies_take_32_bits(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(token_manifest.DTYPES, "uint16", 100)
    manifest, _ = write(tmp_path, tokenizer)
    shard = manifest.split("train")[0]
    assert manifest.dtype == "uint32"
    assert open_shard(TokenFile(str(tmp_path / shard.file), shard), Format.of(manifest)).tokens.dtype == np.uint32


def test_a_finished_folder_is_left_alone(tmp_path: Path, tokenizer: Any) -> None:
    manifest, _ = write(tmp_path, tokenizer)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert write(tmp_path, tokenizer) == (manifest, True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == times
    with pytest.raises(UserError, match=r"holds few with shard_tokens 12, now it is 13: choose another --out"):
        write(tmp_path, tokenizer, shard_tokens=13)
    with pytest.raises(UserError, match=r"holds few with of None, now it is 3"):
        write(tmp_path, tokenizer, settings={"of": 3})
    (tmp_path / manifest.split("val")[0].file).unlink()
    with pytest.raises(UserError, match=r"few-val-00000\.tar is missing or not of the \d+ bytes"):
        write(tmp_path, tokenizer)


# Kills a conversion right before its n-th step that touches the disk, for every n, and finishes it each time.
KILL_EVERYWHERE = """
import os, signal, sys, tarfile
from pathlib import Path
from lapbench.datamodules.convert.journal import Journal
from lapbench.datamodules.convert.token_shards import TokenShardWriter
from lapbench.datamodules.tokenizer import Tokenizer

tokenizer, base = Tokenizer.load(sys.argv[1]), Path(sys.argv[2])
encoded = []

def convert(out):
    with TokenShardWriter(out, "few", tokenizer, shard_tokens=12) as writer:
        for i, text in enumerate(["the cat", "", "sat on", "the mat", "", "x" * 20, "end", ""]):
            split = "train" if i % 3 else "val"
            if not writer.pass_over(split, 1):
                encoded.append(text)
                writer.add(split, [tokenizer.bos, *tokenizer.encode(text)], len(text))
        writer.close()

def content(out):
    return {path.name: path.read_bytes() for path in out.iterdir()}

def arm(moment):
    steps = 0
    def before(owner, name):
        function = getattr(owner, name)
        def step(*args, **kwargs):
            nonlocal steps
            if steps == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            steps += 1
            return function(*args, **kwargs)
        setattr(owner, name, step)
    for owner, name in ((os, "fsync"), (os, "replace"), (Path, "unlink"), (Path, "mkdir"), (tarfile.TarFile, "addfile"),
                        (Journal, "begin"), (Journal, "add"), (Journal, "remove")):
        before(owner, name)

convert(base / "whole")
whole = content(base / "whole")
moment, passed = 0, []
while True:
    out = base / f"killed{moment}"
    child = os.fork()
    if child == 0:
        arm(moment)
        convert(out)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0
        break
    encoded.clear()
    convert(out)
    passed.append(8 - len(encoded))
    assert content(out) == whole, moment
    moment += 1
assert passed == sorted(passed) and passed[-1] == 8, passed  # what was written is not encoded again
print(moment)
"""


def test_killed_before_every_step(tmp_path: Path, tokenizer: Any) -> None:
    command = [sys.executable, "-c", KILL_EVERYWHERE, str(tokenizer.path), str(tmp_path / "runs")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 3 * (2 + 4) + 8


def test_a_damaged_shard_is_written_again(tmp_path: Path, tokenizer: Any) -> None:
    whole, _ = write(tmp_path / "whole", tokenizer)
    out = tmp_path / "out"
    with TokenShardWriter(out, "few", tokenizer, shard_tokens=12) as writer:
        for i, text in enumerate(TEXTS[:9]):
            writer.add("train" if i % 3 else "val", [tokenizer.bos, *tokenizer.encode(text)], len(text.encode()))
    first = out / "few-train-00000.tar"
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    assert write(out, tokenizer) == (whole, False)
    assert content(out) == content(tmp_path / "whole")


def test_another_source_in_an_unfinished_folder(tmp_path: Path, tokenizer: Any) -> None:
    with TokenShardWriter(tmp_path, "few", tokenizer, shard_tokens=1) as writer:
        for text in TEXTS:
            writer.add("train", [tokenizer.bos, *tokenizer.encode(text)], len(text.encode()))
    with pytest.raises(UserError, match=r"holds an unfinished conversion of few with shard_tokens 1, now it is 12"):
        write(tmp_path, tokenizer)
    with TokenShardWriter(tmp_path, "few", tokenizer, shard_tokens=1) as writer:
        writer.add("train", [tokenizer.bos, *tokenizer.encode(TEXTS[0])], 7)
        with pytest.raises(UserError, match=r"few: train ended 8 documents before the end of the shards in"):
            writer.close()


def test_folders_that_hold_something_else(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"is not empty \(a\.txt\) and no conversion: choose a new --out"):
        write(tmp_path, tokenizer)
    assert os.listdir(tmp_path) == ["a.txt"]
    with pytest.raises(UserError, match=r"cannot create the folder .*a\.txt: File exists"):
        write(tmp_path / "a.txt", tokenizer)


def test_nothing_to_write(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(UserError, match=r"few: no documents$"):
        write(tmp_path / "a", tokenizer, [])
    with pytest.raises(UserError, match=r"here: no document with text in val \(1 looked at\)"):
        write(tmp_path / "b", tokenizer, ["", "a"], origin="here")
    with pytest.raises(UserError, match="at least 1 token, got 0"):
        write(tmp_path / "c", tokenizer, shard_tokens=0)


@pytest.mark.parametrize(
    ("tokens", "loss", "message"),
    [
        ([], None, "begins with the token"),
        ([1], None, "begins with the token"),
        ([261, 270], None, r"tokens must be in 0\.\.269, got 261\.\.270"),
        ([261, -1], None, r"tokens must be in 0\.\.269"),
        ([261, 1], [1, 1], "expected no loss flags, got"),
    ],
)
def test_no_document(tmp_path: Path, tokenizer: Any, tokens: list[int], loss: Any, message: str) -> None:
    with TokenShardWriter(tmp_path, "few", tokenizer) as writer, pytest.raises(ValueError, match=message):
        writer.add("train", tokens, 1, loss)


def test_loss_flags_must_fit(tmp_path: Path, tokenizer: Any) -> None:
    with TokenShardWriter(tmp_path, "few", tokenizer, loss=True) as writer:
        for loss in (None, [1]):
            with pytest.raises(ValueError, match="expected 2 loss flags"):
                writer.add("train", [261, 1], 1, loss)


# Several processes at once: all see the same folder, one writes it.
AT_ONCE = """
import sys
from pathlib import Path
from lapbench.datamodules.convert.pydocs import convert

print(convert(Path(sys.argv[1]), 300)[1])
"""


def test_several_processes_at_once(tmp_path: Path, start_forked: Any) -> None:
    processes = [start_forked("-c", AT_ONCE, tmp_path / "out") for _ in range(3)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], results
    assert sorted(out.strip() for out, _ in results) == ["False", "True", "True"]
    assert sorted(os.listdir(tmp_path / "out")) == [
        "manifest.json",
        "pydocs-train-00000.tar",
        "pydocs-val-00000.tar",
        "tokenizer.json",
    ]
