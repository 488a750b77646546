"""From documents to a folder of token shards: resumable at any moment, and equal bytes however often it was killed.

A shard appears under its name when it is whole, then gets its line in the journal; the tokenizer and then the manifest
are written last and make the folder a data set. A second run is given the same documents again and passes over those
of the shards that are finished.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lapbench.datamodules.convert.journal import JOURNAL, Journal, must_agree
from lapbench.datamodules.convert.progress import Bar, notice, waiting
from lapbench.datamodules.convert.writer import TarWriter, file_sha256
from lapbench.datamodules.manifest import MANIFEST, MODE, is_plain_name
from lapbench.datamodules.token_manifest import TokenManifest, TokenShard, dtype_of
from lapbench.datamodules.tokenizer import TOKENIZER, Tokenizer
from lapbench.errors import UserError
from lapbench.results.files import write_atomically

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

EMPTY = "empty_documents"
# 64 MiB a shard of 16-bit tokens: few files, and one that is streamed from elsewhere still fits into memory.
SHARD_TOKENS = 1 << 25


@dataclass(frozen=True)
class Entry:
    """A finished shard of ``split``, and how many documents of the split, and empty ones, went before its end."""

    split: str
    shard: TokenShard
    documents: int
    empty: int

    @classmethod
    def load(cls, value: dict[str, Any]) -> "Entry":
        """The entry of which ``value`` was made by `asdict`."""
        return cls(**value | {"shard": TokenShard(**value["shard"])})


@dataclass
class _Split:
    """A split under way: finished shards, documents to pass over and seen, and the content of the next shard."""

    shards: list[TokenShard] = field(default_factory=list)
    to_pass: int = 0
    documents: int = 0
    empty: int = 0
    tokens: "list[npt.NDArray[np.int64]]" = field(default_factory=list)
    loss: "list[npt.NDArray[np.bool_]]" = field(default_factory=list)
    held: int = 0
    text_bytes: int = 0


class TokenShardWriter:
    """``with TokenShardWriter(...) as writer: writer.add(...); manifest = writer.close()``.

    In the folder of an unfinished conversion of the same data it goes on: `add` passes over the documents of finished
    shards, so whoever calls it adds all documents again, in the same order, or leaves out what `pass_over` says.
    Processes that write into the same folder take turns, and the later ones find the work done.

    Args:
        folder: A new or empty folder, or that of an earlier conversion.
        dataset: The data set's name, with which the names of the shards begin.
        tokenizer: The tokenizer of the documents, copied into the folder.
        shard_tokens: A shard is closed by the document with which it has this many tokens.
        loss: Whether each document says which of its tokens are to be predicted.
        settings: JSON values that, with the arguments, decide every byte: the source's checksum and the like.
        origin: Where the documents come from; informative only.
        progress: Show bars and notices on stderr.

    Attributes:
        finished: Whether the folder held the data set when it was opened: then nothing is left to add.

    Raises:
        UserError: the folder holds something else or cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        dataset: str,
        tokenizer: Tokenizer,
        *,
        shard_tokens: int = SHARD_TOKENS,
        loss: bool = False,
        settings: Mapping[str, Any] | None = None,
        origin: str = "",
        progress: bool = False,
    ) -> None:
        if shard_tokens < 1:
            raise UserError(f"a shard must have at least 1 token, got {shard_tokens}")
        if not is_plain_name(dataset):
            raise UserError(f"a data set's name must be letters, digits and _ . + = @ -, got {dataset!r}")
        self.folder = Path(folder)
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.loss = loss
        self._shard_tokens = shard_tokens
        self._settings = {**(settings or {}), "shard_tokens": shard_tokens, "loss": loss}
        self._settings["tokenizer_sha256"] = tokenizer.sha256
        self._origin = origin
        self._progress = progress
        self._splits: dict[str, _Split] = {}
        self._journal: Journal[Entry] | None = None
        self._manifest = None if (self.folder / JOURNAL).exists() else self._found()
        if self._manifest is None:
            self._open()
        self.finished = self._manifest is not None

    def pass_over(self, split: str, count: int) -> int:
        """Leave out up to ``count`` documents, the next of ``split``, that finished shards hold; returns how many."""
        if self.finished:
            return count
        content = self._splits.setdefault(split, _Split())
        passed = min(count, content.to_pass)
        content.to_pass -= passed
        return passed

    def add(self, split: str, tokens: Sequence[int], text_bytes: int, loss: Sequence[int] | None = None) -> None:
        """Append a document; one without text is counted and left out.

        Args:
            split: The split's name.
            tokens: Its tokens, the first of which is ``<|bos|>``.
            text_bytes: The length of its text in UTF-8.
            loss: 1 for each token that is to be predicted, else 0; only with the writer's ``loss``.

        Raises:
            ValueError: tokens that cannot be a document's, or ``loss`` of another length.
            UserError: a shard cannot be written.
        """
        import numpy as np

        if self.pass_over(split, 1):
            return
        content = self._splits[split]
        content.documents += 1
        if text_bytes == 0:
            content.empty += 1
            return
        ids = np.asarray(tokens, np.int64)
        if ids.ndim != 1 or not len(ids) or ids[0] != self.tokenizer.bos:
            raise ValueError("a document begins with the token <|bos|>")
        if ids.min() < 0 or ids.max() >= self.tokenizer.vocab_size:
            raise ValueError(f"tokens must be in 0..{self.tokenizer.vocab_size - 1}, got {ids.min()}..{ids.max()}")
        if (loss is not None) != self.loss or (loss is not None and len(loss) != len(ids)):
            raise ValueError(f"expected {len(ids) if self.loss else 'no'} loss flags, got {loss and len(loss)}")
        content.tokens.append(ids)
        if loss is not None:
            content.loss.append(np.asarray(loss, np.bool_))
        content.held += len(ids)
        content.text_bytes += text_bytes
        if content.held >= self._shard_tokens:
            self._write(split, content)

    def close(self) -> TokenManifest:
        """Write what is left and the manifest; returns the manifest.

        Raises:
            UserError: a split without text, or a file cannot be written.
        """
        if self._manifest is None:
            assert self._journal is not None
            for split, content in self._splits.items():
                if content.to_pass:
                    raise UserError(
                        f"{self._origin or self.dataset}: {split} ended {content.to_pass} documents before the end of "
                        f"the shards in {self.folder}: did it change?"
                    )
                if content.held:
                    self._write(split, content)
                if not content.shards:
                    raise UserError(
                        f"{self._origin or self.dataset}: no document with text in {split} "
                        f"({content.documents} looked at)"
                    )
            if not self._splits:
                raise UserError(f"{self._origin or self.dataset}: no documents")
            empty = {split: content.empty for split, content in self._splits.items() if content.empty}
            manifest = TokenManifest(
                self.dataset,
                self.tokenizer.sha256,
                self.tokenizer.vocab_size,
                {split: tuple(content.shards) for split, content in self._splits.items()},
                self.loss,
                {"origin": self._origin, **self._settings, **({EMPTY: empty} if empty else {})},
            )
            write_atomically(self.folder / TOKENIZER, self.tokenizer.path.read_bytes(), MODE)
            manifest.load_tokenizer(self.folder)
            manifest.save(self.folder)
            self._journal.remove()
            self._manifest = manifest
        self._release()
        return self._manifest

    def _found(self) -> TokenManifest | None:
        """The manifest of the folder if it is there; UserError if it is of something else or lacks a shard."""
        if not (self.folder / MANIFEST).is_file():
            return None
        manifest = TokenManifest.load(self.folder)
        made = {name: manifest.source.get(name) for name in self._settings}
        must_agree(f"{self.folder} holds", manifest.dataset, made, self.dataset, self._settings)
        for shard in (shard for shards in manifest.splits.values() for shard in shards):
            path = self.folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.bytes:
                raise UserError(
                    f"{path} is missing or not of the {shard.bytes} bytes in the manifest: "
                    f"delete {self.folder} and convert again"
                )
        manifest.load_tokenizer(self.folder)
        return manifest

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot create the folder {self.folder}: {error.strerror}") from error
        self._journal = Journal(self.folder, Entry.load, lambda: waiting(self.folder, self._progress))
        self._journal.__enter__()
        try:
            self._manifest = self._found()
            if self._manifest is not None:
                self._journal.remove()  # the earlier run was killed between its last two steps
                self._release()
            else:
                self._journal.begin(self.dataset, self._settings)
                self._keep_finished_shards(self._journal)
        except BaseException:
            self._release()
            raise

    def _keep_finished_shards(self, journal: Journal[Entry]) -> None:
        """Take over the shards that are as the journal says, up to the first that is not."""
        if not journal.entries:
            return
        with Bar("checking", len(journal.entries), self._progress, unit="shards") as bar:
            for number, entry in enumerate(journal.entries):
                path, shard = self.folder / entry.shard.file, entry.shard
                if not (path.is_file() and path.stat().st_size == shard.bytes and file_sha256(path) == shard.sha256):
                    notice(f"{path} is not as it was written: writing it again", self._progress)
                    journal.keep(number)
                    break
                content = self._splits.setdefault(entry.split, _Split())
                content.shards.append(shard)
                content.to_pass = content.documents = entry.documents
                content.empty = entry.empty
                bar.advance(1)

    def _write(self, split: str, content: _Split) -> None:
        import numpy as np

        assert self._journal is not None
        key = f"{len(content.shards):05d}"
        path = self.folder / f"{self.dataset}-{split}-{key}.tar"
        starts = np.cumsum([0, *map(len, content.tokens)])[:-1]
        with TarWriter(path) as tar:
            tokens = np.concatenate(content.tokens).astype(dtype_of(self.tokenizer.vocab_size))
            tar.member(f"{key}.tokens.npy", _npy(tokens))
            tar.member(f"{key}.documents.npy", _npy(starts.astype(np.int64)))
            if self.loss:
                tar.member(f"{key}.loss.npy", _npy(np.concatenate(content.loss).astype(np.uint8)))
            file, size, sha256 = tar.finish()
        shard = TokenShard(file, content.held, len(content.tokens), content.text_bytes, size, sha256)
        content.shards.append(shard)
        self._journal.add(Entry(split, shard, content.documents, content.empty))
        content.tokens, content.loss, content.held, content.text_bytes = [], [], 0, 0

    def _release(self) -> None:
        """Let other processes into the folder."""
        if self._journal is not None:
            self._journal.__exit__(None, None, None)
            self._journal = None

    def __enter__(self) -> "TokenShardWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()


def _npy(array: "npt.NDArray[Any]") -> bytes:
    import numpy as np

    stream = io.BytesIO()
    # Little-endian whatever the machine: the bytes are mapped into memory elsewhere.
    np.save(stream, array.astype(array.dtype.newbyteorder("<"), copy=False), allow_pickle=False)
    return stream.getvalue()
