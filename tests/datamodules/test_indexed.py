"""Random access: the global order, what it costs, and offsets that point at the wrong bytes."""

import gc
import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lapbench.datamodules import indexed, sharded
from lapbench.datamodules.convert.index import index
from lapbench.datamodules.images import ImageShards
from lapbench.datamodules.indexed import IndexReader
from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.orders import IndexOrder, Sample, permutation
from lapbench.datamodules.plan import Plan, mixed
from lapbench.datamodules.shards import ShardFile
from lapbench.datamodules.streaming import ShardStream
from lapbench.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
]


class Ten(ImageShards):
    num_classes = 10


class Numbers:
    """A reader without files, that keeps what it was asked for."""

    def __init__(self):
        self.asked = []

    def read(self, place):
        self.asked.append(place)
        return Sample(place, "", "", b"", 0)


def order(samples, batch_size, reader=None, **plan):
    return IndexOrder(Plan((samples,), batch_size, **{"training": True, **plan}), reader or Numbers())


def drawn(order, epoch=0, start=0, workers=1):
    """Batches of one rank as (number, repeat), in the order that the workers of a loader hand them out."""
    found = {}
    for worker in range(workers):
        for turn, batch in enumerate(order.batches(epoch, start, worker, workers)):
            found[turn * workers + worker] = [(draw.sample.number, draw.repeat) for draw in batch]
    return [found[place] for place in sorted(found)]


@pytest.mark.parametrize("repeats", [1, 3])
def test_any_split_of_a_global_batch_and_any_workers_give_the_same_global_batches(repeats):
    whole = drawn(order(100, 16, repeats=repeats), epoch=4)
    assert len(whole) == 6
    for world_size, batch_size in ((2, 8), (4, 4), (16, 1)):
        ranks = [
            drawn(order(100, batch_size, repeats=repeats, rank=rank, world_size=world_size), epoch=4, workers=3)
            for rank in range(world_size)
        ]
        assert [[draw for part in parts for draw in part] for parts in zip(*ranks, strict=True)] == whole
    flat = [draw for batch in whole for draw in batch]
    assert len(set(flat)) == 96
    assert len({number for number, _ in flat}) == 96 // repeats


def test_the_order_is_the_stated_one():
    # Sample perm[d // repeats] for draw d, perm being the order of PCG64's raw words.
    words = np.random.PCG64(mixed("order", 5, 2)).random_raw(20).tolist()
    expected = sorted(range(20), key=words.__getitem__)
    assert [number for batch in drawn(order(20, 4, seed=5), epoch=2) for number, _ in batch] == expected
    assert drawn(order(20, 4, seed=5, repeats=2), epoch=2)[1] == [
        (expected[2], 0),
        (expected[2], 1),
        (expected[3], 0),
        (expected[3], 1),
    ]
    # Runs are resumed after numpy was updated: this must never change.
    assert permutation(10, 7).tolist() == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]
    assert permutation(0, 7).tolist() == []


def test_going_on_reads_nothing_of_what_was_before():
    reader = Numbers()
    rest = list(order(1000, 10, reader).batches(0, 90, 1, 2))
    assert len(rest) == 5
    assert len(reader.asked) == 50


def test_num_workers_is_no_part_of_the_layout_but_the_global_batch_is():
    one, two = order(100, 16), order(100, 8, rank=1, world_size=2)
    assert one.layout(1) == two.layout(4)
    assert one.layout(1) == {"reader": "index", "seed": 0, "global_batch_size": 16, "repeats": 1, "samples": 100}
    loader = ResumableLoader(ShardStream(one, lambda image: image))
    loader.load_state_dict(one.layout(3))
    for change, message in (
        ({"reader": "stream", "num_workers": 3, "samples": 90}, "reader was stream and is index"),
        ({"global_batch_size": 32}, "global_batch_size was 32 and is 16"),
        ({"num_workers": 2}, "num_workers was 2 and is None"),
    ):
        with pytest.raises(UserError, match=f"from this checkpoint: {message}; --allow_layout_change"):
            loader.load_state_dict({**one.layout(1), **change})


# Files.


