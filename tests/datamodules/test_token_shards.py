"""Token shards as WebDataset and numpy see them, windows over them, and shards that are not what they should be."""

import io
import json
import os
import pickle
import tarfile
from dataclasses import replace

import numpy as np
import pytest

from lapbench.datamodules import token_shards as module
from lapbench.datamodules.plan import Read
from lapbench.datamodules.token_manifest import TokenShard
from lapbench.datamodules.token_shards import (
    Format,
    RandomTokens,
    StreamedTokens,
    TokenFile,
    open_shard,
    windows_of,
)
from lapbench.errors import UserError


@pytest.fixture
def split(tmp_path, write_tokens):
    """Two shards of 10 and 4 tokens, and their format."""
    manifest = write_tokens(tmp_path, loss=True, train=[[3, 6, 1], [2, 2]])
    files = [TokenFile(str(tmp_path / shard.file), shard) for shard in manifest.split("train")]
    return files, Format.of(manifest)


# In a process of its own: webdataset leaves the files it reads for the garbage collector to close.
READ_WITH_WEBDATASET = """
import json, sys
import webdataset as wds

names = "tokens.npy", "documents.npy", "loss.npy"
samples = wds.WebDataset(sys.argv[1:], shardshuffle=False).decode()
print(json.dumps([[s["__key__"], *(s[name].tolist() for name in names)] for s in samples]))
"""


def test_webdataset_reads_the_shards(split, tokenizer, forked):
    files, _ = split
    result = forked("-c", READ_WITH_WEBDATASET, *(file.url for file in files))
    assert result.returncode == 0, result.stderr
    bos = tokenizer.bos
    assert json.loads(result.stdout) == [
        ["00000", [bos, 1, 2, bos, 4, 5, 6, 7, 8, bos], [0, 3, 9], [1, 0] * 5],
        ["00001", [bos, 11, bos, 13], [0, 2], [1, 0, 1, 0]],
    ]


def test_tokens_are_mapped_not_copied(split, tokenizer):
    files, form = split
    content = open_shard(files[0], form)
    assert content.tokens.dtype == np.uint16
    with tarfile.open(files[0].url) as tar:
        start = tar.getmember("00000.tokens.npy").offset_data
    assert not content.tokens.flags.owndata
    # The file's bytes show in the array that was opened before they were written.
    with open(files[0].url, "r+b") as stream:
        stream.seek(start + 128 + 2 * 4)
        stream.write(np.uint16(77).tobytes())
    assert content.tokens.tolist() == [tokenizer.bos, 1, 2, tokenizer.bos, 77, 5, 6, 7, 8, tokenizer.bos]
    assert content.documents.tolist() == [0, 3, 9]


@pytest.mark.parametrize(
    ("tokens", "context", "full", "whole"),
    [(2, 1, 1, 1), (10, 3, 3, 3), (11, 3, 3, 4), (4, 3, 1, 1), (3, 3, 0, 1), (4, 100, 0, 1)],
)
def test_numbers_of_windows(tokens, context, full, whole):
    assert windows_of(tokens, context, whole=False) == full
    assert windows_of(tokens, context, whole=True) == whole


@pytest.mark.parametrize("kind", [RandomTokens, StreamedTokens])
def test_windows(split, kind, tokenizer):
    files, form = split
    reader = kind(files, form, 4, True)
    assert reader.counts() == ((4,) if kind is RandomTokens else (3, 1))
    windows = (
        [reader.read(place) for place in range(4)]
        if kind is RandomTokens
        else list(reader.read([Read(0, 0, 3), Read(1, 0, 1)]))
    )
    bos = tokenizer.bos
    assert [(w.url, w.number, w.tokens.tolist()) for w in windows] == [
        (files[0].url, 0, [bos, 1, 2, bos, 4]),
        (files[0].url, 1, [4, 5, 6, 7, 8]),
        (files[0].url, 2, [8, bos]),
        (files[1].url, 0, [bos, 11, bos, 13]),
    ]
    assert [w.loss.tolist() for w in windows] == [[1, 0, 1, 0, 1], [1, 0, 1, 0, 1], [1, 0], [1, 0, 1, 0]]
    assert kind(files, form, 4, False).windows == (2, 0)


