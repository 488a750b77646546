"""Tiny real inputs for the converters, and a reader of shards that shares no code with them."""

import hashlib
import io
import json
import pickle
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

Samples = list[tuple[str, str, bytes, int]]  # key, extension, image bytes, label


def jpeg(seed: int) -> bytes:
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream, format="JPEG")
    return stream.getvalue()


def png(seed: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (4, 4), (seed % 256, 0, 0)).save(stream, format="PNG")
    return stream.getvalue()


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def read_shards() -> Callable[[Path, str], Samples]:
    """Samples of a split in order, checked against the manifest's counts, sizes and checksums."""

    def read(folder: Path, split: str) -> Samples:
        manifest = json.loads((folder / "manifest.json").read_text())
        samples: Samples = []
        for shard in manifest["splits"][split]:
            content = (folder / shard["file"]).read_bytes()
            assert len(content) == shard["bytes"]
            assert hashlib.sha256(content).hexdigest() == shard["sha256"]
            with tarfile.open(fileobj=io.BytesIO(content)) as tar:
                members = tar.getmembers()
                assert len(members) == 2 * shard["samples"]
                for image, label in zip(members[::2], members[1::2], strict=True):
                    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname) for m in (image, label)} == {(0, 0, 0, "", "")}
                    key, extension = image.name.split(".")
                    assert label.name == f"{key}.cls"
                    pair = [tar.extractfile(member) for member in (image, label)]
                    assert pair[0] is not None
                    assert pair[1] is not None
                    samples.append((key, extension, pair[0].read(), int(pair[1].read())))
        return samples

    return read


@pytest.fixture
def class_folders(tmp_path: Path) -> Path:
    """Twelve classes "0".."11", 3 train images and 1 val image each; their bytes are ``jpeg(100 * class + number)``."""
    root = tmp_path / "folders"
    for label in range(12):
        for split, numbers in (("train", (0, 1, 2)), ("val", (50,))):
            (root / split / str(label)).mkdir(parents=True)
            for number in numbers:
                (root / split / str(label) / f"img_{number}.JPEG").write_bytes(jpeg(100 * label + number))
    return root


def write_parquet(
    path: Path, images: list[bytes | None], labels: list[int | None], names: list[str] | None = None, rows: int = 4
) -> None:
    """One file in the Hugging Face layout, in row groups of ``rows``."""
    image_type = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table(
        {
            "image": pa.array([{"bytes": image, "path": f"{i}.JPEG"} for i, image in enumerate(images)], image_type),
            "label": pa.array(labels, pa.int64()),
        }
    )
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=rows)


CIFAR_FILES = {
    "cifar10": ("cifar-10-batches-py", [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"], "batches.meta"),
    "cifar100": ("cifar-100-python", ["train", "test"], "meta"),
}


def cifar_folder(root: Path, dataset: str, rows: int = 4, protocol: int = 2) -> tuple[Path, dict[str, Any]]:
    """A folder of random images in the archive's layout; returns it with the dictionaries that were pickled.

    Python 3's protocol 2 writes bytes through ``_codecs.encode``, where Python 2 had plain strings: both are read.
    """
    name, files, meta = CIFAR_FILES[dataset]
    folder = root / name
    folder.mkdir(parents=True)
    classes = 10 if dataset == "cifar10" else 100
    labels_key, names_key = ("labels", "label_names") if classes == 10 else ("fine_labels", "fine_label_names")
    random = np.random.default_rng(classes)
    batches: dict[str, Any] = {}
    for file in files:
        labels = random.integers(0, classes, rows).tolist()
        batches[file] = {
            b"data": random.integers(0, 256, (rows, 3072), dtype=np.uint8),
            labels_key.encode(): labels,
            b"coarse_labels": [0] * rows,
            b"filenames": [b"x.png"] * rows,
        }
    batches[meta] = {names_key.encode(): [f"class {i}".encode() for i in range(classes)], b"num_vis": 3072}
    for file, content in batches.items():
        (folder / file).write_bytes(pickle.dumps(content, protocol=protocol))
    return folder, batches


def pack(folder: Path, archive: Path) -> Path:
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    return archive


@pytest.fixture
def tiny() -> Any:
    """This module: its makers of tiny inputs."""
    return sys.modules[__name__]
