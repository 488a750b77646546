import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from lapbench.datamodules import shards
from lapbench.datamodules.convert import main
from lapbench.datamodules.convert.formats import IMAGE_EXTENSIONS
from lapbench.datamodules.convert.scan import EXECUTABLE
from lapbench.datamodules.manifest import Manifest
from lapbench.errors import UserError

Members = list[tuple[str, bytes]]


def write_tar(path: Path, members: Members, **kwargs: Any) -> None:
    with tarfile.open(path, "w", **kwargs) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(content))


def sample(key: str, label: int, extension: str = "jpg") -> Members:
    return [(f"{key}.{extension}", b"\xff\xd8\xff..."), (f"{key}.cls", str(label).encode()), (f"{key}.json", b"{}")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three train shards of 3 samples and a val shard of 2, in the manner of ImageNet's public shards."""
    for number in range(3):
        members = [m for i in range(3) for m in sample(f"n0144076{i}_{number}", 3 * number + i)]
        write_tar(tmp_path / f"imagenet1k-train-{number:04d}.tar", members)
    write_tar(
        tmp_path / "imagenet1k-validation-00.tar",
        [("./", b""), *sample("./a", 4, "JPEG"), ("./README", b"x"), *sample("./b", 0, "png")],
        format=tarfile.PAX_FORMAT,
        pax_headers={"comment": "x"},
    )
    return tmp_path


def index(folder: Path, *more: str) -> int:
    splits = ["--split", "train=imagenet1k-train-*.tar", "--split", "val=imagenet1k-validation-*.tar"]
    return main(["index", str(folder), "--dataset", "imagenet", *splits, *more])


def test_index(folder: Path, capsys: Any) -> None:
    assert index(folder) == 0
    assert capsys.readouterr().out.startswith("imagenet: 9 train + 2 val images of 9 classes in 4 shards")
    manifest = Manifest.load(folder)
    assert [(s.file, s.samples) for s in manifest.split("train")] == [
        (f"imagenet1k-train-{i:04d}.tar", 3) for i in range(3)
    ]
    assert all(s.bytes == (folder / s.file).stat().st_size for s in manifest.split("train"))
    first = (folder / "manifest.json").read_bytes()
    assert index(folder) == 0
    assert (folder / "manifest.json").read_bytes() == first
    assert index(folder, "--num-classes", "1000") == 0
    assert Manifest.load(folder).num_classes == 1000


def test_class_names_from_a_file(folder: Path) -> None:
    (folder / "classes.txt").write_text("".join(f"n{i}\n" for i in range(9)))
    assert index(folder, "--classes", str(folder / "classes.txt")) == 0
    assert Manifest.load(folder).classes == tuple(f"n{i}" for i in range(9))
    (folder / "classes.txt").write_text("a\n\nb\n")
    with pytest.raises(UserError, match=r"expected one name on every line"):
        index(folder, "--classes", str(folder / "classes.txt"))
    with pytest.raises(UserError, match=r"--classes .*nowhere: No such file"):
        index(folder, "--classes", str(folder / "nowhere"))


def test_the_rules_are_those_of_the_reader() -> None:
    assert set(IMAGE_EXTENSIONS) == set(shards.IMAGE_SUFFIXES)
    assert set(EXECUTABLE) == set(shards.CODE_SUFFIXES)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([], r"is an empty shard"),
        ([("README", b"x")], r"is an empty shard"),
        (sample("a", 0)[:1] + sample("b", 0), r"sample a has no \.cls"),
        (sample("a", 0) + sample("b", 0)[1:], r"sample b must have one image.*it has \.cls, \.json"),
        ([("a.cls", b"0")], r"sample a must have one image"),
        ([("a.jpg", b""), ("a.cls", b"0")], r"sample a has an empty image"),
        ([*sample("a", 0), ("a.png", b"x")], r"sample a must have one image.*it has \.jpg, \.cls, \.json, \.png"),
        ([*sample("a", 0), ("a.cls", b"1")], r"member a\.cls is there twice"),
        ([("a.jpg", b"x"), ("a.cls", b"cat")], r"member a\.cls must hold 0\.\.8 in ASCII digits, got b'cat'"),
        ([("a.jpg", b"x"), ("a.cls", b"9")], r"member a\.cls must hold 0\.\.8 in ASCII digits, got b'9'"),
        ([("a.jpg", b"x"), ("a.cls", b"-1")], r"member a\.cls must hold 0\.\.8"),
        ([("a.jpg", b"x"), ("a.cls", "٣".encode())], r"member a\.cls must hold 0\.\.8"),
        ([("a.jpg", b"x"), ("a.cls", b"")], r"member a\.cls must hold 0\.\.8"),
        ([("a.jpg", b"x"), ("a.cls", b"1" + b" " * 99)], r"member a\.cls must hold 0\.\.8"),
        ([("../a.jpg", b"x"), ("../a.cls", b"0")], r"member '\.\./a\.jpg' has a name that leads out"),
        ([("/tmp/a.jpg", b"x")], r"member '/tmp/a\.jpg' has a name that leads out"),
        ([("C:/a.jpg", b"x")], r"member 'C:/a\.jpg' has a name that leads out"),
        ([*sample("a", 0), ("a.pkl", b"x")], r"member 'a\.pkl' is of a format that can run code"),
        ([*sample("a", 0), ("a.x.PICKLE.gz", b"x")], r"is of a format that can run code"),
        ([*sample("a", 0), ("a.pth", b"x")], r"is of a format that can run code"),
    ],
)
def test_bad_shards(folder: Path, members: Members, message: str) -> None:
    write_tar(folder / "imagenet1k-train-0001.tar", members)
    with pytest.raises(UserError, match=rf"imagenet1k-train-0001\.tar.*{message}") as caught:
        index(folder, "--num-classes", "9")
    assert "\n" not in str(caught.value)
    assert not (folder / "manifest.json").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_special_files(folder: Path, kind: bytes) -> None:
    with tarfile.open(folder / "imagenet1k-train-0001.tar", "w") as tar:
        info = tarfile.TarInfo("a.jpg")
        info.type, info.linkname = kind, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(UserError, match=r"imagenet1k-train-0001\.tar: member 'a\.jpg' is a link or special file"):
        index(folder)


