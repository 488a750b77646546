import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lapbench.datamodules.convert import cifar, main
from lapbench.datamodules.convert.pickles import load_batch
from lapbench.datamodules.manifest import Manifest
from lapbench.errors import UserError


def convert(dataset: str, source: Path, out: Path, *more: str) -> int:
    return main([dataset, "--source", str(source), "--out", str(out), *more])


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_lossless(tmp_path: Path, dataset: str, packed: bool, protocol: int, tiny: Any, read_shards: Any) -> None:
    source, batches = tiny.cifar_folder(tmp_path, dataset, protocol=protocol)
    if packed:
        source = tiny.pack(source, tmp_path / "archive.tar.gz")
    assert convert(dataset, source, tmp_path / "out", "--skip-checksum", "--shard-size", "3") == 0
    manifest = Manifest.load(tmp_path / "out")
    classes = 10 if dataset == "cifar10" else 100
    assert manifest.classes == tuple(f"class {i}" for i in range(classes))
    assert manifest.source["checksum"] == "skipped by --skip-checksum"
    key = b"labels" if classes == 10 else b"fine_labels"
    for split, names in cifar.ARCHIVES[dataset].splits.items():
        samples = read_shards(tmp_path / "out", split)
        data = np.concatenate([batches[name][b"data"] for name in names])
        assert [s[3] for s in samples] == [label for name in names for label in batches[name][key]]
        assert [s[0] for s in samples] == [f"{i:09d}" for i in range(len(data))]
        for (_, extension, image, _), row in zip(samples, data, strict=True):
            assert extension == "png"
            decoded = Image.open(io.BytesIO(image))
            assert decoded.mode == "RGB"
            # Each channel is a plane of 1024 bytes, red first, rows of 32 from the top.
            for channel, plane in enumerate(decoded.split()):
                assert plane.tobytes() == row[1024 * channel : 1024 * (channel + 1)].tobytes()


def test_checksums(tmp_path: Path, tiny: Any) -> None:
    folder, _ = tiny.cifar_folder(tmp_path, "cifar10")
    archive = tiny.pack(folder, tmp_path / "a.tar.gz")
    with pytest.raises(UserError, match=r"a\.tar\.gz is not the official file: MD5 .*c58f30108f718f92721af3b95e74349a"):
        convert("cifar10", archive, tmp_path / "out")
    with pytest.raises(UserError, match=r"data_batch_1 is not the official file.*c99cafc152244af753f735de768cd75f"):
        convert("cifar10", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_with_the_right_checksum_passes(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses
    import hashlib

    folder, _ = tiny.cifar_folder(tmp_path, "cifar100")
    archive = tiny.pack(folder, tmp_path / "a.tar.gz")
    md5 = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    official = dataclasses.replace(
        cifar.ARCHIVES["cifar100"], md5=hashlib.md5(archive.read_bytes()).hexdigest(), files=md5
    )
    monkeypatch.setitem(cifar.ARCHIVES, "cifar100", official)
    assert convert("cifar100", archive, tmp_path / "out") == 0
    # The archive and its extracted folder are the same source.
    assert convert("cifar100", folder, tmp_path / "out") == 0


class Evil:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("kind", ["system", "open", "eval", "numpy", "in meta", "in a list", "codec"])
def test_malicious_pickles_run_nothing(tmp_path: Path, kind: str, protocol: int, tiny: Any) -> None:
    canary = tmp_path / "canary"
    folder, batches = tiny.cifar_folder(tmp_path, "cifar10")
    code = f"open({str(canary)!r}, 'w')"
    attack = {
        "system": Evil(os.system, f"touch {canary}"),
        "open": Evil(open, str(canary), "w"),
        "eval": Evil(eval, code),
        "numpy": Evil(np.save, str(canary), 1),
        "in meta": Evil(os.mkdir, str(canary)),
        "in a list": [Evil(exec, code)],
        "codec": Evil(getattr, "x", "upper"),
    }[kind]
    target = "batches.meta" if kind == "in meta" else "data_batch_3"
    content = {**batches[target], b"more": attack}
    (folder / target).write_bytes(pickle.dumps(content, protocol=protocol))
    with pytest.raises(UserError, match=rf"{target}: the pickle asks for '.*refused") as caught:
        convert("cifar10", folder, tmp_path / "out", "--skip-checksum")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.glob("canary*"))
    # The check bites: the standard unpickler would have run it.
    if kind in ("system", "in meta"):
        pickle.loads((folder / target).read_bytes())
        assert canary.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02",
        b"garbage that is no pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": np.zeros(3, np.float64)}, protocol=2),
        pickle.dumps({b"data": np.zeros((2, 2), np.uint8, order="F")}, protocol=2),
        pickle.dumps({b"data": np.array([{}], dtype=object)}, protocol=2),
        b"\x80\x05\x96" + (1 << 62).to_bytes(8, "little"),
        b"c_codecs\nencode\n(V__import__\nVrot13\ntR.",
        b"cnumpy\ndtype\n(Vu1\ntR\x8cb.",
    ],
)
def test_damaged_batches(content: bytes) -> None:
    with pytest.raises(UserError, match=r"^batch(:| is no)") as caught:
        load_batch(content, "batch")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {b"data": np.zeros((4, 3071), np.uint8)},
            r"data_batch_2: 'data' must be images of 3072 bytes, got \(4, 3071\)",
        ),
        ({b"labels": [0, 1, 2]}, r"'labels' must be a list of 4 labels, got 3"),
        ({b"labels": [0, 1, 2, 10]}, r"a label must be 0\.\.9, got 10"),
        ({b"labels": [0, 1, 2, -1]}, r"a label must be 0\.\.9, got -1"),
        ({b"labels": None}, r"'labels' must be a list"),
    ],
)
def test_wrong_contents(tmp_path: Path, change: dict[bytes, Any], message: str, tiny: Any) -> None:
    folder, batches = tiny.cifar_folder(tmp_path, "cifar10")
    (folder / "data_batch_2").write_bytes(pickle.dumps({**batches["data_batch_2"], **change}, protocol=2))
    with pytest.raises(UserError, match=message):
        convert("cifar10", folder, tmp_path / "out", "--skip-checksum")


