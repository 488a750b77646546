"""What a manifest of tokens must say, and the tokenizer that belongs to it."""

import json
import shutil

import pytest

from lapbench.datamodules.convert.tokenizer import train_tokenizer
from lapbench.datamodules.manifest import Manifest
from lapbench.datamodules.token_manifest import TokenManifest, TokenShard, dtype_of
from lapbench.errors import UserError

SHARD = TokenShard("a-train-00000.tar", tokens=10, documents=2, text_bytes=30, bytes=1024, sha256="0" * 64)


@pytest.fixture
def manifest(tokenizer):
    return TokenManifest("a", tokenizer.sha256, tokenizer.vocab_size, {"train": (SHARD,)}, True, {"origin": "x"})


def test_saved_and_loaded(tmp_path, manifest):
    manifest.save(tmp_path)
    assert TokenManifest.load(tmp_path) == manifest
    content = json.loads((tmp_path / "manifest.json").read_text())
    assert list(content) == ["format", "dataset", "source", "tokenizer", "dtype", "loss", "splits"]
    assert (content["dtype"], content["tokenizer"]["file"]) == ("uint16", "tokenizer.json")
    assert manifest.tokens("train") == 10
    with pytest.raises(UserError, match="data set 'a' has no split 'val'; it has train"):
        manifest.split("val")


def test_the_type_is_the_smallest_that_holds_the_vocabulary():
    assert [dtype_of(size) for size in (1, 65536, 65537, 1 << 32)] == ["uint16", "uint16", "uint32", "uint32"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, r"'format' must be 'tokens-1' \(a data set of tokens\), got 1"),
        ({"dataset": ""}, "'dataset' must be a name"),
        ({"source": []}, "'source' must be an object"),
        ({"tokenizer": "t"}, "'tokenizer' must be an object"),
        ({"tokenizer": {"file": "../t.json"}}, "'file' of the tokenizer must be 'tokenizer.json'"),
        ({"tokenizer": {"file": "tokenizer.json", "sha256": "0"}}, "'sha256' of the tokenizer"),
        ({"tokenizer": {"file": "tokenizer.json", "sha256": "0" * 64, "vocab_size": 0}}, "'vocab_size' must be"),
        ({"tokenizer": {"file": "tokenizer.json", "sha256": "0" * 64, "vocab_size": True}}, "'vocab_size' must be"),
        ({"tokenizer": {"file": "tokenizer.json", "sha256": "0" * 64, "vocab_size": 1 << 33}}, "'vocab_size' must be"),
        ({"dtype": "uint32"}, "'dtype' must be 'uint16' for 300 tokens, got 'uint32'"),
        ({"dtype": "object"}, "'dtype' must be"),
        ({"loss": 1}, "'loss' must be true or false"),
        ({"splits": {}}, "'splits' must be"),
        ({"splits": {"../a": [{}]}}, "a split's name"),
        ({"splits": {"train": []}}, "split 'train' must be a list"),
        ({"splits": {"train": [3]}}, "split 'train', shard 0 must be an object"),
        ({"splits": {"train": [{"file": "pipe:rm"}]}}, "'file' must be a plain file name"),
        ({"splits": {"train": [SHARD.__dict__], "val": [SHARD.__dict__]}}, "shards that are listed once"),
        *(
            ({"splits": {"train": [{**SHARD.__dict__, key: value}]}}, f"'{key}' must be")
            for key, value in (("tokens", 0), ("documents", -1), ("text_bytes", 1.5), ("bytes", None), ("sha256", "x"))
        ),
    ],
)
def test_malformed(tmp_path, manifest, change, message):
    (tmp_path / "manifest.json").write_text(json.dumps(manifest.to_json() | change))
    with pytest.raises(UserError, match=message) as error:
        TokenManifest.load(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "manifest.json"))


def test_images_and_tokens_are_told_apart(tmp_path, manifest):
    manifest.save(tmp_path)
    with pytest.raises(UserError, match=r"'format' must be 1 \(a data set of images\), got 'tokens-1'"):
        Manifest.load(tmp_path)


def test_no_data(tmp_path):
    with pytest.raises(UserError, match=r"no manifest\.json in .*make it with `lapbench data`"):
        TokenManifest.load(tmp_path)
    with pytest.raises(UserError, match=r"no data folder .*nowhere: make it with"):
        TokenManifest.load(tmp_path / "nowhere")


def test_a_manifest_that_would_not_load_is_not_saved(tmp_path):
    with pytest.raises(UserError, match="'splits' must be"):
        TokenManifest("a", "0" * 64, 300, {}).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_tokenizer_must_be_that_of_the_shards(tmp_path, manifest, tokenizer):
    with pytest.raises(UserError, match=r"cannot read the tokenizer .*tokenizer\.json: No such file"):
        manifest.load_tokenizer(tmp_path)
    shutil.copy(tokenizer.path, tmp_path)
    assert manifest.load_tokenizer(tmp_path).sha256 == tokenizer.sha256
    train_tokenizer(["lorem ipsum dolor sit amet consectetur adipiscing"] * 9, 300, tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"is not the tokenizer of .*manifest\.json, its SHA-256 differs"):
        manifest.load_tokenizer(tmp_path)
    train_tokenizer(["lorem ipsum"], 270, tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"has 270 tokens, the shards of .*manifest\.json were made with 300"):
        manifest.load_tokenizer(tmp_path)