def png(value):
    stream = io.BytesIO()
    Image.fromarray(np.full((2, 2), value, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def write_shards(folder, counts):
    """Shards ``000.tar``, ... of one split "all"; sample i has key ``{i:06d}``, label i % 10, grey value i."""
    folder.mkdir(exist_ok=True)
    number = 0
    for shard, count in enumerate(counts):
        with tarfile.open(folder / f"{shard:03d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(count):
                for name, data in ((f"{number:06d}.png", png(number)), (f"{number:06d}.cls", b"%d" % (number % 10))):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                number += 1
    manifest = index(folder, "t", {"all": "*.tar"}, tuple("0123456789"))
    return [ShardFile(str(folder / shard.file), shard.samples) for shard in manifest.split("all")]


def open_files(folder):
    targets = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(target.startswith(str(folder)) and target.endswith(".tar") for target in targets)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
def test_few_files_are_open_at_once_and_none_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(indexed, "OPEN_SHARDS", 3)
    files = write_shards(tmp_path, (2,) * 8)
    reader = IndexReader(files, tmp_path / "all.index.npy", 10)
    assert open_files(tmp_path) == 0
    for place in (0, 2, 4, 0, 6, 8, 15, 1, 13, 0):
        assert reader.read(place) == Sample(place, files[place // 2].url, f"{place:06d}", png(place), place % 10)
        assert open_files(tmp_path) <= 3
    # Of the shards 0 1 2 0 3 4 7 0 6 0, the least recently used ones were closed.
    assert list(reader._open) == [7, 6, 0]
    del reader
    gc.collect()
    assert open_files(tmp_path) == 0


def tampered(folder, change):
    """A reader of an index in which ``change`` edited the second row."""
    path = folder / "all.index.npy"
    rows = np.load(path)
    change(rows)
    np.save(path, rows)
    return IndexReader([ShardFile(str(folder / "000.tar"), len(rows))], path, 10)


def put(**values):
    def change(rows):
        for name, value in values.items():
            rows[name][1] = value

    return change


TAMPERED = {
    "at the label": put(start=0 + 1024),  # 0's label: a regular file, of another size
    "at the label, with its size": put(start=1024, size=1),
    "at another image's size": put(size=1),
    "in the middle of an image": put(start=512),
    "between blocks": put(start=2049),
    "at the end": put(start=3 * 2048),
    "behind the end": put(start=2**63),
    "at the farthest": put(start=2**64 - 1),
    "more than the file": put(size=2**20),
    "more than the memory": put(size=2**32 - 1),
    "headers too long": put(headers=2**32 - 512),
    "no headers": put(headers=0),
    "half a header": put(headers=256),
    "two headers": put(headers=1024),
    "no such class": put(label=10),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_offsets_that_point_elsewhere_are_refused(tmp_path, kind):
    write_shards(tmp_path, (3,))
    reader = tampered(tmp_path, TAMPERED[kind])
    assert reader.read(0).image == png(0)
    with pytest.raises(UserError) as caught:
        reader.read(1)
    assert str(caught.value).startswith(f"shard {tmp_path}/000.tar, sample number 1: expected an image of ")
    assert str(caught.value).endswith(f"make the index anew with `lapbench data index {tmp_path}`")
    assert "\n" not in str(caught.value)


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("0.pkl", {}),
        ("0.pkl.png", {}),
        ("0.pth", {}),
        ("0.cls", {}),
        ("../0.png", {}),
        ("/tmp/0.png", {}),
        ("C:/0.png", {}),
        ("..\\0.png", {}),
        ("0.png", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("0.png", {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}),
        ("0.png", {"type": tarfile.FIFOTYPE}),
        ("0.png", {"type": tarfile.DIRTYPE}),
    ],
)
def test_offsets_that_point_at_hostile_members_are_refused(tmp_path, name, fields, tar_format):
    canary, path = tmp_path / "canary", tmp_path / "000.tar"
    with tarfile.open(path, "w", format=tar_format) as tar:
        info = tarfile.TarInfo(name)
        data = pickle.dumps(Canary(canary))
        info.size = 0 if fields else len(data)
        info.mtime = 0.5 if tar_format == tarfile.PAX_FORMAT else 0
        for field, value in fields.items():
            setattr(info, field, value)
        tar.addfile(info, io.BytesIO(data))
    with tarfile.open(path) as tar:
        member = tar.next()
    row = (member.offset, member.offset_data - member.offset, member.size, 0)
    rows = np.array([row], [("start", "<u8"), ("headers", "<u4"), ("size", "<u4"), ("label", "<u4")])
    np.save(tmp_path / "all.index.npy", rows)
    with pytest.raises(UserError, match="sample number 0: expected an image of"):
        IndexReader([ShardFile(str(path), 1)], tmp_path / "all.index.npy", 10).read(0)
    assert not canary.exists()


def test_a_shard_that_changed_under_its_index_is_refused(tmp_path):
    write_shards(tmp_path, (3,))
    other = tmp_path / "other"
    write_shards(other, (1, 3))
    (other / "001.tar").rename(tmp_path / "000.tar")  # the same size, other names: keys are those of the shard
    reader = IndexReader([ShardFile(str(tmp_path / "000.tar"), 3)], tmp_path / "all.index.npy", 10)
    assert reader.read(0).key == "000001"
    (tmp_path / "000.tar").write_bytes(bytes(10240))
    with pytest.raises(UserError, match="expected an image of"):
        IndexReader(reader.shards, reader.offsets, 10).read(0)
    (tmp_path / "000.tar").unlink()
    with pytest.raises(UserError, match=r"shard .*000\.tar: cannot read it: No such file or directory"):
        IndexReader(reader.shards, reader.offsets, 10).read(0)


@pytest.mark.parametrize("reader", ["index", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_held_out_samples_are_the_rest_on_all_ranks(tmp_path, monkeypatch, reader, workers):
    write_shards(tmp_path, (9, 4, 17))
    monkeypatch.setattr(Ten, "train_split", "all")
    monkeypatch.setattr(sharded, "_distributed", lambda: True)
    monkeypatch.setattr(sharded.dist, "get_world_size", lambda: 2)
    train, validation = [], []
    for rank in range(2):
        monkeypatch.setattr(sharded.dist, "get_rank", lambda rank=rank: rank)
        data = Ten(str(tmp_path), 1, num_workers=workers, image_size=8, val_fraction=0.2, reader=reader)
        data.setup("fit")
        for loader, found in ((data.train_dataloader(), train), (data.val_dataloader(), validation)):
            loader.stream.with_keys = True
            found += [key for batch in loader for key in batch[2]]
    assert len(validation) == 6
    assert sorted(train + validation) == [f"{number:06d}" for number in range(30)]
