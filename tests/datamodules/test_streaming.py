"""Both readers over real shards: order, resume, augmentation, and what must never come out of a shard."""

import io
import pickle
import random
import tarfile
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import zip_longest
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from lapbench.datamodules import shards as shards_module
from lapbench.datamodules.indexed import IndexReader
from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.orders import IndexOrder, StreamOrder, shuffled
from lapbench.datamodules.plan import Plan, Read, mixed
from lapbench.datamodules.shards import ShardFile, ShardReader, check_url
from lapbench.datamodules.streaming import ShardStream, random_state_kept, seed_sample
from lapbench.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def png(value, size=2):
    stream = io.BytesIO()
    Image.fromarray(np.full((size, size), value, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def add(tar, name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    tar.addfile(info, io.BytesIO(data))


def write_shards(folder, counts):
    """Shards whose sample i has key ``{i:06d}``, label i % 10 and an image of the grey value i % 256."""
    files, number = [], 0
    for shard, count in enumerate(counts):
        path = folder / f"{shard:03d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for _ in range(count):
                add(tar, f"{number:06d}.png", png(number % 256))
                add(tar, f"{number:06d}.cls", str(number % 10).encode())
                number += 1
        files.append(ShardFile(str(path), count))
    return files


def write_index(files):
    """The index of shards as the standard library's tarfile sees them."""
    dtype = [("start", "<u8"), ("headers", "<u4"), ("size", "<u4"), ("label", "<u4")]
    rows = []
    for file in files:
        with tarfile.open(file.url) as tar:
            members = tar.getmembers()
            for image, label in zip(members[::2], members[1::2], strict=True):
                value = int(tar.extractfile(label).read())
                rows.append((image.offset, image.offset_data - image.offset, image.size, value))
    path = Path(files[0].url).with_name("split.index.npy")
    np.save(path, np.array(rows, dtype))
    return path


def first_pixel(image):
    return torch.tensor([[[float(np.asarray(image)[0, 0])]]])


def draws(_image):
    """One draw from each generator that augmentations may use."""
    return torch.tensor([random.random(), np.random.random(), torch.rand(()).item()], dtype=torch.float64)  # noqa: NPY002


def make_stream(files, batch_size, training, reader="stream", transform=first_pixel, buffer=16, in_use=None, **plan):
    if reader == "index":
        source = IndexReader(files, write_index(files), 10, in_use)
        order = IndexOrder(Plan(source.counts(), batch_size, training, **plan), source)
    else:
        source = ShardReader(files, 10, in_use)
        order = StreamOrder(Plan(source.counts(), batch_size, training, **plan), source, buffer)
    return ShardStream(order, transform, channels=1, with_keys=True)


both = pytest.mark.parametrize("reader", ["stream", "index"])


def numbers(batches):
    return [int(key) for batch in batches for key in batch[2]]


def in_turn(stream, workers, epoch=0, start=0):
    """What a loader with ``workers`` workers yields, without the processes."""
    parts = [[item.batch for item in stream.batches(epoch, start, worker, workers)] for worker in range(workers)]
    return [batch for turn in zip_longest(*parts) for batch in turn if batch is not None]


@both
@pytest.mark.parametrize("counts", [(50, 40, 11), (101,)])
@pytest.mark.parametrize(("ranks", "workers"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_101_samples(tmp_path, reader, counts, ranks, workers):
    files = write_shards(tmp_path, counts)
    values, keys, steps = [], [], set()
    for rank in range(ranks):
        batches = in_turn(make_stream(files, 8, False, reader, rank=rank, world_size=ranks), workers)
        values += [value for images, _, _ in batches for value in images.flatten().tolist()]
        keys += numbers(batches)
        steps.add(len(batches))
        for images, labels, names in batches:
            assert images.flatten().tolist() == [float(name) for name in names]
            assert labels.tolist() == [int(name) % 10 for name in names]
    assert sorted(keys) == list(range(101))
    assert np.mean(values) == 50.0
    assert len(steps) == 1

    drawn, steps = [], set()
    for rank in range(ranks):
        batches = in_turn(make_stream(files, 8, True, reader, rank=rank, world_size=ranks), workers)
        drawn += numbers(batches)
        steps.add(len(batches))
    assert steps == {101 // (8 * ranks)}
    assert len(set(drawn)) == len(drawn) == steps.pop() * 8 * ranks


@both
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (3, False), (2, True)])
def test_the_loader_yields_what_the_plan_says(tmp_path, reader, workers, persistent):
    stream = make_stream(write_shards(tmp_path, (7, 0, 9, 5)), 4, True, reader)
    loader = ResumableLoader(stream, num_workers=workers, persistent_workers=persistent)
    for epoch in range(3):
        assert numbers(loader) == numbers(in_turn(stream, max(1, workers), epoch))
    assert len(loader) == 5


@both
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_stopped_after_step_5_and_resumed(tmp_path, reader, workers):
    stream = make_stream(write_shards(tmp_path, (12, 8)), 2, True, reader)
    whole = numbers(in_turn(stream, workers))
    before, after = numbers(in_turn(stream, workers)[:5]), numbers(in_turn(stream, workers, start=5))
    assert before + after == whole
    assert sorted(whole) == list(range(20))


@both
@pytest.mark.parametrize("saved", [0, 20, 99, 100])
def test_resume_at_any_batch(tmp_path, reader, saved):
    stream = make_stream(write_shards(tmp_path, (60, 40)), 1, True, reader, buffer=16)
    assert numbers(in_turn(stream, 2, start=saved)) == numbers(in_turn(stream, 2))[saved:]


@both
def test_order_depends_on_seed_and_epoch_only(tmp_path, reader):
    files = write_shards(tmp_path, (30, 30, 30))
    first = numbers(in_turn(make_stream(files, 9, True, reader, seed=3), 2, epoch=0))
    assert first == numbers(in_turn(make_stream(files, 9, True, reader, seed=3), 2, epoch=0))
    assert first != numbers(in_turn(make_stream(files, 9, True, reader, seed=3), 2, epoch=1))
    assert first != numbers(in_turn(make_stream(files, 9, True, reader, seed=4), 2, epoch=0))
    assert first != sorted(first)
    lengths = {len(in_turn(make_stream(files, 9, True, reader, seed=3), workers)) for workers in (1, 2, 3, 4)}
    assert lengths == {10}


def test_shuffled_is_a_permutation_through_a_small_buffer():
    out = list(shuffled(range(200), 16, random.Random(0)))
    assert sorted(out) == list(range(200))
    # A sample can come out late, but at most buffer - 1 places early.
    assert all(value - place < 16 for place, value in enumerate(out))
    assert list(shuffled(range(200), 16, random.Random(0))) == out


@both
def test_augmentation_does_not_depend_on_workers_and_never_repeats(tmp_path, reader):
    files = write_shards(tmp_path, (14, 10))
    stream = make_stream(files, 4, True, reader, transform=draws)

    def epochs(workers):
        loader = ResumableLoader(make_stream(files, 4, True, reader, transform=draws), num_workers=workers)
        return [
            {key: tuple(row) for images, _, keys in loader for key, row in zip(keys, images.tolist(), strict=True)}
            for _ in range(2)
        ]

    alone = epochs(0)
    assert alone == epochs(2) == epochs(4)
    values = [value for epoch in alone for row in epoch.values() for value in row]
    assert len(set(values)) == len(values) == 2 * 24 * 3
    # The stated seed: (seed, epoch, sample, repeat).
    seed_sample(mixed(stream.plan.seed, 1, 7, 0))
    assert alone[1]["000007"] == tuple(draws(None).tolist())


def test_loading_in_the_main_process_leaves_its_generators_alone(tmp_path):
    stream = make_stream(write_shards(tmp_path, (8,)), 4, True, transform=draws)
    for seed in (0, 1):
        seed_sample(seed)
        expected = draws(None).tolist()
        seed_sample(seed)
        for _ in ResumableLoader(stream):
            pass
        assert draws(None).tolist() == expected
    with random_state_kept():
        state = draws(None).tolist()
    assert draws(None).tolist() == state


@both
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("workers", [1, 2])
def test_repeated_augmentation(tmp_path, reader, ranks, workers):
    files = write_shards(tmp_path, (12, 18))
    found = []
    for rank in range(ranks):
        stream = make_stream(files, 3, True, reader, transform=draws, repeats=3, rank=rank, world_size=ranks)
        batches = in_turn(stream, workers)
        assert len(batches) == 10 // ranks
        found += [
            (key, tuple(row)) for images, _, keys in batches for key, row in zip(keys, images.tolist(), strict=True)
        ]
        # Anything else would change the samples after a resume.
        assert numbers(in_turn(stream, workers, start=2)) == numbers(batches)[6:]
    assert sorted(Counter(key for key, _ in found).values()) == [3] * 10
    assert len({row for _, row in found}) == 30


class Recorder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, _):
        self.seen += [int(key) for key in batch[2]]
        return self.layer(batch[0].flatten(1)).mean() * 0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Shards(pl.LightningDataModule):
    def __init__(self, files, workers, **settings):
        super().__init__()
        self.files, self.workers, self.settings = files, workers, settings

    def train_dataloader(self):
        stream = make_stream(self.files, **{"batch_size": 2, "training": True, **self.settings})
        return ResumableLoader(stream, self.trainer, self.workers, persistent_workers=True)


def trainer(tmp_path, **settings):
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        **settings,
    )


class Killed(Exception):
    pass


class KilledAfter(pl.Callback):
    """Saves a checkpoint after a step and ends the run as a signal would."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/last.ckpt")
            raise Killed


def record(tmp_path, files, workers=0, killed=0, resume=False, layout=None, **settings):
    """The numbers of the samples that a fit of three epochs was given, in order."""
    module = Recorder()
    fit = trainer(tmp_path, max_epochs=3, callbacks=[KilledAfter(killed)] if killed else None, **settings)
    with pytest.raises(Killed) if killed else nullcontext():
        fit.fit(
            module,
            datamodule=Shards(files, workers, **(layout or {})),
            ckpt_path=tmp_path / "last.ckpt" if resume else None,
            weights_only=True if resume else None,
        )
    return module.seen


@both
@pytest.mark.parametrize(("workers", "killed"), [(0, 3), (0, 10), (2, 13), (2, 20)])
def test_lightning_resumes_with_the_next_batch(tmp_path, reader, workers, killed):
    files = write_shards(tmp_path, (11, 10))
    whole = record(tmp_path, files, workers, layout={"reader": reader})
    assert len(whole) == 60
    before = record(tmp_path, files, workers, layout={"reader": reader}, killed=killed)
    assert before == whole[: 2 * killed]
    assert before + record(tmp_path, files, workers, layout={"reader": reader}, resume=True) == whole


def test_a_limited_epoch_counts_as_an_epoch(tmp_path):
    files = write_shards(tmp_path, (11, 10))
    whole = record(tmp_path, files, limit_train_batches=4)
    full = record(tmp_path, files)
    assert whole == [number for epoch in range(3) for number in full[epoch * 20 : epoch * 20 + 8]]
    half = record(tmp_path, files, limit_train_batches=0.5)
    assert half == [number for epoch in range(3) for number in full[epoch * 20 : epoch * 20 + 10]]


def test_a_changed_layout_is_refused_by_name(tmp_path):
    files = write_shards(tmp_path, (11, 10))
    record(tmp_path, files, killed=3)
    with pytest.raises(UserError, match=r": batch_size was 2 and is 4, shuffle_buffer was 16 and is 8; --allow"):
        record(tmp_path, files, resume=True, layout={"batch_size": 4, "buffer": 8})
    with pytest.raises(UserError, match="num_workers was 1 and is 2"):
        record(tmp_path, files, workers=2, resume=True)
    assert len(record(tmp_path, files, resume=True)) == 54


# What a reader makes of damaged, foreign and hostile shards.


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def read_all(url, samples=1, num_classes=10):
    return list(ShardReader([ShardFile(str(url), samples)], num_classes).read([Read(0, 0, samples)]))


HOSTILE = {
    "pickle": (
        lambda tar, canary: add(tar, "0.pkl", pickle.dumps(Canary(canary))),
        "'0.pkl': files that can carry code",
    ),
    "pyd": (lambda tar, canary: add(tar, "0.label.PYD", pickle.dumps(Canary(canary))), "'0.label.PYD': files that can"),
    "checkpoint": (lambda tar, canary: add(tar, "0.pth", pickle.dumps(Canary(canary))), "'0.pth': files that can"),
    "hidden": (lambda tar, canary: add(tar, "0.pkl.png", pickle.dumps(Canary(canary))), "'0.pkl.png': files that can"),
    "parent": (lambda tar, canary: add(tar, "../x.png", b"x"), "'../x.png': absolute names and names with"),
    "inner": (lambda tar, canary: add(tar, "a/../../x.png", b"x"), "absolute names and names with"),
    "absolute": (lambda tar, canary: add(tar, f"{canary}.png", b"x"), "canary.png': absolute names"),
    "drive": (lambda tar, canary: add(tar, "C:/x.png", b"x"), "'C:/x.png': absolute names"),
    "backslash": (lambda tar, canary: add(tar, "..\\x.png", b"x"), "absolute names"),
    "symlink": (
        lambda tar, canary: add(tar, "0.png", type=tarfile.SYMTYPE, linkname=str(canary)),
        "'0.png': links and special files",
    ),
    "hardlink": (
        lambda tar, canary: add(tar, "0.png", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        "'0.png': links and special files",
    ),
    "fifo": (lambda tar, canary: add(tar, "0.png", type=tarfile.FIFOTYPE), "'0.png': links and special files"),
}


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_members_are_refused(tmp_path, name, tar_format):
    write, message = HOSTILE[name]
    canary = tmp_path / "canary"
    path = tmp_path / "bad.tar"
    with tarfile.open(path, "w", format=tar_format) as tar:
        write(tar, canary)
        add(tar, "1.png", png(1))
        add(tar, "1.cls", b"1")
    with pytest.raises(UserError, match=message) as caught:
        read_all(path)
    assert f"shard {path}, member" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not canary.exists()


@pytest.mark.parametrize("scheme", ["pipe:touch {}", "PIPE:touch {}", "http://x/{}", "gs://x/{}", "s3://x/{}", "-", ""])
def test_other_urls_are_refused(tmp_path, scheme):
    canary = tmp_path / "canary"
    with pytest.raises(UserError, match=r"file: (and|or) https:"):
        read_all(scheme.format(canary))
    assert not canary.exists()


def test_environment_cannot_redirect_a_url(tmp_path, monkeypatch):
    # webdataset rewrites URLs from this variable, into pipe: if it says so.
    canary = tmp_path / "canary"
    monkeypatch.setenv("GOPEN_REWRITE", f"{tmp_path}=pipe:touch {canary};")
    files = write_shards(tmp_path, (3,))
    assert [sample.label for sample in read_all(files[0].url, 3)] == [0, 1, 2]
    assert not canary.exists()


def test_file_urls_and_https_streams(tmp_path, monkeypatch):
    (file,) = write_shards(tmp_path, (5,))
    expected = [sample[2:] for sample in read_all(file.url, 5)]
    assert [sample[2:] for sample in read_all(Path(file.url).as_uri(), 5)] == expected
    asked = []

    def opened(url):
        asked.append(url)
        return Unseekable(file.url)

    monkeypatch.setattr(shards_module, "gopen_curl", opened)
    assert [sample[2:] for sample in read_all("https://host/000.tar", 5)] == expected
    assert asked == ["https://host/000.tar"]
    assert check_url("HTTPS://host/x.tar")


class Unseekable(io.BufferedReader):
    def __init__(self, path):
        super().__init__(io.FileIO(path))

    def seek(self, *_):
        raise io.UnsupportedOperation("seek")


def test_shards_of_webdatasets_own_writer(tmp_path):
    # Its fractional times need extended headers, its keys may hold folders, and other files come along.
    path = tmp_path / "wds.tar"
    long = "train/" + "n01440764/" * 12 + "x"
    with webdataset.TarWriter(str(path)) as writer:
        writer.write({"__key__": "a/n1_0", "JPEG": png(7), "cls": b"3", "json": b"{}"})
        writer.write({"__key__": long, "png": png(9), "cls": b"5\n", "txt": b"hello"})
        writer.write({"__key__": "c", "webp": png(1), "cls": 0})
    samples = read_all(path, 3)
    assert [(sample.key, sample.label, sample.number) for sample in samples] == [
        ("a/n1_0", 3, 0),
        (long, 5, 1),
        ("c", 0, 2),
    ]
    assert samples[0].image == png(7)


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_compressed_shards(tmp_path, mode):
    path = tmp_path / "x.tar"
    with tarfile.open(path, mode) as tar:
        for i in range(3):
            add(tar, f"{i}.png", png(i))
            add(tar, f"{i}.cls", b"1")
    assert [sample.key for sample in read_all(path, 3)] == ["0", "1", "2"]


def damaged(tmp_path, kind):
    """A shard of three samples with one defect, and the message that it must give."""
    (file,) = write_shards(tmp_path, (3,))
    path = Path(file.url)
    if kind == "empty file":
        path.write_bytes(b"")
    elif kind == "empty tar":
        tarfile.open(path, "w").close()
    elif kind == "not a tar":
        path.write_bytes(b"<html>Not found</html>" * 100)
    elif kind == "cut inside a member":
        path.write_bytes(path.read_bytes()[: 512 + 40])
    elif kind == "cut inside a header":
        path.write_bytes(path.read_bytes()[: 1024 + 40])
    elif kind == "cut between members":
        path.write_bytes(path.read_bytes()[:4096])
    else:
        with tarfile.open(path, "w") as tar:
            for i in range(4 if kind == "one more" else 3):
                bad = i == 1
                if not (bad and kind == "no image"):
                    add(tar, f"{i}.png", png(i)[:40] if bad and kind == "truncated image" else png(i))
                label = {"label too large": b"10", "label negative": b"-1", "label text": b"cat"}.get(kind, b"1")
                if not (bad and kind == "no label"):
                    add(tar, f"{i}.cls", label if bad else b"1")
    return ShardFile(str(path), 3)


DAMAGE = {
    "empty file": "expected 3 samples as in the manifest, got 0",
    "empty tar": "expected 3 samples as in the manifest, got 0",
    "not a tar": "cannot read it as a tar file",
    "cut inside a member": "the file ends inside it",
    "cut inside a header": "cannot read it as a tar file: it ends inside a header",
    "cut between members": "expected 3 samples as in the manifest, got 2",
    "one more": "expected 3 samples as in the manifest, got more",
    "no image": "sample 1: it has no image",
    "no label": "sample 1: it has no label",
    "label too large": r"sample 1: expected a label in 0..9, got b'10'",
    "label negative": r"sample 1: expected a label in 0..9, got b'-1'",
    "label text": r"sample 1: expected a label in 0..9, got b'cat'",
    "truncated image": "sample 1: cannot decode the image",
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("training", [True, False])
def test_damage_is_reported_with_shard_and_sample(tmp_path, kind, training):
    file = damaged(tmp_path, kind)
    with pytest.raises(UserError, match=DAMAGE[kind]) as caught:
        list(ResumableLoader(make_stream([file], 1, training)))
    assert file.url in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_shard(tmp_path):
    with pytest.raises(UserError, match=r"shard .*none.tar: cannot read it as a tar file: No such file"):
        read_all(tmp_path / "none.tar")


def test_a_user_error_in_a_worker_arrives_as_one_line(tmp_path):
    file = damaged(tmp_path, "truncated image")
    with pytest.raises(UserError) as caught:
        list(ResumableLoader(make_stream([file], 1, False), num_workers=2))
    assert str(caught.value).startswith(f"shard {file.url}, sample 1: cannot decode the image")
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


@both
def test_in_use_selects_samples_by_number(tmp_path, reader):
    files = write_shards(tmp_path, (4, 3, 5))
    in_use = np.isin(np.arange(12), [0, 3, 7, 8, 11])
    stream = make_stream(files, 2, False, reader, in_use=in_use)
    assert stream.plan.samples == 5
    assert numbers(ResumableLoader(stream)) == [0, 3, 7, 8, 11]
    draws = [draw for batch in stream.order.batches(0, 0, 0, 1) for draw in batch]
    assert [draw.sample.number for draw in draws] == [0, 3, 7, 8, 11]
    training = make_stream(files, 1, True, reader, in_use=in_use)
    assert sorted(numbers(ResumableLoader(training))) == [0, 3, 7, 8, 11]


def test_ranges_of_samples_in_use(tmp_path):
    reader = ShardReader(write_shards(tmp_path, (4, 3, 5)), 10, np.isin(np.arange(12), [0, 3, 7, 8, 11]))
    assert reader.counts() == (2, 0, 3)
    assert [sample.number for sample in reader.read([Read(2, 1, 3), Read(0, 0, 1)])] == [8, 11, 0]


@both
def test_streams_pickle_for_spawned_workers(tmp_path, reader):
    stream = make_stream(write_shards(tmp_path, (4,)), 2, False, reader, transform=partial(first_pixel))
    assert numbers(ResumableLoader(stream)) == [0, 1, 2, 3]  # opens what it opens
    again = pickle.loads(pickle.dumps(stream.order))
    assert again.plan == stream.plan
    keys = [draw.sample.key for batch in again.batches(0, 0, 0, 1) for draw in batch]
    assert keys == ["000000", "000001", "000002", "000003"]
