"""Describe WebDataset shards that others made (for example the ``timm/imagenet-1k-wds`` files) by a manifest.json
beside them, so that they can be used as they are. Every shard is read once: samples are counted and checked (one image
and a ``.cls`` holding the class index in ASCII), and the checksum is taken. Nothing but manifest.json is written.
"""

import argparse
import posixpath
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import BinaryIO

from lapbench.datamodules.convert.command import Command, positive
from lapbench.datamodules.convert.formats import IMAGE_EXTENSIONS, shorten
from lapbench.datamodules.convert.journal import JOURNAL
from lapbench.datamodules.convert.progress import Bar
from lapbench.datamodules.convert.writer import file_sha256
from lapbench.datamodules.manifest import MANIFEST, Manifest, Shard, is_plain_name
from lapbench.errors import UserError

# Formats whose readers can run code that the file brings along.
EXECUTABLE = {"pkl", "pickle", "pyd", "pth", "pt", "ckpt", "joblib", "dill", "py", "pyc", "so"}
# What WebDataset passes over: its own bookkeeping, and files without an extension.
_PASSED_OVER = re.compile(r"__[^/]*__($|/)|(.*/)?[^/.]+$")
METHOD = "index"


def index(
    folder: Path,
    dataset: str,
    patterns: dict[str, str],
    classes: tuple[str, ...] | None = None,
    progress: bool = False,
) -> Manifest:
    """Check the shards in ``folder`` and write its manifest.

    Args:
        folder: where the shards are.
        dataset: the data set's name.
        patterns: for each split the glob of its shards, within the folder.
        classes: the class names; None for "0" up to the largest label found.
        progress: show a bar on stderr.

    Raises:
        UserError: no such shards, a shard that is empty, truncated or unsafe, a sample without image or label, or a
            folder that a conversion wrote.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder}")
    if (folder / JOURNAL).exists():
        raise UserError(f"{folder} holds an unfinished conversion: finish it, and it has its manifest")
    if (folder / MANIFEST).is_file() and Manifest.load(folder).source.get("method") != METHOD:
        raise UserError(f"{folder} holds a converted data set, which has its manifest already")
    files = {split: _matches(folder, split, pattern) for split, pattern in patterns.items()}
    splits, largest = {}, 0
    with Bar(f"{dataset} shards", sum(map(len, files.values())), progress, unit="shards") as bar:
        for split, paths in files.items():
            shards = []
            for path in paths:
                samples, highest = scan(path, None if classes is None else len(classes))
                largest = max(largest, highest)
                shards.append(Shard(path.name, samples, path.stat().st_size, file_sha256(path)))
                bar.advance(1)
            splits[split] = tuple(shards)
    names = classes if classes is not None else tuple(map(str, range(largest + 1)))
    source = {"method": METHOD, "patterns": patterns}
    manifest = Manifest(dataset, names, splits, source)
    manifest.save(folder)
    return manifest


def scan(path: Path, num_classes: int | None) -> tuple[int, int]:
    """Check one shard; returns its number of samples and its largest label.

    Raises:
        UserError: naming the shard and, where there is one, the member.
    """
    samples, largest = 0, 0
    sample: dict[str, int] = {}  # extension to label (.cls) or size (others)
    key = None
    try:
        with path.open("rb") as stream:
            for tar, member in _members(stream, path):
                member_key, extension = _parts(member.name)
                if member_key != key:
                    if key is not None:
                        _check_sample(sample, f"{path}: sample {key}")
                    key, sample, samples = member_key, {}, samples + 1
                if extension in sample:
                    raise UserError(f"{path}: member {member.name} is there twice")
                sample[extension] = member.size
                if extension == "cls":
                    largest = max(largest, _label(tar, member, path, num_classes))
            if key is None:
                raise UserError(f"{path} is an empty shard: it has no samples")
            _check_sample(sample, f"{path}: sample {key}")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    return samples, largest


def _members(stream: BinaryIO, path: Path) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The plain files of a tar; refuses anything else but folders, and an archive that does not end as it should."""
    name = "its beginning"
    try:
        with tarfile.open(fileobj=stream, mode="r:") as tar:
            while (member := tar.next()) is not None:
                name = f"member {member.name}"
                if not member.isdir():
                    _check_member(member, path)
                    if not _PASSED_OVER.match(member.name):
                        yield tar, member
                tar.members = []  # type: ignore[attr-defined]  # only for random access; there may be a million
            end = tar.offset
    except tarfile.TarError as error:
        raise UserError(f"{path} is truncated or no tar file (after {name}): {error}") from error
    # tarfile takes a missing end and a damaged header for the end: an archive ends with zeros, and nothing else.
    stream.seek(end)
    tail = stream.read(tarfile.BLOCKSIZE)
    if len(tail) < tarfile.BLOCKSIZE or any(tail):
        raise UserError(f"{path} is truncated or damaged after {name}")
    while tail := stream.read(1 << 20):
        if tail.strip(b"\0"):
            raise UserError(f"{path} has data after its end (after {name}): joined tar files are not read")