def test_without_loss_there_is_none(tmp_path, write_tokens):
    manifest = write_tokens(tmp_path, train=[[5]])
    (shard,) = manifest.split("train")
    reader = RandomTokens([TokenFile(str(tmp_path / shard.file), shard)], Format.of(manifest), 2, False)
    assert reader.read(1).loss is None


def test_no_more_shards_are_open_than_a_process_may_have(tmp_path, write_tokens, monkeypatch):
    monkeypatch.setattr(module, "OPEN_SHARDS", 3)
    manifest = write_tokens(tmp_path, train=[[3]] * 7)
    files = [TokenFile(str(tmp_path / shard.file), shard) for shard in manifest.split("train")]
    reader = RandomTokens(files, Format.of(manifest), 2, False)
    before = len(os.listdir("/proc/self/fd"))
    windows = [reader.read(place) for place in range(len(files))]
    assert len(os.listdir("/proc/self/fd")) - before == 3
    # Windows outlive the shard that they are from.
    assert [int(w.tokens[1]) for w in windows] == [(3 * i + 1) % 256 for i in range(len(files))]
    # Another process opens them for itself.
    assert pickle.loads(pickle.dumps(reader)).read(5).tokens.tolist() == windows[5].tokens.tolist()


def remote(monkeypatch, content):
    """Serves ``content`` under every https: URL; returns the list of those asked for."""
    asked = []

    def opened(url):
        asked.append(url)
        return io.BytesIO(content(url))

    monkeypatch.setattr(module, "gopen_curl", opened)
    return asked


def test_shards_from_elsewhere(split, monkeypatch, tmp_path):
    files, form = split
    asked = remote(monkeypatch, lambda url: (tmp_path / url.rpartition("/")[2]).read_bytes())
    there = [TokenFile(f"https://host/{file.shard.file}", file.shard) for file in files]
    reads = [Read(1, 0, 1), Read(0, 1, 3)]
    got = list(StreamedTokens(there, form, 4, True).read(reads))
    expected = list(StreamedTokens(files, form, 4, True).read(reads))
    assert [w.tokens.tolist() for w in got] == [w.tokens.tolist() for w in expected]
    assert asked == [there[1].url, there[0].url]  # each once


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], r"expected \d+ bytes as in the manifest, got \d+$"),
        (lambda data: data + b"x", r"expected \d+ bytes as in the manifest, got more than \d+$"),
        (lambda data: data[:700] + b"x" + data[701:], "its SHA-256 is not the manifest's"),
        (lambda data: b"", r"expected \d+ bytes as in the manifest, got 0$"),
    ],
)
def test_damage_on_the_way(split, monkeypatch, change, message):
    (file, _), form = split
    with open(file.url, "rb") as stream:
        data = stream.read()
    remote(monkeypatch, lambda url: change(data))
    with pytest.raises(UserError, match=f"^shard https://host/x.tar: {message}"):
        open_shard(TokenFile("https://host/x.tar", file.shard), form)


def member(name, data, kind=tarfile.REGTYPE):
    info = tarfile.TarInfo(name)
    info.size, info.type = len(data), kind
    return info, data


def npy(values, dtype, **settings):
    stream = io.BytesIO()
    np.save(stream, np.array(values, dtype), **settings)
    return stream.getvalue()


