"""Reads conversations from token shards: one by one, or one after the other cut into windows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lapbench.datamodules.orders import Draw
from lapbench.datamodules.streaming import Loaded
from lapbench.datamodules.text import TokenStream
from lapbench.datamodules.token_shards import Format, TokenFile, TokenReader, Window, open_shard, windows_of
from lapbench.errors import UserError

WIDTH_MULTIPLE = 64  # of the tokens in a padded row: few shapes, so that compiled models and allocators meet them again


class Rows(NamedTuple):
    """Where conversations lie: number of the shard, place of the first token in it, number of tokens; [N] each."""

    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]

    def take(self, places: npt.NDArray[Any]) -> "Rows":
        """The rows at ``places``, or those where it is true."""
        return Rows(self.shard[places], self.start[places], self.length[places])

    @classmethod
    def of(cls, files: Sequence[TokenFile], form: Format, first: int = 0) -> "Rows":
        """All conversations of the shards ``files``, which are numbered from ``first`` on.

        Raises:
            UserError: a shard cannot be read.
        """
        starts = [open_shard(file, form).documents for file in files]
        return cls(
            np.repeat(np.arange(first, first + len(files)), [len(documents) for documents in starts]),
            np.concatenate(starts),
            np.concatenate(
                [np.diff(documents, append=file.shard.tokens) for documents, file in zip(starts, files, strict=True)]
            ),
        )

    @classmethod
    def joined(cls, parts: Sequence["Rows"]) -> "Rows":
        """The rows of all ``parts``."""
        return cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


class ChatReader(TokenReader):
    """Reads rows, in any order; to the plan they are one shard.

    Args:
        files: All shards.
        form: Their format.
        context: Tokens that the model sees, T.
        rows: The conversations in use, in order.
        masked: Whether only the assistant's tokens are to be predicted.
        whole: See `TokenReader`.
    """

    def __init__(
        self, files: Sequence[TokenFile], form: Format, context: int, rows: Rows, masked: bool, whole: bool = False
    ) -> None:
        super().__init__(files, form, context, whole)
        self._arguments = (*self._arguments[:3], rows, masked, whole)  # type: ignore[assignment]
        self.rows = rows
        self.masked = masked
        self.whole = whole

    def _part(self, row: int, first: int, last: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]:
        """Tokens ``first`` to ``last`` (exclusive) of a row, and whether each is to be predicted; not copied."""
        content = self._content(int(self.rows.shard[row]))
        start = int(self.rows.start[row])
        part = slice(start + first, start + last)
        assert content.loss is not None
        return content.tokens[part], content.loss[part]

    def _window(self, row: int, number: int, parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.uint8]]]) -> Window:
        tokens, loss = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        url = self.files[int(self.rows.shard[row])].url
        if (largest := int(tokens.max())) >= self.form.vocab_size:
            raise UserError(
                f"shard {url}, conversation at token {self.rows.start[row]}: expected tokens in "
                f"0..{self.form.vocab_size - 1}, got {largest}"
            )
        return Window(url, number, tokens, loss if self.masked else None)


class SingleChats(ChatReader):
    """Each sample is one conversation, of which the first T + 1 tokens are used."""

    def counts(self) -> tuple[int, ...]:
        """The conversations."""
        return (len(self.rows.length),)

    def read(self, place: int) -> Window:
        """The conversation at ``place``. UserError: its shard cannot be read or is damaged."""
        length = min(int(self.rows.length[place]), self.context + 1)
        return self._window(place, place, [self._part(place, 0, length)])

    def without_targets(self) -> npt.NDArray[np.bool_]:
        """Which conversations are cut before the first token that is to be predicted, bool [N]."""
        empty = np.zeros(len(self.rows.length), np.bool_)
        if self.masked:
            # Every conversation has an assistant's turn: only one that is cut can have lost it.
            for row in np.flatnonzero(self.rows.length > self.context + 1):
                empty[row] = not self._part(int(row), 1, self.context + 1)[1].any()
        return empty


class PackedChats(ChatReader):
    """Each sample is a window of T + 1 tokens of all rows one after the other, as `TokenReader` cuts shards."""

    def __init__(
        self, files: Sequence[TokenFile], form: Format, context: int, rows: Rows, masked: bool, whole: bool = False
    ) -> None:
        super().__init__(files, form, context, rows, masked, whole)
        self._ends = np.cumsum(rows.length)

    def counts(self) -> tuple[int, ...]:
        """The windows."""
        return (windows_of(int(self._ends[-1]), self.context, self.whole),)

    def read(self, place: int) -> Window:
        """Window ``place``. UserError: a shard cannot be read or is damaged."""
        first = place * self.context
        last = min(first + self.context + 1, int(self._ends[-1]))
        begin = row = int(np.searchsorted(self._ends, first, "right"))
        parts = []
        while first < last:
            end = int(self._ends[row])
            start = end - int(self.rows.length[row])
            parts.append(self._part(row, first - start, min(last, end) - start))
            first, row = end, row + 1
        return self._window(begin, place, parts)


class PaddedStream(TokenStream):
    """A conversation in each row, padded to the longest of its batch, rounded up to a multiple of 64 tokens."""

    def _batch(self, epoch: int, draws: Sequence[Draw]) -> Loaded:
        batch, damaged = super()._batch(epoch, draws)
        longest = max(len(draw.sample.tokens) for draw in draws) - 1
        width = min(self.context, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        return Loaded(tuple(part[:, :width].contiguous() for part in batch), damaged)
