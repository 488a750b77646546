"""Reads WebDataset shards as streams: local paths, ``file:`` and ``https:`` URLs, and nothing that can run code."""

import re
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import numpy as np
import numpy.typing as npt
from webdataset.gopen import gopen_curl
from webdataset.tariterators import group_by_keys

from lapbench.datamodules.offsets import MAX_MEMBER_BYTES
from lapbench.datamodules.orders import Sample
from lapbench.datamodules.plan import Read
from lapbench.errors import UserError

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
# Formats that execute code when their usual reader opens them. Nothing here would read them; a shard that brings one
# is not a shard of images.
CODE_SUFFIXES = ("pkl", "pickle", "pyd", "pth", "pt", "ckpt", "joblib", "dill", "py", "pyc", "so")
# A name that is absolute on any system, or leads out of its folder.
OUTSIDE = re.compile(r"^/|\\|^[A-Za-z]:|(^|/)\.\.(/|$)")
BLOCK = 512

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_READ_SUFFIXES = frozenset((*IMAGE_SUFFIXES, "cls"))
_META = re.compile(r"__[^/]*__($|/)")  # WebDataset's own bookkeeping members


@dataclass(frozen=True)
class ShardFile:
    """One tar file: a path or URL, and the samples that the manifest says it holds."""

    url: str
    samples: int


class ShardReader:
    """Streams the samples of shards in WebDataset convention (``KEY.jpg`` and ``KEY.cls``).

    Args:
        shards: The split's shards in manifest order.
        num_classes: Labels must be in 0..num_classes - 1.
        in_use: Which of the split's samples exist for the plan, bool [samples]; all when None.
    """

    def __init__(
        self, shards: Sequence[ShardFile], num_classes: int, in_use: npt.NDArray[np.bool_] | None = None
    ) -> None:
        for shard in shards:
            check_url(shard.url)
        self.shards = tuple(shards)
        self.num_classes = num_classes
        self.in_use = in_use
        self._offsets = np.cumsum([0] + [shard.samples for shard in shards])

    def counts(self) -> tuple[int, ...]:
        """Samples in use in each shard: what a plan is made of."""
        return tuple(len(self._places(number)) for number in range(len(self.shards)))

    def read(self, reads: Sequence[Read]) -> Iterator[Sample]:
        """Yield exactly the samples of ``reads``, in order.

        Raises:
            UserError: an unreadable or hostile shard, another number of samples than the manifest says, a label out
                of range; the message names shard and sample.
        """
        for read in reads:
            yield from self._read(read)

    def _places(self, number: int) -> Sequence[int]:
        """Places inside a shard of its samples in use, ascending."""
        if self.in_use is None:
            return range(self.shards[number].samples)
        places: list[int] = np.flatnonzero(self.in_use[self._offsets[number] : self._offsets[number + 1]]).tolist()
        return places

    def _read(self, read: Read) -> Iterator[Sample]:
        shard = self.shards[read.shard]
        offset = int(self._offsets[read.shard])
        wanted = self._places(read.shard)[read.first : read.last]
        samples = shard_samples(shard.url)
        got = 0
        for place in wanted:
            raw: dict[str, Any] | None = None
            while got <= place:
                raw = next(samples, None)
                if raw is None:
                    raise UserError(
                        f"shard {shard.url}: expected {shard.samples} samples as in the manifest, got {got}"
                    )
                got += 1
            assert raw is not None  # places rise, so each takes at least one step
            # Having come to the end, make sure that it is one: samples beyond it would never be seen.
            if got == shard.samples and next(samples, None) is not None:
                raise _miscounted(shard, "more")
            yield self._sample(raw, shard.url, offset + place)

    def _sample(self, raw: dict[str, Any], url: str, index: int) -> Sample:
        key = raw["__key__"]
        image = next((raw[suffix] for suffix in IMAGE_SUFFIXES if suffix in raw), None)
        label = raw.get("cls")
        if image is None or label is None:
            missing = "label (.cls)" if image is not None else f"image (.{', .'.join(IMAGE_SUFFIXES)})"
            raise UserError(f"shard {url}, sample {key}: it has no {missing}")
        if not re.fullmatch(rb"\s*[0-9]{1,9}\s*", label) or int(label) >= self.num_classes:
            raise UserError(
                f"shard {url}, sample {key}: expected a label in 0..{self.num_classes - 1}, got {label[:20]!r}"
            )
        return Sample(index, url, key, image, int(label))


def _miscounted(shard: ShardFile, got: int | str) -> UserError:
    return UserError(f"shard {shard.url}: expected {shard.samples} samples as in the manifest, got {got}")


