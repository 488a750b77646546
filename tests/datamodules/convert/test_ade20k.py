"""ADE20K from its archive or folder: every pair checked, bytes kept, interrupted conversions go on."""

import io
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lapbench.datamodules.convert import ade20k, main
from lapbench.datamodules.convert.pairs import check_layout
from lapbench.datamodules.layout import LAYOUT, Layout
from lapbench.errors import UserError

COUNTS = {"training": 3, "validation": 2}


def jpg(seed: int, size: tuple[int, int] = (20, 12)) -> bytes:
    """Noise of ``size`` (width, height)."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, "JPEG")
    return stream.getvalue()


def png(label: int, size: tuple[int, int] = (20, 12), mode: str = "L") -> bytes:
    stream = io.BytesIO()
    image = Image.new(mode, size, 0)
    image.putpixel((3, 2), label if len(mode) == 1 else (label,) * len(mode))
    image.save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three and two pairs, with what else the unpacked archive holds."""
    root = tmp_path / "ADEChallengeData2016"
    for split, count in COUNTS.items():
        for kind in ("images", "annotations"):
            (root / kind / split).mkdir(parents=True)
        for number in range(count):
            (root / f"images/{split}/ADE_{number}.jpg").write_bytes(jpg(number))
            (root / f"annotations/{split}/ADE_{number}.png").write_bytes(png(150 - number))
    (root / "objectInfo150.txt").write_text("Idx\n")
    (root / "images/training/.DS_Store").write_text("x")
    return root


