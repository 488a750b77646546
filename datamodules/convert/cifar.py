"""CIFAR-10 and CIFAR-100 from the official python archives, as .tar.gz or as the extracted folder.

Files are checked against the published MD5 sums, and their pickles are read without running anything (see `pickles`).
Images become PNGs without loss, in the official order; the index in a split is the key of a sample. CIFAR-100 takes the
100 fine labels.
"""

import argparse
import hashlib
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lapbench.datamodules.convert import pipeline
from lapbench.datamodules.convert.command import Command, add_out, add_shard_size, add_source, existing
from lapbench.datamodules.convert.formats import encode_png, shorten
from lapbench.datamodules.convert.pickles import load_batch
from lapbench.datamodules.manifest import Manifest
from lapbench.errors import UserError

# No file of either archive is larger than 160 MB; more is no CIFAR, and could fill the memory.
LARGEST_FILE = 256 * 2**20


@dataclass(frozen=True)
class Archive:
    """What one official archive holds: its folder, its files with their MD5 sums, and the names of the labels."""

    folder: str
    md5: str
    splits: Mapping[str, tuple[str, ...]]
    files: Mapping[str, str]
    meta: str
    labels: str
    names: str


ARCHIVES = {
    "cifar10": Archive(
        folder="cifar-10-batches-py",
        md5="c58f30108f718f92721af3b95e74349a",
        splits={"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)},
        files={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
            "batches.meta": "5ff9c542aee3614f3951f8cda6e48888",
        },
        meta="batches.meta",
        labels="labels",
        names="label_names",
    ),
    "cifar100": Archive(
        folder="cifar-100-python",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        splits={"train": ("train",), "test": ("test",)},
        files={
            "train": "16019d7e3df5f24257cddd939b257f8d",
            "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
            "meta": "7973b15100ade9c7d40fb424638fde48",
        },
        meta="meta",
        labels="fine_labels",
        names="fine_label_names",
    ),
}


class CifarSource:
    """An archive as a `pipeline.Source`, read whole: 180 MB of pixels."""

    def __init__(self, dataset: str, path: Path, skip_checksum: bool) -> None:
        """Read and check everything.

        Raises:
            UserError: a file is missing, fails its checksum, or does not hold what it should.
        """
        archive = ARCHIVES[dataset]
        read = _read_folder if existing(path).is_dir() else _read_tar
        contents = read(path, archive, skip_checksum)
        self.dataset = dataset
        self.origin = str(path.resolve())
        digest = hashlib.sha256(b"".join(hashlib.sha256(contents[name]).digest() for name in archive.files))
        self.settings: dict[str, Any] = {
            "sha256": digest.hexdigest(),
            "checksum": "skipped by --skip-checksum" if skip_checksum else "official MD5",
        }
        meta = load_batch(contents[archive.meta], f"{path}: {archive.meta}")
        names = meta.get(archive.names)
        if not isinstance(names, list) or not names or not all(isinstance(name, (bytes, str)) for name in names):
            raise UserError(f"{path}: {archive.meta}: {archive.names!r} must be a list of names, got {shorten(names)}")
        self.classes = tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else name for name in names)
        self._batches = {
            split: [self._batch(contents[file], archive, f"{path}: {file}") for file in files]
            for split, files in archive.splits.items()
        }
        self.sizes = {split: sum(len(labels) for _, labels, _ in batches) for split, batches in self._batches.items()}

    def samples(self, split: str, start: int) -> Iterator[pipeline.Sample]:
        """The samples of ``split`` from ``start`` on."""
        first = 0
        for images, labels, place in self._batches[split]:
            for row in range(max(start - first, 0), len(labels)):
                pixels = images[row].reshape(3, 32, 32).transpose(1, 2, 0)  # planes to interleaved
                yield pipeline.Sample(first + row, encode_png(pixels), labels[row], f"{place}, image {row}")
            first += len(labels)

    def _batch(self, content: bytes, archive: Archive, place: str) -> tuple[Any, list[int], str]:
        batch = load_batch(content, place)
        images, labels = batch.get("data"), batch.get(archive.labels)
        if images is None or getattr(images, "shape", (0, 0))[1:] != (3072,):
            raise UserError(
                f"{place}: 'data' must be images of 3072 bytes, got {shorten(getattr(images, 'shape', None))}"
            )
        if not isinstance(labels, list) or len(labels) != len(images):
            got = len(labels) if isinstance(labels, list) else shorten(labels)
            raise UserError(f"{place}: {archive.labels!r} must be a list of {len(images)} labels, got {got}")
        for label in labels:
            if type(label) is not int or not 0 <= label < len(self.classes):
                raise UserError(f"{place}: a label must be 0..{len(self.classes) - 1}, got {shorten(label)}")
        return images, labels, place