def check_url(url: str) -> str:
    """Return ``url`` if it is a path or a ``file:`` or ``https:`` URL.

    Raises:
        UserError: another scheme: ``pipe:`` would run a command.
    """
    scheme = _SCHEME.match(url)
    if scheme and scheme[1].lower() not in ("file", "https"):
        raise UserError(f"shard {url}: only paths, file: and https: URLs are read, got {scheme[1]}:")
    if not url or url == "-":
        raise UserError(f"shard {url!r}: expected a path, file: or https: URL")
    return url


def local_path(url: str) -> Path | None:
    """The path that a shard's URL names on this machine; None for ``https:``."""
    scheme = _SCHEME.match(check_url(url))
    if scheme is None:
        return Path(url)
    return Path(url2pathname(urlsplit(url).path)) if scheme[1].lower() == "file" else None


def shard_samples(url: str) -> Iterator[dict[str, Any]]:
    """Group the members of one shard into samples: ``{"__key__": ..., "jpg": bytes, "cls": bytes}``."""
    path = local_path(url)
    try:
        with gopen_curl(url) if path is None else path.open("rb") as stream:
            yield from group_by_keys(_wanted(url, _members(stream, seekable=path is not None)))
    except (OSError, EOFError, zlib.error, tarfile.TarError, ValueError) as error:
        reason = str(error.args[0]) if isinstance(error, ValueError) else getattr(error, "strerror", None) or str(error)
        raise UserError(f"shard {url}: cannot read it as a tar file: {' '.join(reason.split())}") from error


@dataclass(frozen=True)
class _Member:
    """A member's name, kind (``file``, ``folder``, ``other``), size in bytes, and its content, not yet read."""

    name: str
    kind: str
    size: int
    content: IO[bytes]


def _wanted(url: str, members: Iterator[_Member]) -> Iterator[dict[str, Any]]:
    """Refuse what has no place in a shard; read images and labels; leave other files unread."""
    for member in members:
        name = member.name
        if OUTSIDE.search(name):
            raise UserError(f"shard {url}, member {name!r}: absolute names and names with .. are refused")
        if member.kind == "folder":
            continue
        if member.kind != "file":
            raise UserError(f"shard {url}, member {name!r}: links and special files are refused")
        suffix = name.rpartition("/")[2].partition(".")[2].lower()
        if suffix not in _READ_SUFFIXES:
            if any(part in CODE_SUFFIXES for part in suffix.split(".")):
                raise UserError(f"shard {url}, member {name!r}: files that can carry code are refused")
            continue
        if _META.match(name):
            continue
        if member.size > MAX_MEMBER_BYTES:
            raise UserError(
                f"shard {url}, member {name!r}: expected at most {MAX_MEMBER_BYTES} bytes, got {member.size}"
            )
        data = member.content.read(member.size)
        if len(data) != member.size:
            raise UserError(f"shard {url}, member {name!r}: the file ends inside it")
        yield {"fname": name, "data": data, "__url__": url}


def _members(stream: IO[bytes], seekable: bool) -> Iterator[_Member]:
    """The members of a tar file.

    Headers of plain files are parsed here, in a tenth of tarfile's time, which counts when samples are small. At the
    first header that is anything else (long names, links, compression, damage), tarfile takes over.
    """
    while seekable:
        start = stream.tell()
        header = stream.read(BLOCK)
        if not header.strip(b"\0"):
            return
        if start > 0 and len(header) < BLOCK:
            raise tarfile.ReadError("it ends inside a header")
        size = plain_size(header)
        if size is None:
            stream.seek(start)
            break
        yield _Member(plain_name(header), "file", size, stream)
        stream.seek(start + BLOCK + -(-size // BLOCK) * BLOCK)
    with tarfile.open(fileobj=stream, mode="r:*" if seekable else "r|*") as tar:
        for info in tar:
            tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header it has seen
            kind = "file" if info.isreg() else "folder" if info.isdir() else "other"
            content = tar.extractfile(info) if info.isreg() else stream
            assert content is not None
            yield _Member(info.name, kind, info.size, content)


def plain_size(header: bytes) -> int | None:
    """The size in a header of a regular file that needs no extension; None for every other header."""
    if len(header) < BLOCK or header[156:157] not in (b"0", b"\0") or header[345:346] != b"\0":
        return None
    try:
        size, checksum = int(header[124:136].strip(b" \0"), 8), int(header[148:156].strip(b" \0"), 8)
    except ValueError:
        return None
    # The checksum counts its own field as eight blanks.
    return size if sum(header) - sum(header[148:156]) + 8 * 32 == checksum else None


def plain_name(header: bytes) -> str:
    """The name in a header of which `plain_size` knows the size."""
    return header[:100].partition(b"\0")[0].decode("utf-8", "surrogateescape")
