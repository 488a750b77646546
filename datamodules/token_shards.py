"""Reads token shards: windows of consecutive tokens, from files mapped into memory or from elsewhere.

Window w of a shard is ``tokens[w T : w T + T + 1]`` for a context of T tokens: its first T tokens are inputs, its last
T targets. So each token but the first of a shard is predicted once, documents follow one another within a window, and
none goes on in another shard. What is left at the end of a shard is a shorter window in evaluation, and in training not
used.
"""

import hashlib
import mmap
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from webdataset.gopen import gopen_curl

from lapbench.datamodules.plan import Read
from lapbench.datamodules.shards import BLOCK, check_url, local_path, plain_name, plain_size
from lapbench.datamodules.token_manifest import TokenManifest, TokenShard
from lapbench.errors import UserError

OPEN_SHARDS = 64  # a process may have 1024 open files by default, and a data set more shards than that
_MAX_NPY_HEADER = 1 << 12


class TokenFile(NamedTuple):
    """A shard: its path or URL, and what the manifest says of it."""

    url: str
    shard: TokenShard


class Content(NamedTuple):
    """What is in a shard, not copied.

    ``tokens`` [N] are uint16 or uint32, ``documents`` [D] int64 the places at which documents begin, ``loss`` [N] uint8
    1 for a token that is to be predicted (None: all are).
    """

    tokens: npt.NDArray[Any]
    documents: npt.NDArray[np.int64]
    loss: npt.NDArray[np.uint8] | None


class Window(NamedTuple):
    """Window ``number`` of the shard at ``url``: at most T + 1 tokens, and whether each is to be predicted."""

    url: str
    number: int
    tokens: npt.NDArray[Any]
    loss: npt.NDArray[np.uint8] | None


@dataclass(frozen=True)
class Format:
    """What all shards of a data set have in common: the tokens' type and number, and whether they have ``loss``."""

    dtype: str
    vocab_size: int
    loss: bool

    @classmethod
    def of(cls, manifest: TokenManifest) -> "Format":
        """The format of a manifest's shards."""
        return cls(manifest.dtype, manifest.vocab_size, manifest.loss)


def open_shard(file: TokenFile, form: Format) -> Content:
    """Map a local shard into memory, or fetch one from ``https:`` and compare its checksum.

    Raises:
        UserError: it cannot be read, or is not what the manifest says.
    """
    path = local_path(file.url)
    try:
        if path is None:
            with gopen_curl(file.url) as stream:
                data = stream.read(file.shard.bytes + 1)
        else:
            with path.open("rb") as stream:
                data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, EOFError, ValueError) as error:  # an empty file cannot be mapped: ValueError
        reason = " ".join((getattr(error, "strerror", None) or str(error)).split())
        raise UserError(f"shard {file.url}: cannot read it: {reason}") from error
    if len(data) != file.shard.bytes:
        more = "more than " if len(data) > file.shard.bytes and path is None else ""
        got = min(len(data), file.shard.bytes) if more else len(data)
        raise UserError(f"shard {file.url}: expected {file.shard.bytes} bytes as in the manifest, got {more}{got}")
    if path is None and hashlib.sha256(data).hexdigest() != file.shard.sha256:
        raise UserError(f"shard {file.url}: its SHA-256 is not the manifest's")
    return _content(data, file, form)


def windows_of(tokens: int, context: int, whole: bool) -> int:
    """The windows of a shard of ``tokens`` tokens: the full ones, or with ``whole`` those that predict every token."""
    return (tokens - 1) // context if not whole else -(-(tokens - 1) // context)


