"""The index file: what it says, and that one which is not the manifest's is never used."""

import hashlib
import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset

from lapbench.datamodules.convert import digits
from lapbench.datamodules.convert.index import index, index_again
from lapbench.datamodules.images import ImageShards
from lapbench.datamodules.indexed import IndexReader
from lapbench.datamodules.manifest import Manifest
from lapbench.datamodules.offsets import check_offsets, open_offsets, row
from lapbench.datamodules.plan import Read
from lapbench.datamodules.shards import ShardFile, ShardReader
from lapbench.errors import UserError

DTYPE = [("start", "<u8"), ("headers", "<u4"), ("size", "<u4"), ("label", "<u4")]
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}
LONG = "n01440764/" * 8 + "x" * 60  # with its suffix more than the 100 bytes of a plain header
LONGER = "train/" + "n01440764/" * 30 + "z"  # more than the prefix of a USTAR header takes as well


class Ten(ImageShards):
    num_classes = 10


def write(path, keys, tar_format, **settings):
    """Shard with an image of i + 1 bytes for key i, label i, and other files around."""
    with tarfile.open(path, "w", format=tar_format, **settings) as tar:
        for i, key in enumerate(keys):
            members = ((f"{key}.json", b"{}"), (f"{key}.JPEG", bytes([65 + i]) * (i + 1)), (f"{key}.cls", b"%d" % i))
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                info.mtime = 0.5 if tar_format == tarfile.PAX_FORMAT else 0  # needs an extended header
                tar.addfile(info, io.BytesIO(data))


def expected_index(folder, manifest, split):
    """The index as numpy writes it, from tarfile's own listing."""
    rows = []
    for shard in manifest.split(split):
        with tarfile.open(folder / shard.file) as tar:
            members = {member.name: member for member in tar.getmembers()}
            for name, member in members.items():
                stem, _, suffix = name.rpartition(".")
                if suffix.lower() in ("jpeg", "jpg", "png", "webp"):
                    label = int(tar.extractfile(members[f"{stem}.cls"]).read())
                    rows.append((member.offset, member.offset_data - member.offset, member.size, label))
    stream = io.BytesIO()
    np.save(stream, np.array(rows, DTYPE))
    return stream.getvalue()


def readers(folder, split, num_classes=10):
    manifest = Manifest.load(folder)
    files = [ShardFile(str(folder / shard.file), shard.samples) for shard in manifest.split(split)]
    return IndexReader(files, check_offsets(folder, manifest, split), num_classes), ShardReader(files, num_classes)


def all_samples(folder, split):
    """Every sample by the index and by the stream."""
    random, stream = readers(folder, split)
    counts = stream.counts()
    by_index = [random.read(place) for place in range(sum(counts))]
    return by_index, list(stream.read([Read(shard, 0, count) for shard, count in enumerate(counts)]))


def test_the_converters_index_is_the_one_that_data_index_makes(tmp_path):
    manifest = digits.convert(tmp_path)
    for split in ("train", "test"):
        content = (tmp_path / f"{split}.index.npy").read_bytes()
        assert content == expected_index(tmp_path, manifest, split)
        assert manifest.offsets[split].sha256 == hashlib.sha256(content).hexdigest()
        by_index, by_stream = all_samples(tmp_path, split)
        assert by_index == by_stream
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert index_again(tmp_path) == manifest
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("tar_format", FORMATS)
def test_every_kind_of_header(tmp_path, tar_format):
    longest = [] if tar_format == "ustar" else [LONGER]
    headers = {"pax_headers": {"comment": "x"}} if tar_format == "pax" else {}
    write(tmp_path / "a.tar", ["k0", "d/k1", "./k2", LONG, *longest, "last"], FORMATS[tar_format], **headers)
    write(tmp_path / "b.tar", ["x"], FORMATS[tar_format])
    manifest = index(tmp_path, "t", {"all": "*.tar"}, tuple("0123456789"))
    assert (tmp_path / "all.index.npy").read_bytes() == expected_index(tmp_path, manifest, "all")
    by_index, by_stream = all_samples(tmp_path, "all")
    assert by_index == by_stream
    keys = ["k0", "d/k1", "./k2", LONG, *longest, "last", "x"]
    assert [sample.key for sample in by_index] == keys
    assert [sample.image for sample in by_index[:3]] == [b"A", b"BB", b"CCC"]


def test_shards_of_webdatasets_own_writer(tmp_path):
    with webdataset.TarWriter(str(tmp_path / "wds.tar")) as writer:
        writer.write({"__key__": "a/n1_0", "JPEG": b"one", "cls": b"3", "json": b"{}"})
        writer.write({"__key__": LONGER, "png": b"two2", "cls": b"5\n", "txt": b"hello"})
    index(tmp_path, "t", {"all": "*.tar"}, tuple("0123456789"))
    by_index, by_stream = all_samples(tmp_path, "all")
    assert by_index == by_stream
    assert [(s.key, s.image, s.label) for s in by_index] == [("a/n1_0", b"one", 3), (LONGER, b"two2", 5)]


