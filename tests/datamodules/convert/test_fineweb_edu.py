"""Text files to token shards by the command: splits, order, what is left out, bad files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lapbench.datamodules.convert import fineweb_edu, main
from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.datamodules.token_shards import Format, TokenFile, open_shard
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError

FILES = 3
TEXTS = [[f"document {10 * file + i} of <|endoftext|> 😀" for i in range(7)] for file in range(FILES)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(TEXTS[0], 280, tmp_path_factory.mktemp("tokenizer") / "tokenizer.json").path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three parquet files of seven documents in row groups of three, and an empty text in the middle one."""
    for number, texts in enumerate(TEXTS):
        rows = [*texts, "", None] if number == 1 else texts
        table = pa.table({"id": list(map(str, range(len(rows)))), "text": pa.array(rows, pa.string())})
        pq.write_table(table, tmp_path / f"{number:05d}.parquet", row_group_size=3)
    return tmp_path


def run(tokenizer: Path, out: Path, *arguments: object) -> int:
    return main(["fineweb-edu", "--tokenizer", str(tokenizer), "--out", str(out), *map(str, arguments)])


def read(out: Path, split: str) -> list[str]:
    """The documents of a split as text."""
    manifest, tokenizer = TokenManifest.load(out), Tokenizer.load(out / "tokenizer.json")
    texts = []
    for shard in manifest.split(split):
        content = open_shard(TokenFile(str(out / shard.file), shard), Format.of(manifest))
        documents = np.split(content.tokens, content.documents[1:])
        assert all(ids[0] == tokenizer.bos for ids in documents)
        texts += [tokenizer.decode(ids[1:].tolist()) for ids in documents]
    return texts


def test_the_last_file_is_for_validation(source: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = source / "out"
    arguments = (tokenizer, out, "--source", f"{source}/*.parquet", "--shard-tokens", 50)
    assert run(*arguments) == 0
    printed = capsys.readouterr()
    assert (read(out, "train"), read(out, "val")) == (TEXTS[0] + TEXTS[1], TEXTS[2])
    manifest = TokenManifest.load(out)
    assert len(manifest.split("train")) > 2
    size = sum(len(text.encode()) for texts in TEXTS for text in texts)
    files = [path for path in out.iterdir() if path.suffix == ".tar"]
    lines = printed.out.splitlines()
    assert lines[0].startswith(
        f"fineweb-edu: {manifest.tokens('train')} train + {manifest.tokens('val')} val tokens of 21 documents "
        f"({size:,} bytes of text, "
    )
    assert f" a token) in {len(files)} shards (" in lines[0]
    assert lines[1:] == [
        "empty documents left out: 2 train",
        f"next: lapbench fit --config language/d20_pretrain --data.init_args.data_dir {out}",
    ]
    assert "tokens/s" in printed.err
    assert run(*arguments) == 0
    assert capsys.readouterr().out.startswith("already converted: fineweb-edu: ")


@pytest.mark.parametrize("documents", [1, 2, 5])
def test_some_documents_of_one_file_for_validation(source: Path, tokenizer: Path, documents: int) -> None:
    out = source / "out"
    assert run(tokenizer, out, "--source", source / "00000.parquet", "--val-documents", documents) == 0
    assert (read(out, "val"), read(out, "train")) == (TEXTS[0][:documents], TEXTS[0][documents:])


def test_other_kinds_of_files(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0][0])
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS[1]))
    out = tmp_path / "out"
    assert run(tokenizer, out, "--source", tmp_path / "a.txt", tmp_path / "b.jsonl") == 0
    assert (read(out, "train"), read(out, "val")) == ([TEXTS[0][0]], TEXTS[1])


def test_it_goes_on_where_it_stopped(source: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, arguments = source / "out", ("--source", f"{source}/*.parquet", "--shard-tokens", 40)
    assert run(tokenizer, source / "whole", *arguments) == 0
    encode, monkeypatched = Tokenizer.encode_batch, monkeypatch.context
    calls: list[list[str]] = []

    def interrupted(self: Tokenizer, texts: Any) -> Any:
        calls.append(texts)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return encode(self, texts)

    with monkeypatched() as patch:
        patch.setattr(Tokenizer, "encode_batch", interrupted)
        assert run(tokenizer, out, *arguments) == 130
        done = sum(map(len, calls[:3]))
    left: list[str] = []
    with monkeypatched() as patch:
        patch.setattr(Tokenizer, "encode_batch", lambda self, texts: left.extend(texts) or encode(self, texts))
        assert run(tokenizer, out, *arguments) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {
        path.name: path.read_bytes() for path in (source / "whole").iterdir()
    }
    assert 21 + 2 - done <= len(left) < 21 + 2  # the documents of the shard that was not finished are encoded again
    pq.write_table(pa.table({"text": ["other"] * 9}), source / "00001.parquet")
    with pytest.raises(UserError, match=r"holds fineweb-edu with texts_sha256"):
        run(tokenizer, out, *arguments)


def test_batches_do_not_matter(source: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tokenizer, source / "whole", "--source", f"{source}/*.parquet")
    monkeypatch.setattr(fineweb_edu, "BATCH", 2)
    run(tokenizer, source / "out", "--source", f"{source}/*.parquet")
    assert read(source / "out", "train") == read(source / "whole", "train")


def test_splits_without_documents(source: Path, tokenizer: Path) -> None:
    with pytest.raises(UserError, match=r"there is one file, and the last one is for validation: .*--val-documents"):
        run(tokenizer, source / "out", "--source", source / "00000.parquet")
    with pytest.raises(UserError, match=r"no documents are left for train \(--val-documents 7\)"):
        run(tokenizer, source / "out", "--source", source / "00000.parquet", "--val-documents", 7)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4:120] = b"\xff" * 116
    path.write_bytes(data)


def other_column(path: Path) -> None:
    pq.write_table(pa.table({"content": ["a"]}), path)


def numbers(path: Path) -> None:
    pq.write_table(pa.table({"text": [1]}), path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, r"00001\.parquet is not readable as parquet \(incomplete download\?\)"),
        (damage, r"00001\.parquet, row group 0, is not readable as parquet"),
        (other_column, r"00001\.parquet: expected a column 'text' of strings, got 'content'"),
        (numbers, r"00001\.parquet: expected a column 'text' of strings, got text of type int64"),
        (lambda path: path.unlink(), r"--source .*00001\.parquet: no such file"),
    ],
)
def test_bad_files(source: Path, tokenizer: Path, change: Any, message: str) -> None:
    path = source / "00001.parquet"
    change(path)
    with pytest.raises(UserError, match=message) as error:
        run(tokenizer, source / "out", "--source", source / "00000.parquet", path, source / "00002.parquet")
    assert "\n" not in str(error.value)
    assert not (source / "out/manifest.json").exists()


def test_bad_tokenizer(source: Path, tokenizer: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read the tokenizer .*nowhere: No such file"):
        run(source / "nowhere", source / "out", "--source", source / "*.parquet")