def _check_member(member: tarfile.TarInfo, path: Path) -> None:
    where = f"{path}: member {shorten(member.name)}"
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise UserError(f"{where} is a link or special file: refused")
    if (
        member.name.startswith("/")
        or PureWindowsPath(member.name).drive
        or ".." in member.name.split("/")
        or "\\" in member.name
        or "\0" in member.name
    ):
        raise UserError(f"{where} has a name that leads out of a folder: refused")
    if EXECUTABLE & set(posixpath.basename(member.name).lower().split(".")[1:]):
        raise UserError(f"{where} is of a format that can run code when read: refused")


def _parts(name: str) -> tuple[str, str]:
    """Key and extension as WebDataset has them: the extension is everything after the first dot of the last part."""
    folder, base = posixpath.split(name)
    stem, _, extension = base.partition(".")
    return posixpath.join(folder, stem), extension.lower()


def _check_sample(sample: dict[str, int], where: str) -> None:
    images = [extension for extension in sample if extension in IMAGE_EXTENSIONS]
    if len(images) != 1:
        found = ", ".join(f".{extension}" for extension in sample)
        raise UserError(f"{where} must have one image ({', '.join(IMAGE_EXTENSIONS)}), it has {found}")
    if not sample[images[0]]:
        raise UserError(f"{where} has an empty image")
    if "cls" not in sample:
        raise UserError(f"{where} has no .cls")


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, path: Path, num_classes: int | None) -> int:
    try:
        stream = tar.extractfile(member)
        text = stream.read(32).strip() if stream else b""
    except tarfile.TarError as error:
        raise UserError(f"{path} is truncated (in member {member.name}): {error}") from error
    expected = "a class index in ASCII digits" if num_classes is None else f"0..{num_classes - 1} in ASCII digits"
    if (
        member.size > 32
        or not re.fullmatch(rb"[0-9]{1,9}", text)
        or (num_classes is not None and int(text) >= num_classes)
    ):
        raise UserError(f"{path}: member {member.name} must hold {expected}, got {shorten(text)}")
    return int(text)


def _matches(folder: Path, split: str, pattern: str) -> list[Path]:
    if "/" in pattern or "\\" in pattern or not pattern:
        raise UserError(f"--split {split}={pattern}: the pattern must name files in {folder} itself")
    paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    if not paths:
        raise UserError(f"--split {split}={pattern}: no such files in {folder}")
    for path in paths:
        if not is_plain_name(path.name):
            raise UserError(f"{path}: a shard's name may have letters, digits and _ . + = @ - only")
    return paths


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "out", type=Path, metavar="DIR", help="the folder that holds the shards; the manifest goes there"
    )
    parser.add_argument("--dataset", required=True, metavar="NAME", help="the data set's name, for example imagenet")
    parser.add_argument(
        "--split",
        action="append",
        required=True,
        metavar="NAME=GLOB",
        help="a split and the shards in it, for example val='imagenet1k-validation-*.tar'; once for each split "
        "(ImageNet's are train and val)",
    )
    classes = parser.add_mutually_exclusive_group()
    classes.add_argument(
        "--num-classes",
        type=positive,
        metavar="N",
        help="the number of classes, named 0 to N-1 (default: as many as the largest label asks for)",
    )
    classes.add_argument(
        "--classes", type=Path, metavar="FILE", help="a text file with the classes' names, one a line in order"
    )


def _run(arguments: argparse.Namespace) -> tuple[Manifest, bool]:
    patterns: dict[str, str] = {}
    for text in arguments.split:
        split, sign, pattern = text.partition("=")
        if not sign or not is_plain_name(split):
            raise UserError(f"--split {text}: expected NAME=GLOB, for example train='*-train-*.tar'")
        if split in patterns:
            raise UserError(f"--split {split} is given twice: one pattern a split")
        patterns[split] = pattern
    names = tuple(map(str, range(arguments.num_classes))) if arguments.num_classes else None
    if arguments.classes:
        names = _read_names(arguments.classes)
    return index(arguments.out, arguments.dataset, patterns, names, progress=True), False


def _read_names(path: Path) -> tuple[str, ...]:
    try:
        names = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    except OSError as error:
        raise UserError(f"--classes {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--classes {path} is not UTF-8 text: {error}") from error
    if not names or not all(names):
        raise UserError(f"--classes {path}: expected one name on every line, got an empty one")
    return names


COMMAND = Command(
    "WebDataset shards made by others: check them and write their manifest", __doc__ or "", _configure, _run
)