def _read_folder(path: Path, archive: Archive, skip_checksum: bool) -> dict[str, bytes]:
    folder = path / archive.folder if (path / archive.folder).is_dir() else path
    contents = {}
    for name, md5 in archive.files.items():
        file = folder / name
        if not file.is_file():
            raise UserError(f"{file} is missing: expected {archive.folder} with {', '.join(archive.files)}")
        if file.stat().st_size > LARGEST_FILE:
            raise UserError(f"{file} is larger than {LARGEST_FILE >> 20} MiB, which no CIFAR file is")
        try:
            contents[name] = file.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {file}: {error.strerror}") from error
        _check(hashlib.md5(contents[name], usedforsecurity=False).hexdigest(), md5, file, skip_checksum)
    return contents


def _read_tar(path: Path, archive: Archive, skip_checksum: bool) -> dict[str, bytes]:
    """The wanted members, by name and into memory: nothing is extracted, so no member can go astray on the disk."""
    contents: dict[str, bytes] = {}
    try:
        if not skip_checksum:
            with path.open("rb") as stream:
                digest = hashlib.md5(usedforsecurity=False)
                while piece := stream.read(1 << 20):
                    digest.update(piece)
            _check(digest.hexdigest(), archive.md5, path, skip_checksum)
        with tarfile.open(path, "r:*") as tar:
            for member in tar:
                name = member.name.removeprefix("./").removeprefix(f"{archive.folder}/")
                if name not in archive.files:
                    continue
                if not member.isreg() or member.size > LARGEST_FILE:
                    raise UserError(
                        f"{path}: member {member.name} must be a plain file of at most {LARGEST_FILE >> 20} MiB"
                    )
                stream_in = tar.extractfile(member)
                contents[name] = stream_in.read() if stream_in else b""
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} is no whole tar archive: {error}") from error
    missing = [name for name in archive.files if name not in contents]
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}: expected {archive.folder} with {', '.join(archive.files)}")
    return contents


def _check(got: str, expected: str, path: Path, skip_checksum: bool) -> None:
    if got != expected and not skip_checksum:
        raise UserError(
            f"{path} is not the official file: MD5 is {got}, expected {expected} (incomplete download? "
            "--skip-checksum lets another archive of the same layout in)"
        )


def _configure(dataset: str, parser: argparse.ArgumentParser) -> None:
    folder = ARCHIVES[dataset].folder
    archive = "cifar-10-python.tar.gz" if dataset == "cifar10" else "cifar-100-python.tar.gz"
    add_source(parser, f"{archive} from https://www.cs.toronto.edu/~kriz/cifar.html, or the extracted folder {folder}")
    add_out(parser)
    add_shard_size(parser, 5000)
    parser.add_argument(
        "--skip-checksum",
        action="store_true",
        help="take an archive of the same layout that is not the official one; the manifest says so",
    )


def _run(dataset: str, arguments: argparse.Namespace) -> tuple[Manifest, bool]:
    source = CifarSource(dataset, arguments.source, arguments.skip_checksum)
    return pipeline.convert(source, arguments.out, shard_size=arguments.shard_size, progress=True)


_SUMMARIES = {
    "cifar10": "CIFAR-10 (60,000 colour images, 32 x 32, 10 classes) from its python archive",
    "cifar100": "CIFAR-100 (60,000 colour images, 32 x 32, 100 fine classes) from its python archive",
}
COMMANDS = {
    name: Command(summary, __doc__ or "", partial(_configure, name), partial(_run, name))
    for name, summary in _SUMMARIES.items()
}
