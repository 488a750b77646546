import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lapbench.datamodules.convert import imagenet, main, pipeline
from lapbench.datamodules.convert.parquet import Parquet, find
from lapbench.datamodules.manifest import Manifest
from lapbench.errors import UserError


def convert(source: Path, out: Path, *more: str) -> int:
    return main(["imagenet", "--source", str(source), "--out", str(out), *more])


def test_class_folders(tmp_path: Path, class_folders: Path, tiny: Any, read_shards: Any, capsys: Any) -> None:
    out = tmp_path / "out"
    assert convert(class_folders, out, "--shard-size", "10") == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("imagenet: 36 train + 12 val images of 12 classes in 6 shards")
    assert "supervised/imagenet --data" in printed.out
    assert "imagenet train" in printed.err
    manifest = Manifest.load(out)
    assert manifest.classes == tuple(str(i) for i in range(12))  # not "0", "1", "10", "11", "2"
    assert [s.samples for s in manifest.split("train")] == [10, 10, 10, 6]
    train, val = read_shards(out, "train"), read_shards(out, "val")
    # Bytes untouched, label of folder "2" is 2.
    assert {(image, label) for _, _, image, label in train} == {
        (tiny.jpeg(100 * label + number), label) for label in range(12) for number in range(3)
    }
    assert {(image, label) for _, _, image, label in val} == {(tiny.jpeg(100 * c + 50), c) for c in range(12)}
    # A shard is not one class, and the keys say where a sample stands in the listing.
    assert len({label for *_, label in train[:10]}) > 4
    assert [int(key) // 3 for key, *_ in train] == [label for *_, label in train]
    assert sorted(int(key) for key, *_ in val) == list(range(12)) != [int(key) for key, *_ in val]


def test_wordnet_ids_and_png_in_disguise(tmp_path: Path, tiny: Any, read_shards: Any, capsys: Any) -> None:
    names = ["n02105855", "n01440764", "n10565667"]
    for split in ("train", "val"):
        for number, name in enumerate(names):
            (tmp_path / "in" / split / name).mkdir(parents=True)
            (tmp_path / "in" / split / name / f"{name}_1.JPEG").write_bytes(tiny.jpeg(number))
    (tmp_path / "in/train/n02105855/n02105855_2933.JPEG").write_bytes(tiny.png(1))
    (tmp_path / "in/train/n02105855/.DS_Store").write_bytes(b"x")
    (tmp_path / "in/train/n02105855/notes.txt").write_bytes(b"x")
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.classes == ("n01440764", "n02105855", "n10565667")
    assert "2 files that are no images are ignored" in capsys.readouterr().err
    samples = read_shards(tmp_path / "out", "train")
    assert {(ext, image, label) for _, ext, image, label in samples} == {
        ("jpg", tiny.jpeg(1), 0),
        ("jpg", tiny.jpeg(0), 1),
        ("png", tiny.png(1), 1),
        ("jpg", tiny.jpeg(2), 2),
    }


def test_different_classes(tmp_path: Path, class_folders: Path) -> None:
    (class_folders / "train/11").rename(class_folders / "train/n11")
    with pytest.raises(UserError, match=r"train has 12 classes, val 12: 1 only in train \(n11\); 1 only in val \(11\)"):
        convert(class_folders, tmp_path / "out")
    shutil.rmtree(class_folders / "train/n11")
    with pytest.raises(UserError, match=r"train has 11 classes, val 12: 1 only in val \(11\)"):
        convert(class_folders, tmp_path / "out")
    (class_folders / "train/9").rename(class_folders / "train/11")
    with pytest.raises(UserError, match=r"train: folders named by numbers must be 0\.\.10.*place 9 is '10'"):
        convert(class_folders, tmp_path / "out")


def test_wrong_folders(tmp_path: Path, class_folders: Path) -> None:
    with pytest.raises(UserError, match=r"--source .*nowhere: no such file or folder"):
        convert(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"no folder .*train: expected train/<class>/\*\.JPEG"):
        convert(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(UserError, match=r"must be a folder"):
        convert(class_folders / "val/3/img_50.JPEG", tmp_path / "out")
    (class_folders / "val/3/img_50.JPEG").unlink()
    with pytest.raises(UserError, match=r"val/3 holds no images"):
        convert(class_folders, tmp_path / "out")
    shutil.rmtree(class_folders / "val")
    (class_folders / "val").mkdir()
    (class_folders / "val/ILSVRC2012_val_00000001.JPEG").touch()
    with pytest.raises(UserError, match=r"val holds no class folders"):
        convert(class_folders, tmp_path / "out")


def test_damaged_images(tmp_path: Path, class_folders: Path, read_shards: Any, capsys: Any) -> None:
    (class_folders / "train/4/img_1.JPEG").write_bytes(b"")
    (class_folders / "val/7/img_50.JPEG").write_bytes(b"<html>404</html>")
    out = tmp_path / "out"
    with pytest.raises(UserError, match=r"train/4/img_1\.JPEG is empty or no JPEG, PNG or WebP.*--skip-damaged"):
        convert(class_folders, out, "--shard-size", "5")
    assert not list(out.glob("*partial")) + list(out.glob(".*partial"))
    # With the option the stopped conversion goes on.
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert convert(class_folders, out, "--shard-size", "5", "--skip-damaged") == 0
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}.items()
    damaged = [str(class_folders / "train/4/img_1.JPEG"), str(class_folders / "val/7/img_50.JPEG")]
    assert Manifest.load(out).source["damaged"] == damaged
    assert f"damaged images left out: 2, listed in the manifest; the first is {damaged[0]}" in capsys.readouterr().out
    assert Counter(label for *_, label in read_shards(out, "train")) == {c: 3 - (c == 4) for c in range(12)}
    assert [s.samples for s in Manifest.load(out).split("val")] == [5, 5, 1]
    # The same from the start gives the same bytes, damaged or not where a shard ends.
    for size in (1, 4, 7, 11):
        convert(class_folders, tmp_path / f"out{size}", "--shard-size", str(size), "--skip-damaged")
        assert Manifest.load(tmp_path / f"out{size}").source["damaged"] == damaged
        assert len(read_shards(tmp_path / f"out{size}", "train")) == 35


def test_nothing_readable(tmp_path: Path, class_folders: Path) -> None:
    for path in class_folders.glob("val/*/*"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"no readable image in val \(12 looked at\)"):
        convert(class_folders, tmp_path / "out", "--skip-damaged")
    assert not (tmp_path / "out/manifest.json").exists()


NAMES = [f"class {i}" for i in range(7)]


@pytest.fixture
def parquet_folder(tmp_path: Path, tiny: Any) -> Path:
    """Files of 11 and 6 train rows, and 5 val rows; the image of row i is ``jpeg(i)``, val ``jpeg(900 + i)``."""
    folder = tmp_path / "parquet" / "data"
    for name, first, count in (("train-00000-of-00002", 0, 11), ("train-00001-of-00002", 11, 6)):
        images = [tiny.jpeg(i) for i in range(first, first + count)]
        tiny.write_parquet(folder / f"{name}.parquet", images, [i % 7 for i in range(first, first + count)], NAMES)
    images = [tiny.jpeg(900 + i) for i in range(5)]
    tiny.write_parquet(folder / "validation-00000-of-00001.parquet", images, [i % 7 for i in range(5)], NAMES)
    tiny.write_parquet(folder / "test-00000-of-00001.parquet", [tiny.jpeg(1)], [-1], NAMES)
    return folder.parent


def test_parquet(tmp_path: Path, parquet_folder: Path, tiny: Any, read_shards: Any) -> None:
    out = tmp_path / "out"
    assert convert(parquet_folder, out, "--shard-size", "6") == 0
    assert Manifest.load(out).classes == tuple(NAMES)
    train, val = read_shards(out, "train"), read_shards(out, "val")
    assert sorted((int(k), image, label) for k, _, image, label in train) == [
        (i, tiny.jpeg(i), i % 7) for i in range(17)
    ]
    assert sorted((int(k), image) for k, _, image, _ in val) == [(i, tiny.jpeg(900 + i)) for i in range(5)]
    assert [int(key) for key, *_ in train] != list(range(17))


@pytest.mark.parametrize("block_bytes", [1, 2000, 10**9])
def test_parquet_from_any_position(parquet_folder: Path, block_bytes: int) -> None:
    source = Parquet(parquet_folder, find(parquet_folder), block_bytes)
    whole = list(source.samples("train", 0))
    assert sorted(sample.index for sample in whole) == list(range(17))
    for start in range(18):
        assert list(source.samples("train", start)) == whole[start:]


def test_parquet_places_name_file_and_row(parquet_folder: Path) -> None:
    source = Parquet(parquet_folder, find(parquet_folder))
    places = {sample.index: sample.place for sample in source.samples("train", 0)}
    assert places[13] == f"{parquet_folder}/data/train-00001-of-00002.parquet, row 2"


def test_parquet_without_names(tmp_path: Path, tiny: Any) -> None:
    for name, label in (("train-0", 0), ("train-1", 3), ("val-0", 2)):
        tiny.write_parquet(tmp_path / "in" / f"{name}.parquet", [tiny.jpeg(label)], [label])
    assert convert(tmp_path / "in", tmp_path / "out") == 0
    assert Manifest.load(tmp_path / "out").classes == ("0", "1", "2", "3")


@pytest.mark.parametrize("cut", [0, 3, 100, -1, -9])
def test_truncated_parquet(tmp_path: Path, parquet_folder: Path, cut: int) -> None:
    path = parquet_folder / "data/train-00001-of-00002.parquet"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"train-00001-of-00002\.parquet is not readable as parquet") as caught:
        convert(parquet_folder, tmp_path / "out")
    assert "\n" not in str(caught.value)


