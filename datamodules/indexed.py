"""Reads single samples of local shards by their offsets, one system call each."""

import io
import os
import re
import tarfile
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from webdataset.tariterators import base_plus_ext

from lapbench.datamodules.offsets import MAX_HEADER_BYTES, MAX_MEMBER_BYTES, open_offsets
from lapbench.datamodules.orders import Sample
from lapbench.datamodules.shards import BLOCK, IMAGE_SUFFIXES, OUTSIDE, ShardFile, local_path, plain_name, plain_size
from lapbench.errors import UserError

OPEN_SHARDS = 64  # a process may have 1024 open files by default, and a data set more shards than that


class IndexReader:
    """Reads any sample of a split.

    Offsets are mapped into memory and shards opened when they are first needed, in each process for itself. Every
    read sees to it that the headers found are those of an image of the expected size: an index that belongs to other
    shards, or was tampered with, yields no foreign bytes.

    Args:
        shards: The split's shards in manifest order, local ones.
        offsets: The split's index file.
        num_classes: Labels must be in 0..num_classes - 1.
        in_use: Which of the split's samples exist for the plan, bool [samples]; all when None.
    """

    def __init__(
        self,
        shards: Sequence[ShardFile],
        offsets: Path,
        num_classes: int,
        in_use: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        self._arguments = (tuple(shards), offsets, num_classes, in_use)
        self.shards = tuple(shards)
        self.offsets = offsets
        self.num_classes = num_classes
        self._numbers = None if in_use is None else np.flatnonzero(in_use)
        self._firsts = list(accumulate((shard.samples for shard in shards), initial=0))
        self._rows: Any = None
        self._open: OrderedDict[int, tuple[int, int]] = OrderedDict()  # shard to file descriptor and size
        weakref.finalize(self, _close, self._open)

    def __reduce__(self) -> Any:
        return IndexReader, self._arguments  # nothing that is open goes to another process

    def counts(self) -> tuple[int, ...]:
        """The samples in use: to the plan they are one shard."""
        return (self._firsts[-1] if self._numbers is None else len(self._numbers),)

    def read(self, place: int) -> Sample:
        """The sample at ``place`` among those in use, in manifest order.

        Raises:
            UserError: the shard cannot be read, or does not hold what the index says; the message names shard and
                sample.
        """
        number = place if self._numbers is None else int(self._numbers[place])
        if self._rows is None:
            self._rows = open_offsets(self.offsets)
        start, headers, size, label = self._rows[number].item()
        shard = bisect_right(self._firsts, number) - 1
        data = self._bytes(shard, start, headers, size)
        name = _image_name(data[:headers], size) if data is not None else None
        if data is None or name is None or label >= self.num_classes:
            raise UserError(
                f"shard {self.shards[shard].url}, sample number {number - self._firsts[shard]}: expected an image of "
                f"{size} bytes and class {label} of {self.num_classes} at byte {start} as in the index, got something "
                f"else: make the index anew with `lapbench data index {self.offsets.parent}`"
            )
        return Sample(number, self.shards[shard].url, base_plus_ext(name)[0], data[headers:], label)

    def _bytes(self, shard: int, start: int, headers: int, size: int) -> bytes | None:
        """Headers and image, None if the numbers are out of all bounds."""
        length = headers + size
        try:
            descriptor, end = self._descriptor(shard)
            if headers > MAX_HEADER_BYTES or size > MAX_MEMBER_BYTES or start + length > end:
                return None
            data = os.pread(descriptor, length, start)
        except OSError as error:
            raise UserError(f"shard {self.shards[shard].url}: cannot read it: {error.strerror}") from error
        return data if len(data) == length else None

    def _descriptor(self, shard: int) -> tuple[int, int]:
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            if len(self._open) >= OPEN_SHARDS:
                os.close(self._open.popitem(last=False)[1][0])
            path = local_path(self.shards[shard].url)
            assert path is not None  # the data module takes local shards only
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._open[shard] = (descriptor, os.fstat(descriptor).st_size)
        return self._open[shard]


def _close(files: OrderedDict[int, tuple[int, int]]) -> None:
    for descriptor, _ in files.values():
        os.close(descriptor)


def _image_name(headers: bytes, size: int) -> str | None:
    """The member's name if ``headers`` are exactly those of one image of ``size`` bytes, else None."""
    if len(headers) == BLOCK and plain_size(headers) == size:
        name = plain_name(headers)
    else:
        try:
            with tarfile.open(fileobj=io.BytesIO(headers), mode="r:") as tar:
                info = tar.next()
        except (tarfile.TarError, ValueError, EOFError):
            return None
        if info is None or not info.isreg() or info.sparse is not None:
            return None
        if (info.size, info.offset, info.offset_data) != (size, 0, len(headers)):
            return None
        name = info.name
    suffix = name.rpartition("/")[2].partition(".")[2].lower()
    return name if suffix in IMAGE_SUFFIXES and not re.search(OUTSIDE, name) else None
