import io
import json
import pickle
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


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["0.pkl", "0.label.PYD", "0.pth", "0.pkl.png", "../x.png", "/tmp/x.png", "..\\x.png"])
def test_hostile_members_are_refused_and_nothing_runs(folder: Path, name: str, again: bool) -> None:
    canary, shard = folder / "canary", folder / "imagenet1k-train-0001.tar"
    if again:  # the shard was replaced after it was indexed
        assert index(folder) == 0
    write_tar(shard, [*sample("a", 0), *sample("b", 0), *sample("c", 0), (name, pickle.dumps(Canary(canary)))])
    if again:
        content = json.loads((folder / "manifest.json").read_text())
        content["splits"]["train"][1]["bytes"] = shard.stat().st_size
        (folder / "manifest.json").write_text(json.dumps(content))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError, match=r"imagenet1k-train-0001\.tar: member .*: refused"):
        main(["index", str(folder)]) if again else index(folder)
    assert not canary.exists()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_sparse_files_are_refused(folder: Path) -> None:
    # GNU's sparse format 1.0: a plain file with an extended header, and a map of its pieces before its content.
    with tarfile.open(folder / "imagenet1k-train-0001.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a.jpg")
        info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "8"}
        data = b"1\n0\n4\n".ljust(512, b"\0") + b"abcd"
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    with pytest.raises(UserError, match=r"imagenet1k-train-0001\.tar: member 'a\.jpg' is a sparse file.*: refused"):
        index(folder)


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
    assert not list(folder.glob("*.npy"))


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


def test_folders_with_a_manifest_get_their_offsets(folder: Path, class_folders: Path, tmp_path: Path) -> None:
    assert index(folder, "--num-classes", "1000") == 0
    out = tmp_path / "converted"
    assert main(["imagenet", "--source", str(class_folders), "--out", str(out), "--shard-size", "5"]) == 0
    for place in (folder, out):
        whole = {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()}
        content = json.loads(whole["manifest.json"])
        assert sorted(content.pop("offsets")) == ["train", "val"]
        (place / "manifest.json").write_text(json.dumps(content))  # as it was written before there were offsets
        for path in place.glob("*.npy"):
            path.unlink()
        assert main(["index", str(place)]) == 0
        assert {path.name: path.read_bytes() for path in place.iterdir() if path.is_file()} == whole


def test_a_folder_that_is_not_as_its_manifest_says(folder: Path) -> None:
    with pytest.raises(UserError, match=r"no manifest\.json in .*: tell what the shards are with --dataset NAME"):
        main(["index", str(folder)])
    assert index(folder) == 0
    shard = folder / "imagenet1k-train-0001.tar"
    whole = shard.read_bytes()
    shard.write_bytes(whole + bytes(512))
    with pytest.raises(
        UserError, match=rf"0001\.tar: expected {len(whole)} bytes as in the manifest, got {len(whole) + 512}"
    ):
        main(["index", str(folder)])
    write_tar(shard, [*sample("a", 0), *sample("b", 0)])
    assert shard.stat().st_size == len(whole)
    with pytest.raises(UserError, match=r"0001\.tar: expected 3 samples as in the manifest, got 2"):
        main(["index", str(folder)])
    write_tar(shard, [*sample("a", 0), *sample("b", 9), *sample("c", 0)])
    with pytest.raises(UserError, match=r"0001\.tar: member b\.cls must hold 0\.\.8"):
        main(["index", str(folder)])
    shard.unlink()
    with pytest.raises(UserError, match=r"0001\.tar is missing: the manifest lists it"):
        main(["index", str(folder)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dataset", "x"], "describe the shards that --split"),
        (["--num-classes", "3"], "describe the shards that --split"),
        (["--classes", "x"], "describe the shards that --split"),
        (["--split", "a=*.tar"], "--split needs --dataset NAME"),
    ],
)
def test_what_goes_together(folder: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        main(["index", str(folder), *arguments])