def test_every_truncation_is_noticed(folder: Path) -> None:
    path = folder / "imagenet1k-train-0002.tar"
    whole = path.read_bytes()
    needed = 9 * 1024 + 512  # nine members of a header and a block each, then at least one block of zeros
    for length in [*range(0, needed, 256), needed - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"imagenet1k-train-0002\.tar (is truncated|has data)"):
            index(folder)
    # A header damaged in the middle is not the end either, nor is a second archive behind the first.
    path.write_bytes(whole[:3072] + b"\x07" + whole[3073:])
    with pytest.raises(UserError, match=r"is truncated or damaged after member n01440760_2\.json"):
        index(folder)
    path.write_bytes(whole + whole)
    with pytest.raises(UserError, match=r"has data after its end"):
        index(folder)
    path.write_bytes(b"not a tar file" * 100)
    with pytest.raises(UserError, match=r"is truncated or no tar file"):
        index(folder)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "val=../*.tar"], r"must name files in"),
        (["--split", "val=*.nothing"], r"--split val=\*\.nothing: no such files"),
        (["--split", "val"], r"--split val: expected NAME=GLOB"),
        (["--split", "train=*.tar"], r"--split train is given twice"),
        (["--split", "val=imagenet1k-train-*.tar"], r"split 'val'.*listed once, got 'imagenet1k-train-0000\.tar'"),
        (["--num-classes", "0"], r"--num-classes: expected a whole number of at least 1, got '0'"),
        (["--num-classes", "3", "--classes", "x"], r"not allowed with"),
        (["--num-class", "3"], r"unrecognized arguments: --num-class"),
    ],
)
def test_bad_arguments(folder: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(["index", str(folder), "--dataset", "i", "--split", "train=imagenet1k-train-*.tar", *arguments])


def test_missing_folder_and_converted_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no folder .*nowhere"):
        index(tmp_path / "nowhere")
    assert index(folder) == 0
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"source": {"origin": "x"}}))
    with pytest.raises(UserError, match=r"holds a converted data set"):
        index(folder)
    (folder / ".convert.journal").touch()
    with pytest.raises(UserError, match=r"holds an unfinished conversion"):
        index(folder)
