import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lapbench.datamodules.manifest import MODE, Manifest, Offsets, Shard, is_plain_name
from lapbench.errors import UserError
from lapbench.results.files import write_atomically

TRAIN = (Shard("train-000000.tar", 512, 10240, "a" * 64), Shard("train-000001.tar", 88, 2048, "b" * 64))
MANIFEST = Manifest(
    "digits", ("zero", "one"), {"train": TRAIN, "test": (Shard("test-0.tar", 7, 512, "c" * 64),)}, {"k": [1]}
)


def content(**changes: Any) -> dict[str, Any]:
    return MANIFEST.to_json() | changes


def test_round_trip_and_counts(tmp_path: Path) -> None:
    MANIFEST.save(tmp_path)
    assert Manifest.load(tmp_path) == MANIFEST
    assert (MANIFEST.num_classes, MANIFEST.samples("train"), MANIFEST.samples("test")) == (2, 600, 7)
    assert MANIFEST.split("train") == TRAIN
    # The file is what the notes for other tools promise.
    stored = json.loads((tmp_path / "manifest.json").read_text())
    assert list(stored) == ["format", "dataset", "classes", "source", "splits"]
    assert stored["splits"]["test"] == [{"file": "test-0.tar", "samples": 7, "bytes": 512, "sha256": "c" * 64}]
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
    assert stat.S_IMODE(os.stat(tmp_path / "manifest.json").st_mode) == 0o644


def test_offsets_round_trip(tmp_path: Path) -> None:
    offsets = {"train": Offsets("train.index.npy", "d" * 64), "test": Offsets("test.index.npy", "e" * 64)}
    manifest = replace(MANIFEST, offsets=offsets)
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    stored = json.loads((tmp_path / "manifest.json").read_text())
    assert stored["offsets"]["test"] == {"file": "test.index.npy", "sha256": "e" * 64}


def test_unknown_split_names_those_there_are() -> None:
    with pytest.raises(UserError, match=r"'digits' has no split 'val'; it has train, test"):
        MANIFEST.samples("val")


def test_missing_folder_and_manifest_name_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no data folder .*`lapbench data"):
        Manifest.load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no manifest.json in .*`lapbench data index"):
        Manifest.load(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"format": 2}, "'format' must be 1 .a data set of images., got 2"),
        ({"dataset": ""}, "'dataset'"),
        ({"classes": []}, "'classes' must be a list of at least one name"),
        ({"classes": ["a", 1]}, "every class"),
        ({"source": 3}, "'source'"),
        ({"splits": {}}, "'splits'"),
        ({"splits": {"../train": []}}, "a split's name must be letters, digits and _ . [+] = @ -, got '../train'"),
        ({"offsets": []}, "'offsets' must be an object"),
        ({"offsets": {"train": {}}}, r"'offsets' must be of the same splits as 'splits', got \['train'\]"),
        ({"offsets": {"train": {}, "test": {}}}, "offsets of split 'train': 'file' must be a plain file name"),
        ({"offsets": {"train": 1, "test": 2}}, "offsets of split 'train' must be an object, got 1"),
        (
            {"offsets": {"train": {"file": "a", "sha256": "0" * 64}, "test": {"file": "../b", "sha256": "0" * 64}}},
            "offsets of split 'test': 'file' must be a plain file name inside the folder, got '../b'",
        ),
        (
            {"offsets": {"train": {"file": "a", "sha256": "0"}, "test": {"file": "b", "sha256": "0"}}},
            "offsets of split 'train': 'sha256' must be 64 hexadecimal digits",
        ),
        (
            {"offsets": {name: {"file": "test-0.tar", "sha256": "0" * 64} for name in ("train", "test")}},
            "offsets of split 'train' must be a file of its own, got 'test-0.tar'",
        ),
        ({"splits": {"train": []}}, "split 'train' must be a list of at least one shard"),
        ({"splits": {"train": ["x"]}}, "split 'train', shard 0 must be an object"),
    ],
)
def test_malformed(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(content(**changed)))
    with pytest.raises(UserError, match=message) as caught:
        Manifest.load(tmp_path)
    assert str(tmp_path / "manifest.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("file", f)
            for f in ("../a.tar", "/a.tar", "a/b.tar", "pipe:cat a.tar", "pipe:ls", "..", "", ".a.tar", "a\\b.tar", 3)
        ),
        *(("samples", s) for s in (0, -1, 1.5, "3", True, None)),
        *(("bytes", s) for s in (0, "3", None)),
        *(("sha256", s) for s in ("a" * 63, "A" * 64, "", None)),
    ],
)
def test_bad_shard(tmp_path: Path, key: str, value: Any) -> None:
    good = {"file": "a.tar", "samples": 3, "bytes": 512, "sha256": "0" * 64}
    (tmp_path / "manifest.json").write_text(json.dumps(content(splits={"train": [good | {key: value}]})))
    with pytest.raises(UserError, match=f"shard 0.*'{key}' must be"):
        Manifest.load(tmp_path)


def test_a_shard_in_two_splits_is_refused(tmp_path: Path) -> None:
    leaking = Manifest("digits", ("0",), {"train": TRAIN, "test": TRAIN[:1]})
    with pytest.raises(UserError, match=r"split 'test'.*listed once, got 'train-000000.tar'"):
        leaking.save(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[1", '{"format": 1', "\x00", "[" * 100_000])
def test_not_json(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=r"manifest.json is not JSON"):
        Manifest.load(tmp_path)


def test_plain_names() -> None:
    assert all(map(is_plain_name, ["train-000000.tar", "imagenet1k-train-0000.tar", "A_b+c=1@2.tar"]))


def test_failed_write_is_one_line_and_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MANIFEST.save(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*x\.json: No space left on device"):
        write_atomically(tmp_path / "x.json", b"1", MODE)
    with pytest.raises(UserError, match=r"cannot write .*manifest\.json"):
        Manifest("other", ("0",), {"train": TRAIN}).save(tmp_path)
    assert Manifest.load(tmp_path) == MANIFEST
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]