def test_parquet_damaged_inside(tmp_path: Path, parquet_folder: Path) -> None:
    path = parquet_folder / "data/train-00000-of-00002.parquet"
    content = bytearray(path.read_bytes())
    content[4:400] = b"\xff" * 396
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"train-00000-of-00002\.parquet, row group 0, is not readable"):
        convert(parquet_folder, tmp_path / "out")


def test_parquet_wrong_contents(tmp_path: Path, parquet_folder: Path, tiny: Any) -> None:
    path = parquet_folder / "data/train-00001-of-00002.parquet"
    for labels, names, message in (
        ([0, 7], NAMES, r"row 1: the label must be 0\.\.6, got 7"),
        ([None, 0], NAMES, r"row 0: the label must be 0\.\.6, got None"),
        ([0, 1], [*NAMES, "more"], r"train-00001-of-00002.parquet has other class names than .*train-00000"),
    ):
        tiny.write_parquet(path, [tiny.jpeg(0), tiny.jpeg(1)], labels, names)
        with pytest.raises(UserError, match=message):
            convert(parquet_folder, tmp_path / "out")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
    tiny.write_parquet(path, [tiny.jpeg(0), None, b""], [0, 1, 2], NAMES)
    with pytest.raises(UserError, match=r"row [12] is empty or no JPEG"):
        convert(parquet_folder, tmp_path / "out")
    assert convert(parquet_folder, tmp_path / "out", "--skip-damaged") == 0
    assert {text[-6:] for text in Manifest.load(tmp_path / "out").source["damaged"]} == {" row 1", " row 2"}
    (parquet_folder / "data/validation-00000-of-00001.parquet").unlink()
    with pytest.raises(UserError, match=r"has no val files"):
        convert(parquet_folder, tmp_path / "out2")


def test_parquet_other_columns(tmp_path: Path, parquet_folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = parquet_folder / "data/train-00001-of-00002.parquet"
    pq.write_table(pa.table({"img": [b"x"], "label": [1]}), path)
    with pytest.raises(UserError, match=r"expected a column 'image' of struct\{bytes, path\}, got 'None'"):
        convert(parquet_folder, tmp_path / "out")
    pq.write_table(pa.table({"image": [{"bytes": b"x", "path": ""}], "label": ["cat"]}), path)
    with pytest.raises(UserError, match=r"expected a column 'label' of integers, got 'string'"):
        convert(parquet_folder, tmp_path / "out")


def test_images_are_not_held(class_folders: Path) -> None:
    source: pipeline.Source = imagenet.open_source(class_folders)
    stream = source.samples("train", 30)
    assert len(list(stream)) == 6
