"""One pass over a shard that somebody made: what must not be in it, how many samples it holds, and where they are."""

import posixpath
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath
from typing import BinaryIO, NamedTuple

from lapbench.datamodules.convert.formats import IMAGE_EXTENSIONS, shorten
from lapbench.datamodules.offsets import row
from lapbench.errors import UserError

# Formats whose readers can run code that the file brings along.
EXECUTABLE = {"pkl", "pickle", "pyd", "pth", "pt", "ckpt", "joblib", "dill", "py", "pyc", "so"}
# What WebDataset passes over: its own bookkeeping, files without an extension, and hidden ones ("._x.jpg" of macOS).
_PASSED_OVER = re.compile(r"__[^/]*__($|/)|(.*/)?([^/.]+|\.[^/]*)$")


class Scan(NamedTuple):
    """What is in a shard: the number of samples, their largest label, and their rows for `offsets.save_indexed`."""

    samples: int
    largest: int
    rows: bytes


def scan(path: Path, num_classes: int | None = None) -> Scan:
    """Check one shard; labels may be any number when ``num_classes`` is None.

    Raises:
        UserError: naming the shard and, where there is one, the member.
    """
    rows, largest = bytearray(), 0
    samples = 0
    try:
        with path.open("rb") as stream:
            for sample in _samples(stream, path, num_classes):
                rows += sample.row()
                largest, samples = max(largest, sample.label), samples + 1
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    if not samples:
        raise UserError(f"{path} is an empty shard: it has no samples")
    return Scan(samples, largest, bytes(rows))


class _Sample:
    """The members of one key, and the label among them."""

    def __init__(self, key: str, path: Path) -> None:
        self.key = key
        self.label = 0
        self._where = f"{path}: sample {key}"
        self._members: dict[str, tarfile.TarInfo] = {}

    def add(self, extension: str, member: tarfile.TarInfo, path: Path) -> None:
        if extension in self._members:
            raise UserError(f"{path}: member {member.name} is there twice")
        self._members[extension] = member

    def row(self) -> bytes:
        """The image's row; UserError unless there is one image and a label."""
        images = [extension for extension in self._members if extension in IMAGE_EXTENSIONS]
        if len(images) != 1:
            found = ", ".join(f".{extension}" for extension in self._members)
            raise UserError(f"{self._where} must have one image ({', '.join(IMAGE_EXTENSIONS)}), it has {found}")
        image = self._members[images[0]]
        if not image.size:
            raise UserError(f"{self._where} has an empty image")
        if "cls" not in self._members:
            raise UserError(f"{self._where} has no .cls")
        return row(image.offset, image.offset_data - image.offset, image.size, self.label, self._where)


def _samples(stream: BinaryIO, path: Path, num_classes: int | None) -> Iterator[_Sample]:
    sample = None
    for tar, member in _members(stream, path):
        key, extension = _parts(member.name)
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key, path)
        sample.add(extension, member, path)
        if extension == "cls":
            sample.label = _label(tar, member, path, num_classes)
    if sample is not None:
        yield sample


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
    if member.sparse is not None:
        raise UserError(f"{where} is a sparse file, whose bytes do not lie together: refused")
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