def test_what_webdataset_passes_over_has_no_row(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("__meta__/x.png", "README", "._a.png", "d/._a.png", ".png", "a.png", "a.cls", "._b.cls", "b.tiff"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"7"))
        info.name = "b.png"
        tar.addfile(info, io.BytesIO(b"8"))
        info.name = "b.cls"
        tar.addfile(info, io.BytesIO(b"9"))
    index(tmp_path, "t", {"all": "*.tar"}, tuple("0123456789"))
    by_index, by_stream = all_samples(tmp_path, "all")
    assert by_index == by_stream
    assert [(s.key, s.image, s.label) for s in by_index] == [("a", b"7", 7), ("b", b"8", 9)]


def test_rows_are_mapped_not_read(tmp_path):
    digits.convert(tmp_path)
    rows = open_offsets(tmp_path / "train.index.npy")
    assert isinstance(rows, np.memmap)
    assert rows.dtype.itemsize == 20
    assert len(rows) == 1437


@pytest.mark.parametrize(("size", "headers"), [(2**28 + 1, 512), (10, 2**16 + 512)])
def test_what_no_reader_would_take_gets_no_row(size, headers):
    with pytest.raises(UserError, match=r"^a\.tar: 0\.png: expected .*at most [0-9]+ bytes"):
        row(0, headers, size, 0, "a.tar: 0.png")


def ready(folder, **settings):
    data = Ten(str(folder), num_workers=0, **settings)
    data.setup("fit")
    return data


def edit_manifest(folder, change):
    content = json.loads((folder / "manifest.json").read_text())
    change(content)
    (folder / "manifest.json").write_text(json.dumps(content))


def test_without_offsets_the_stream_works_and_the_index_says_how_to_make_them(tmp_path):
    digits.convert(tmp_path)
    edit_manifest(tmp_path, lambda content: content.pop("offsets"))
    for path in tmp_path.glob("*.npy"):
        path.unlink()
    with pytest.raises(UserError) as caught:
        ready(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no index of its samples: make it with `lapbench data index {tmp_path}`, "
        "or set the data's `reader` to stream, which needs none"
    )
    assert len(ready(tmp_path, reader="stream").train_dataloader()) == 1437 // 64
    index_again(tmp_path)
    assert len(ready(tmp_path).train_dataloader()) == 1437 // 64


def test_an_index_that_is_not_the_manifests_is_found_at_setup(tmp_path):
    digits.convert(tmp_path)
    path = tmp_path / "test.index.npy"
    whole = path.read_bytes()
    remedy = f"make it with `lapbench data index {tmp_path}`"
    for content in (b"", whole[:-1], whole + b"\0", whole[:200] + b"\1" + whole[201:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"test\.index\.npy is stale or damaged, its SHA-256 is") as caught:
            ready(tmp_path)
        assert remedy in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match=r"cannot read the index .*test\.index\.npy: No such file") as caught:
        ready(tmp_path)
    assert remedy in str(caught.value)
    # The stream needs none of it.
    ready(tmp_path, reader="stream")


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("kind", ["one row less", "two dimensions", "other type", "pickled objects", "no npy"])
def test_a_file_with_the_manifests_checksum_must_still_be_an_index(tmp_path, kind):
    digits.convert(tmp_path)
    rows = np.load(tmp_path / "train.index.npy")
    canary = tmp_path / "canary"
    stream = io.BytesIO()
    if kind == "pickled objects":
        np.save(stream, np.array([Canary(canary)] * 1437, dtype=object), allow_pickle=True)
    elif kind == "no npy":
        stream.write(pickle.dumps(Canary(canary)))
    else:
        np.save(stream, {"one row less": rows[1:], "two dimensions": rows[None], "other type": rows["start"]}[kind])
    (tmp_path / "train.index.npy").write_bytes(stream.getvalue())
    sha256 = hashlib.sha256(stream.getvalue()).hexdigest()
    edit_manifest(tmp_path, lambda content: content["offsets"]["train"].update(sha256=sha256))
    with pytest.raises(UserError, match=r"train\.index\.npy is not one of the manifest's 1437 samples: make it with"):
        ready(tmp_path)
    assert not canary.exists()


def test_an_index_needs_local_shards(tmp_path):
    url = "https://host/imagenet"
    with pytest.raises(UserError) as caught:
        Ten(str(tmp_path), shards_url=url)
    assert str(caught.value) == (
        f"reader index needs local shards, got {url}: set reader to stream, or copy the shards to {tmp_path} and run "
        f"`lapbench data index {tmp_path}`"
    )
    assert Ten(str(tmp_path), shards_url=url, reader="stream").reader == "stream"