TOKENS = member("0.tokens.npy", npy([291, 1, 2], "<u2"))
DOCUMENTS = member("0.documents.npy", npy([0], "<i8"))
LOSS = member("0.loss.npy", npy([1, 1, 1], "u1"))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([DOCUMENTS, TOKENS, LOSS], r"expected a member KEY\.tokens\.npy at byte 0"),
        ([TOKENS, DOCUMENTS], r"expected a member KEY\.loss\.npy at byte 2048"),
        ([member("0.tokens.pkl", b"x"), DOCUMENTS, LOSS], r"expected a member KEY\.tokens\.npy at byte 0"),
        ([member("0.tokens.npy", b"", tarfile.SYMTYPE)], r"expected a member KEY\.tokens\.npy at byte 0"),
        (
            [member("0.tokens.npy", npy([291, 1, 2], "<u4")), DOCUMENTS, LOSS],
            "damaged or not of 3 numbers of type uint16",
        ),
        ([member("0.tokens.npy", npy([291, 1], "<u2")), DOCUMENTS, LOSS], "damaged or not of 3 numbers"),
        ([member("0.tokens.npy", npy([[291, 1, 2]], "<u2")), DOCUMENTS, LOSS], "damaged or not of 3 numbers"),
        ([member("0.tokens.npy", npy([291, 1, 2], ">u2")), DOCUMENTS, LOSS], "damaged or not of 3 numbers"),
        ([member("0.tokens.npy", npy([None] * 3, object, allow_pickle=True)), DOCUMENTS, LOSS], "damaged or not"),
        ([member("0.tokens.npy", TOKENS[1][:-1]), DOCUMENTS, LOSS], "damaged or not of 3 numbers"),
        ([member("0.tokens.npy", b"\x93NUMPY\x01\x00\xff\xff{"), DOCUMENTS, LOSS], "damaged or not of 3 numbers"),
        ([member("0.tokens.npy", b"x" * 200), DOCUMENTS, LOSS], "damaged or not of 3 numbers"),
        ([TOKENS, DOCUMENTS, member("0.loss.npy", npy([1, 1], "u1"))], r"member 0\.loss\.npy is damaged"),
        (
            [TOKENS, member("0.documents.npy", npy([1], "<i8")), LOSS],
            "documents do not begin at rising places within 3",
        ),
    ],
)
def test_tampered_shards(tmp_path, members, message):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in members:
            tar.addfile(info, io.BytesIO(data))
    shard = TokenShard("x.tar", 3, 1, 2, path.stat().st_size, "0" * 64)
    with pytest.raises(UserError, match=f"^shard {path}: .*{message}"):
        open_shard(TokenFile(str(path), shard), Format("uint16", 300, True))


@pytest.mark.parametrize("places", [[0, 0], [0, 3], [0, -1], [0, 2, 1]])
def test_documents_must_be_inside(tmp_path, places):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for info, data in (TOKENS, member("0.documents.npy", npy(places, "<i8"))):
            tar.addfile(info, io.BytesIO(data))
    shard = TokenShard("x.tar", 3, len(places), 2, path.stat().st_size, "0" * 64)
    with pytest.raises(UserError, match="documents do not begin at rising places"):
        open_shard(TokenFile(str(path), shard), Format("uint16", 300, False))


def test_files_that_are_cut_empty_or_gone(split):
    (file, _), form = split
    for size, message in ((900, r"expected \d+ bytes as in the manifest, got 900"), (0, "cannot read it")):
        os.truncate(file.url, size)
        with pytest.raises(UserError, match=f"^shard {file.url}: {message}"):
            open_shard(file, form)
    os.unlink(file.url)
    with pytest.raises(UserError, match=f"^shard {file.url}: cannot read it: No such file"):
        open_shard(file, form)
    # As long as it should be, but its members lie beyond its end.
    with open(file.url, "wb") as stream:
        stream.write(tarfile.TarInfo("0.tokens.npy").tobuf())
    short = replace(file.shard, bytes=512)
    with pytest.raises(UserError, match=r"member 0\.tokens\.npy is damaged"):
        open_shard(TokenFile(file.url, short), form)


def test_a_token_outside_the_vocabulary_is_named(split):
    files, form = split
    reader = RandomTokens(files, Format("uint16", 291, form.loss), 4, True)
    assert reader.read(1).tokens.tolist() == [4, 5, 6, 7, 8]
    with pytest.raises(UserError, match=rf"^shard {files[0].url}, window 2: expected tokens in 0\.\.290, got 291"):
        reader.read(2)


def test_other_urls_are_refused(split):
    (file, _), form = split
    with pytest.raises(UserError, match="only paths, file: and https: URLs are read"):
        RandomTokens([TokenFile("pipe:cat x.tar", file.shard)], form, 4, True)