class TokenReader:
    """Reads windows of ``context`` tokens, in any order (`IndexOrder`) or shard by shard (`StreamOrder`).

    Local shards are opened when they are first needed, in each process for itself.

    Args:
        files: The split's shards in manifest order.
        form: Their format.
        context: Tokens that the model sees, T.
        whole: Windows of every token, the last one of a shard maybe shorter; otherwise full windows only.
    """

    def __init__(self, files: Sequence[TokenFile], form: Format, context: int, whole: bool) -> None:
        for file in files:
            check_url(file.url)
        self._arguments = (tuple(files), form, context, whole)
        self.files = tuple(files)
        self.form = form
        self.context = context
        self.windows = tuple(windows_of(file.shard.tokens, context, whole) for file in files)
        self._firsts = list(accumulate(self.windows, initial=0))
        self._open: OrderedDict[int, Content] = OrderedDict()

    def __reduce__(self) -> Any:
        return type(self), self._arguments  # nothing that is open goes to another process

    def window(self, shard: int, number: int) -> Window:
        """Window ``number`` of shard number ``shard``, a copy.

        Raises:
            UserError: the shard cannot be read or is damaged; the message names shard and window.
        """
        url, content = self.files[shard].url, self._content(shard)
        part = slice(number * self.context, (number + 1) * self.context + 1)
        tokens = content.tokens[part].copy()
        if (largest := int(tokens.max())) >= self.form.vocab_size:
            raise UserError(
                f"shard {url}, window {number}: expected tokens in 0..{self.form.vocab_size - 1}, got {largest}"
            )
        return Window(url, number, tokens, None if content.loss is None else content.loss[part].copy())

    def _content(self, shard: int) -> Content:
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            # Shards from elsewhere are wholly in memory: one at a time.
            limit = 1 if local_path(self.files[shard].url) is None else OPEN_SHARDS
            while len(self._open) >= limit:
                self._open.popitem(last=False)
            self._open[shard] = open_shard(self.files[shard], self.form)
        return self._open[shard]


class RandomTokens(TokenReader):
    """Reads any window of a split; to the plan the split is one shard."""

    def counts(self) -> tuple[int, ...]:
        """The windows of the split."""
        return (sum(self.windows),)

    def read(self, place: int) -> Window:
        """The window at ``place``, counted in manifest order. UserError: see `window`."""
        shard = bisect_right(self._firsts, place) - 1
        return self.window(shard, place - self._firsts[shard])


class StreamedTokens(TokenReader):
    """Reads the windows of each shard from front to back."""

    def counts(self) -> tuple[int, ...]:
        """The windows of each shard."""
        return self.windows

    def read(self, reads: Sequence[Read]) -> Iterator[Window]:
        """Yield exactly the windows of ``reads``, in order. UserError: see `window`."""
        for read in reads:
            for number in range(read.first, read.last):
                yield self.window(read.shard, number)


def _content(data: "mmap.mmap | bytes", file: TokenFile, form: Format) -> Content:
    """The arrays of a shard; UserError if its members are not those that they should be."""
    expected = {"tokens.npy": (form.dtype, file.shard.tokens), "documents.npy": ("int64", file.shard.documents)}
    if form.loss:
        expected["loss.npy"] = ("uint8", file.shard.tokens)
    arrays, start = {}, 0
    for suffix, (dtype, length) in expected.items():
        header = data[start : start + BLOCK]
        size = plain_size(header)
        name = plain_name(header) if size is not None else ""
        start += BLOCK
        if size is None or name.partition(".")[2] != suffix:
            raise UserError(f"shard {file.url}: expected a member KEY.{suffix} at byte {start - BLOCK}, got another")
        array = _array(data, start, size, dtype, length)
        if array is None:
            raise UserError(f"shard {file.url}: member {name} is damaged or not of {length} numbers of type {dtype}")
        arrays[suffix] = array
        start += -(-size // BLOCK) * BLOCK
    documents = arrays["documents.npy"]
    if documents[0] != 0 or (np.diff(documents) < 1).any() or documents[-1] >= file.shard.tokens:
        raise UserError(f"shard {file.url}: its documents do not begin at rising places within {file.shard.tokens}")
    return Content(arrays["tokens.npy"], documents, arrays.get("loss.npy"))


def _array(data: "mmap.mmap | bytes", start: int, size: int, dtype: str, length: int) -> npt.NDArray[Any] | None:
    """The array in a ``.npy`` member, over the bytes of ``data``; None if it is another one."""
    stream = BytesIO(data[start : start + min(size, _MAX_NPY_HEADER)])
    try:
        if np.lib.format.read_magic(stream) != (1, 0):
            return None
        shape, _, found = np.lib.format.read_array_header_1_0(stream)
    except ValueError:
        return None
    expected = np.dtype(dtype).newbyteorder("<")
    whole = stream.tell() + length * expected.itemsize == size and start + size <= len(data)
    if shape != (length,) or found != expected or not whole:
        return None
    return np.frombuffer(data, expected, length, start + stream.tell())
