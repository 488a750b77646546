"""Write one shard: a deterministic tar file that appears under its name only when it is whole."""

import hashlib
import io
import os
import tarfile
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from lapbench.datamodules.manifest import Shard
from lapbench.datamodules.offsets import row
from lapbench.errors import UserError


class _HashingFile:
    """The two methods that ``tarfile`` calls on what it writes to, counting and hashing the bytes that pass."""

    def __init__(self, path: Path) -> None:
        self.stream = path.open("wb")
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        self.size += len(data)
        return self.stream.write(data)

    def tell(self) -> int:
        return self.size


class Written(NamedTuple):
    """A finished file: its name, its size in bytes, its SHA-256 (hex)."""

    file: str
    bytes: int
    sha256: str


class TarWriter:
    """``with TarWriter(path) as tar: tar.member(...); tar.finish()``; left without ``finish``, it leaves no file.

    The standard library's ``tarfile`` and not ``webdataset.TarWriter``: importing webdataset imports torch (1.5 s),
    and the convention is no more than names. Plain USTAR headers with no times and owners make equal contents equal
    bytes, and are cheaper to read than the extended ones that fractional times would bring.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial = partial_path(path)
        try:
            self._file = _HashingFile(self._partial)
        except OSError as error:
            raise self._failure(error) from error
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)  # type: ignore[arg-type]

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.size

    def member(self, name: str, content: bytes) -> None:
        """Append a file."""
        info = tarfile.TarInfo(name)  # mtime, uid and gid are 0, owner names empty
        info.size = len(content)
        info.mode = 0o444
        try:
            self._tar.addfile(info, io.BytesIO(content))
        except OSError as error:
            raise self._failure(error) from error

    def finish(self) -> Written:
        """Close the tar file, put it under its name and say what it is."""
        try:
            self._tar.close()
            self._file.stream.flush()
            os.fsync(self._file.stream.fileno())
            self._file.stream.close()
            os.replace(self._partial, self.path)
        except OSError as error:
            raise self._failure(error) from error
        return Written(self.path.name, self._file.size, self._file.sha256.hexdigest())

    def _failure(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {error.strerror} (finished shards are kept: run again to go on)")

    def __enter__(self) -> "TarWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.stream.close()
        except OSError as failure:  # the rest of the buffer does not fit either
            if error is None:
                raise self._failure(failure) from failure
        finally:
            self._partial.unlink(missing_ok=True)


class ShardWriter:
    """``with ShardWriter(path) as shard: shard.add(...); shard.finish()``: a shard of images.

    Attributes:
        samples: the number of samples added.
        rows: where they are, for the split's offsets.
    """

    def __init__(self, path: Path) -> None:
        self.samples = 0
        self.rows = bytearray()
        self._tar = TarWriter(path)

    def add(self, key: str, extension: str, image: bytes, label: int) -> None:
        """Append one sample: ``<key>.<extension>`` with ``image`` as it is, ``<key>.cls`` with ``label`` in ASCII."""
        name = f"{key}.{extension}"
        self.rows += row(self._tar.size, tarfile.BLOCKSIZE, len(image), label, f"{self._tar.path}: {name}")
        self._tar.member(name, image)
        self._tar.member(f"{key}.cls", str(label).encode("ascii"))
        self.samples += 1

    def finish(self) -> Shard:
        """Close the tar file, put it under its name and say what it holds."""
        file, size, sha256 = self._tar.finish()
        return Shard(file, self.samples, size, sha256)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tar.__exit__(kind, error, trace)


def partial_path(path: Path) -> Path:
    """Where the shard ``path`` is while it is being written."""
    return path.with_name(f".{path.name}.partial")


def file_sha256(path: Path) -> str:
    """The SHA-256 (hex) of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