def zipped(source: Path, *more: tuple[zipfile.ZipInfo | str, bytes]) -> Path:
    path = source.parent / "ADEChallengeData2016.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(source.rglob("*")):
            archive.write(file, str(file.relative_to(source.parent)))
        for member, content in more:
            archive.writestr(member, content)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*/*")}


def run(source: Path, out: Path) -> int:
    return main(["ade20k", "--source", str(source), "--out", str(out)])


@pytest.mark.parametrize("form", ["folder", "parent", "zip"])
def test_bytes_are_kept(source: Path, tmp_path: Path, form: str, capsys: Any) -> None:
    out, wanted = tmp_path / "out", files(source)
    del wanted["images/training/.DS_Store"]
    assert run({"folder": source, "parent": source.parent, "zip": zipped(source)}[form], out) == 0
    assert files(out) == wanted
    assert {path.name for path in out.iterdir()} == {"images", "annotations", LAYOUT}
    layout = Layout.load(out)
    assert (layout.dataset, layout.num_classes, layout.images) == ("ade20k", 150, COUNTS)
    assert capsys.readouterr().out.splitlines() == [
        f"ade20k: 3 training + 2 validation images with masks of 150 classes in {out}",
        "this is not the whole benchmark, which has 20,210 + 2,000 images",
        f"next: lapbench fit --config segmentation/ade20k_linear --data.init_args.data_dir {out}",
    ]
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert run(zipped(source), out) == 0  # the same files, whatever holds them
    assert capsys.readouterr().out.startswith("already converted: ade20k: 3 training")
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_in_place(source: Path) -> None:
    before = files(source)
    assert ade20k.convert(source, source)[1] is False
    assert files(source) == before
    assert Layout.load(source).images == COUNTS
    assert ade20k.convert(source, source)[1] is True


def test_an_interrupted_conversion_goes_on(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, write, written = tmp_path / "out", ade20k.write_atomically, []

    def stop_at_the_third_pair(path: Path, content: bytes, mode: int | None) -> None:
        if path.stem == "ADE_2" and not resumed:
            path.parent.mkdir(parents=True, exist_ok=True)
            (path.parent / f".{path.name}.1.tmp").write_bytes(content[:10])
            raise KeyboardInterrupt
        written.append(path)
        write(path, content, mode)

    resumed = False
    monkeypatch.setattr(ade20k, "write_atomically", stop_at_the_third_pair)
    assert run(source, out) == 130
    assert not (out / LAYOUT).exists()
    resumed, first = True, set(written)
    assert run(source, out) == 0
    assert len(written) == len(set(written)) == 10  # nothing twice
    assert first < set(written)
    assert {path.name for path in out.rglob(".*")} == set()
    ade20k.convert(source, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


def test_another_source_is_refused(source: Path, tmp_path: Path) -> None:
    ade20k.convert(source, tmp_path / "out")
    for kind, content in (("images", jpg(9)), ("annotations", png(9))):
        (source / kind / f"training/ADE_9.{'jpg' if kind == 'images' else 'png'}").write_bytes(content)
    with pytest.raises(UserError, match=r"out holds ade20k with listing_sha256 .* choose another --out"):
        ade20k.convert(source, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").touch()
    with pytest.raises(UserError, match=r"full is not empty \(notes.txt\)"):
        ade20k.convert(source, tmp_path / "full")


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no mask": (
        lambda root: (root / "annotations/training/ADE_1.png").unlink(),
        r"images/training/ADE_1\.jpg has no annotations/training/ADE_1\.png$",
    ),
    "no images": (
        lambda root: [path.unlink() for path in root.glob("images/training/ADE_[12].jpg")],
        r"annotations/training/ADE_1\.png has no images/training/ADE_1\.jpg \(nor 1 others theirs\)",
    ),
    "missing split": (lambda root: shutil.rmtree(root / "images/validation"), r"cannot read the folder .*validation"),
    "empty split": (
        lambda root: [path.unlink() for path in root.glob("*/validation/*")],
        r"no images/validation/\*\.jpg$",
    ),
    "damaged mask": (
        lambda root: (root / "annotations/training/ADE_0.png").write_bytes(png(1)[:40]),
        r"annotations/training/ADE_0\.png is no intact PNG file \(40 bytes\)",
    ),
    "truncated image": (
        lambda root: (root / "images/training/ADE_2.jpg").write_bytes(jpg(0)[:-40]),
        r"images/training/ADE_2\.jpg: cannot decode the image",
    ),
    "size": (
        lambda root: (root / "annotations/training/ADE_0.png").write_bytes(png(1, (12, 20))),
        r"ADE_0\.png: expected the size of its image, 20 x 12, got 12 x 20",
    ),
    "colour mask": (
        lambda root: (root / "annotations/training/ADE_0.png").write_bytes(png(1, mode="RGB")),
        r"ADE_0\.png: a mask must have one channel of 8 bits, got mode RGB",
    ),
    "label": (
        lambda root: (root / "annotations/validation/ADE_1.png").write_bytes(png(151)),
        r"annotations/validation/ADE_1\.png: labels must be 0\.\.150, got 151 \(row 2, column 3\)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(source: Path, tmp_path: Path, mistake: str) -> None:
    make, message = MISTAKES[mistake]
    make(source)
    for run_it in (lambda: ade20k.convert(source, tmp_path / "out"), lambda: check_layout(source, 150)):
        with pytest.raises(UserError, match=message) as error:
            run_it()
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / LAYOUT).exists()


def test_layouts_may_have_fewer_classes(source: Path) -> None:
    assert check_layout(source, 150) == COUNTS
    with pytest.raises(UserError, match=r"labels must be 0\.\.149, got 150"):
        check_layout(source, 149)


def link(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.external_attr = 0o120777 << 16
    return member


@pytest.mark.parametrize(
    ("member", "message"),
    [
        ("ADEChallengeData2016/../../x", "leads out of a folder: refused"),
        ("/etc/passwd", "leads out of a folder: refused"),
        ("C:/x", "leads out of a folder: refused"),
        (link("ADEChallengeData2016/images/training/ADE_7.jpg"), "is a link or special file: refused"),
        ("other/images/training/ADE_1.jpg", r"images/training/ADE_1\.jpg is there twice"),
    ],
)
def test_unsafe_members_are_refused(source: Path, tmp_path: Path, member: str | zipfile.ZipInfo, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ade20k.convert(zipped(source, (member, b"x")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_archives(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = zipped(source).read_bytes()
    path = tmp_path / "cut.zip"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"cut\.zip is no whole zip archive"):
        ade20k.convert(path, tmp_path / "out")
    place = whole.index(jpg(1)) + 300
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    with pytest.raises(UserError, match=r"cannot read member images/training/ADE_1\.jpg: Bad CRC-32"):
        ade20k.convert(path, tmp_path / "out")
    monkeypatch.setattr(ade20k, "LARGEST_FILE", 100)
    with pytest.raises(UserError, match=r"has \d+ bytes, more than 100: refused"):
        ade20k.convert(zipped(source), tmp_path / "out")
    with pytest.raises(UserError, match="no such file or folder"):
        ade20k.convert(tmp_path / "nothing", tmp_path / "out")


def test_layout_files(source: Path, tmp_path: Path) -> None:
    ade20k.convert(source, source)
    content = json.loads((source / LAYOUT).read_text())
    os.rename(source / "images/training/ADE_0.jpg", source / "kept.jpg")
    os.rename(source / "annotations/training/ADE_0.png", source / "kept.png")
    with pytest.raises(UserError, match=r"expected 3 images in training as in layout\.json, got 2"):
        Layout.load(source)
    for change, message in (
        ({"format": 2}, "'format' must be 1, got 2"),
        ({"dataset": ""}, "'dataset' must be a name"),
        ({"num_classes": 255}, r"'num_classes' must be 1\.\.254, got 255"),
        ({"images": {"training": 3}}, "'images' must be of training and validation"),
        ({"images": {"training": 3, "validation": 0}}, "'images' of validation must be a positive whole number, got 0"),
        ({"source": []}, "'source' must be an object"),
    ):
        (source / LAYOUT).write_text(json.dumps(content | change))
        with pytest.raises(UserError, match=message):
            Layout.load(source)
    with pytest.raises(UserError, match=r"no data folder .*elsewhere: make it with `lapbench data ade20k"):
        Layout.load(tmp_path / "elsewhere")