def test_missing_and_broken_archives(tmp_path: Path, tiny: Any) -> None:
    folder, _ = tiny.cifar_folder(tmp_path, "cifar10")
    archive = tiny.pack(folder, tmp_path / "whole.tar.gz")
    whole = archive.read_bytes()
    broken = tmp_path / "broken.tar.gz"
    for content in (whole[: len(whole) // 2], b"", b"not a tar", whole[:20]):
        broken.write_bytes(content)
        with pytest.raises(UserError, match=r"broken\.tar\.gz"):
            convert("cifar10", broken, tmp_path / "out", "--skip-checksum")
    with pytest.raises(UserError, match=r"--source .*nowhere: no such file or folder"):
        convert("cifar10", tmp_path / "nowhere", tmp_path / "out")
    (folder / "test_batch").unlink()
    with pytest.raises(UserError, match=r"test_batch is missing"):
        convert("cifar10", folder, tmp_path / "out", "--skip-checksum")
    with pytest.raises(UserError, match=r"lacks test_batch"):
        convert("cifar10", tiny.pack(folder, broken), tmp_path / "out", "--skip-checksum")
    with pytest.raises(UserError, match=r"lacks train, test, meta: expected cifar-100-python"):
        convert("cifar100", archive, tmp_path / "out", "--skip-checksum")


def test_unsafe_members_go_nowhere(tmp_path: Path, tiny: Any) -> None:
    folder, _ = tiny.cifar_folder(tmp_path / "x", "cifar10")
    archive = tmp_path / "evil.tar"
    with tarfile.open(archive, "w") as tar:
        for name in ("../canary", str(tmp_path / "canary")):
            info = tarfile.TarInfo(name)
            info.size = 4
            tar.addfile(info, io.BytesIO(b"evil"))
        tar.add(folder, folder.name)
    before = set(tmp_path.rglob("*"))
    assert convert("cifar10", archive, tmp_path / "out", "--skip-checksum") == 0
    assert {path for path in tmp_path.rglob("*") if (tmp_path / "out") not in (path, *path.parents)} == before
    # A wanted name that is a link is not followed.
    with tarfile.open(archive, "w") as tar:
        info = tarfile.TarInfo("cifar-10-batches-py/test_batch")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(UserError, match=r"member cifar-10-batches-py/test_batch must be a plain file"):
        convert("cifar10", archive, tmp_path / "out2", "--skip-checksum")
