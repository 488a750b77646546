"""Images that cannot be decoded: their place in a training batch is filled, and they are named; evaluation stops."""

import io
import random
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from lapbench.datamodules.convert.index import index
from lapbench.datamodules.indexed import IndexReader
from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.orders import IndexOrder, StreamOrder
from lapbench.datamodules.plan import Plan, Read, mixed
from lapbench.datamodules.shards import ShardFile, ShardReader
from lapbench.datamodules.streaming import ShardStream, seed_sample
from lapbench.errors import UserError

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.parametrize("reader", ["index", "stream"]),
]
COUNTS = (7, 5)


def png(value):
    stream = io.BytesIO()
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def make_files(folder, damaged):
    """Shards of samples 0..11 (key and grey value i, label i % 10), of which some are cut in the middle."""
    number = 0
    for shard, count in enumerate(COUNTS):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for _ in range(count):
                image = png(number)[: 40 if number in damaged else None]
                for name, data in ((f"{number:02d}.png", image), (f"{number:02d}.cls", b"%d" % (number % 10))):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
                number += 1
    index(folder, "t", {"all": "*.tar"}, tuple("0123456789"))
    return [ShardFile(str(folder / f"{shard}.tar"), count) for shard, count in enumerate(COUNTS)]


def augmented(image):
    """The grey value, and one draw of each generator that augmentations may use."""
    values = [np.asarray(image)[0, 0], random.random(), np.random.random(), torch.rand(()).item()]  # noqa: NPY002
    return torch.tensor(values, dtype=torch.float64)


def stream_of(folder, reader, damaged, batch_size=4, training=True, repeats=1):
    files = make_files(folder, damaged)
    if reader == "index":
        source = IndexReader(files, folder / "all.index.npy", 10)
        order = IndexOrder(Plan(source.counts(), batch_size, training, repeats=repeats), source)
    else:
        source = ShardReader(files, 10)
        order = StreamOrder(Plan(source.counts(), batch_size, training, repeats=repeats), source, 4)
    return ShardStream(order, augmented, channels=1, with_keys=True)


def rows(batches):
    """Key, label, value and draws of every image, batch by batch."""
    return [
        [(key, label, *row) for key, label, row in zip(keys, labels.tolist(), images.tolist(), strict=True)]
        for images, labels, keys in batches
    ]


def expected_rows(whole, damaged, epoch, repeats):
    """What must come out, from the batches ``whole`` of the same shards undamaged."""
    result = []
    for batch in whole:
        keys = [int(row[0]) for row in batch]
        seen: dict[int, int] = {}
        out = []
        for place, key in enumerate(keys):
            repeat = seen.get(key, 0)
            seen[key] = repeat + 1
            after = [*keys[place:], *keys[:place]]
            taken = next(other for other in after if other not in damaged)
            seed_sample(mixed(0, epoch, key, repeat if repeats > 1 else 0))
            out.append((f"{taken:02d}", taken % 10, *augmented(np.full((1, 1), taken)).tolist()))
        result.append(out)
    return result


@pytest.mark.parametrize("repeats", [1, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_the_next_good_image_of_the_batch_takes_the_place(tmp_path, reader, workers, repeats):
    damaged = {1, 5, 6}
    (tmp_path / "whole").mkdir()
    whole = ResumableLoader(stream_of(tmp_path / "whole", reader, (), repeats=repeats), num_workers=workers)
    loader = ResumableLoader(stream_of(tmp_path, reader, damaged, repeats=repeats), num_workers=workers)
    assert len(loader) == len(whole) == 3
    found = 0
    for epoch in range(3):
        undamaged = rows(whole)
        assert rows(loader) == expected_rows(undamaged, damaged, epoch, repeats)
        met = [int(row[0]) for batch in undamaged for row in batch if int(row[0]) in damaged]
        assert loader.damaged == [f"shard {tmp_path}/{int(i >= COUNTS[0])}.tar, sample {i:02d}" for i in met]
        found += len(met)
        loader.damaged.clear()
    assert found > 3
    assert whole.damaged == []


def test_going_on_in_the_middle_fills_the_same_places(tmp_path, reader):
    stream = stream_of(tmp_path, reader, {0, 3, 8, 9})
    whole = list(stream.batches(5, 0, 0, 1))
    for start in range(4):
        rest = list(stream.batches(5, start, 0, 1))
        assert rows(item.batch for item in rest) == rows(item.batch for item in whole[start:])
        assert [item.damaged for item in rest] == [item.damaged for item in whole[start:]]
    assert sum(len(item.damaged) for item in whole) == 4


def test_a_batch_without_a_good_image_is_an_error(tmp_path, reader):
    loader = ResumableLoader(stream_of(tmp_path, reader, range(12)))
    with pytest.raises(
        UserError, match=r"^shard .*tar, sample [0-9]+: cannot decode.*; none of the 4 images"
    ) as caught:
        list(loader)
    assert "\n" not in str(caught.value)


def test_several_tensors_of_an_image_are_filled_alike(tmp_path, reader):
    stream = stream_of(tmp_path, reader, {1, 5, 6})
    single = list(ResumableLoader(stream))
    stream.transform = lambda image: [augmented(image), augmented(image)]
    loader = ResumableLoader(stream)
    for (images, *rest), ((first, second), *others) in zip(single, loader, strict=True):
        assert torch.equal(first, images)
        assert torch.equal(second[:, 0], images[:, 0])
        assert not torch.equal(second, first)
        assert torch.equal(others[0], rest[0])
        assert others[1] == rest[1]
    assert len(loader.damaged) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_stops_at_the_first(tmp_path, reader, workers):
    loader = ResumableLoader(stream_of(tmp_path, reader, {6}, training=False), num_workers=workers)
    with pytest.raises(UserError, match=rf"^shard {tmp_path}/0\.tar, sample 06: cannot decode the image") as caught:
        list(loader)
    assert "none of" not in str(caught.value)
    assert loader.damaged == []


def test_a_mistake_in_the_transform_is_no_damage(tmp_path, reader):
    def broken(_image):
        raise UserError("no such policy")

    stream = stream_of(tmp_path, reader, ())
    stream.transform = broken
    with pytest.raises(UserError, match=r"^no such policy$"):
        list(ResumableLoader(stream))


def test_a_wrong_count_or_index_stops_training_too(tmp_path, reader):
    stream = stream_of(tmp_path, reader, ())
    (tmp_path / "1.tar").write_bytes((tmp_path / "1.tar").read_bytes()[:600])
    with pytest.raises(UserError, match=rf"^shard {tmp_path}/1\.tar"):
        list(ResumableLoader(stream))
    if reader == "stream":
        with pytest.raises(UserError, match="sample"):
            list(stream.order.reader.read([Read(1, 0, 5)]))
