"""Conversations as batches for mid-training and fine-tuning: mixtures of JSONL files, packed or one in a row."""

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from lightning.pytorch.utilities import rank_zero_only

from lapbench.datamodules.chat_rows import PackedChats, PaddedStream, Rows, SingleChats
from lapbench.datamodules.convert.chat_shards import SPLIT, folder_name, render_file, source_sha256
from lapbench.datamodules.convert.progress import notice
from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.mixtures import ChatSource, check_sources, chosen, repeated, taken
from lapbench.datamodules.orders import IndexOrder, permutation
from lapbench.datamodules.plan import mixed
from lapbench.datamodules.sharded import ShardedData, check_at_least
from lapbench.datamodules.text import TokenStream
from lapbench.datamodules.token_manifest import TokenManifest, dtype_of
from lapbench.datamodules.token_shards import Format, TokenFile
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError


class Chat(ShardedData):
    """Loads conversations: ``(inputs [B, T] int64, targets [B, T] int64)``, targets -100 where nothing is predicted.

    The files are rendered to token shards on first use, which are kept in data_dir for each file and tokenizer.

    An epoch takes n_i of the m_i training conversations of source i: ``round(epochs_i m_i)``; or, with weights w,
    ``N w_i / sum(w)`` where N is the number of all training conversations, so that an epoch keeps its length (the
    largest remainders are rounded up). It takes all of them n_i // m_i times and n_i % m_i of them once more, always
    the same. Their order is a permutation over all sources, another one in each epoch (of windows when packing).
    Evaluation takes each held-out conversation once.

    Args:
        sources: The mixture.
        tokenizer: The ``tokenizer.json`` of the model.
        data_dir: Folder for the rendered files.
        packing: Cut all conversations, one after the other in an order drawn from the seed, into windows of T tokens
            (mid-training). Otherwise each is a row of its own (fine-tuning): what is beyond the context is cut off,
            and conversations without any target left are dropped; `report` counts them.
        loss_on: Predict what the assistant writes, or all tokens.
        context: Tokens that the model sees, T: of each window, or at most in each row.
        batch_size: Training rows in a batch of one process.
        eval_batch_size: Evaluation rows in a batch of one process; as batch_size when null.
        val_fraction: Share of each source's conversations in use that is held out for validation and test.
        val_sources: Files to validate and test on instead; of their settings only limit means something.
        val_seed: Seed that chooses the held-out conversations.
        num_workers: Worker processes that load for one process; 0 loads in the process itself, which is enough.
        seed: Seed of the order; the run's seed when null, 0 if the run has none.
        pin_memory: Copy batches to pinned memory when there is an accelerator.
        persistent_workers: Keep worker processes from one epoch to the next.

    Attributes:
        tokenizer: The tokenizer; after ``setup``, like those below.
        vocab_size: Its number of tokens, special ones included.
        token_bytes: How many bytes of text each token stands for, int64 [vocab_size]; 0 for special tokens.

    Raises:
        UserError: a setting out of range, or settings that exclude each other.
    """

    tokenizer: Tokenizer
    vocab_size: int
    token_bytes: npt.NDArray[np.int64]

    def __init__(
        self,
        sources: list[ChatSource],
        tokenizer: str,
        data_dir: str = "data/chat",
        packing: bool = False,
        loss_on: Literal["assistant", "all"] = "assistant",
        context: int = 2048,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        val_fraction: float = 0.0,
        val_sources: list[ChatSource] | None = None,
        val_seed: int = 0,
        num_workers: int = 0,
        seed: int | None = None,
        pin_memory: bool = True,
        persistent_workers: bool = True,
    ) -> None:
        super().__init__(
            data_dir, batch_size, eval_batch_size, num_workers, "index", 1, seed, pin_memory, persistent_workers, None
        )
        check_at_least("context", context, 1)
        check_sources(sources, val_sources or [])
        if loss_on not in ("assistant", "all"):
            raise UserError(f"loss_on must be assistant or all, got {loss_on!r}")
        if not 0 <= val_fraction < 1:
            raise UserError(f"val_fraction must be at least 0 and below 1, got {val_fraction}")
        if val_fraction and val_sources:
            raise UserError("val_fraction and val_sources exclude each other: set one of them")
        self.sources = tuple(sources)
        self.val_sources = tuple(val_sources or ())
        self.packing = packing
        self.loss_on = loss_on
        self.context = context
        self.val_fraction = val_fraction
        self.val_seed = val_seed
        self._tokenizer_file = Path(tokenizer)
        self._sha256: dict[str, str] = {}
        self._files: list[TokenFile] = []
        self._train: Rows | None = None
        self._val: Rows | None = None
        self._dropped = 0

    def prepare_data(self) -> None:
        """Render the files that have not been rendered with this tokenizer.

        Raises:
            UserError: a missing file or tokenizer, a line that is no conversation, a full disk.
        """
        tokenizer = self.load_tokenizer()
        for source in (*self.sources, *self.val_sources):
            folder = self._folder(source, tokenizer)
            render_file(Path(source.file), self._hash(source), tokenizer, folder, progress=sys.stderr.isatty())

    def setup(self, stage: str | None = None) -> None:
        """Find the rendered conversations, and choose those of the mixture and of the validation.

        Raises:
            UserError: a missing file or tokenizer, a missing or damaged shard, a limit above the number of
                conversations, a side without conversations; ``validate`` and ``test`` without conversations for it.
        """
        if not (self.val_fraction or self.val_sources):
            if stage in ("validate", "test"):
                raise UserError(
                    f"{type(self).__name__} has no conversations to {stage} on: set val_fraction or val_sources"
                )
            if stage == "fit" and self.trainer is not None:
                # Lightning has no quiet way to say that a data module has no validation data this time.
                self.trainer.limit_val_batches = 0
        if self._train is not None:
            return
        self.tokenizer = self.load_tokenizer()
        self.vocab_size = self.tokenizer.vocab_size
        self.token_bytes = self.tokenizer.token_bytes()
        self._files, self._dropped = [], 0
        self._check_apart()
        train = [self._open(source, f"sources[{i}]") for i, source in enumerate(self.sources)]
        val = [self._open(source, f"val_sources[{i}]") for i, source in enumerate(self.val_sources)]
        if self.val_fraction:
            sides = [self._split(rows, i) for i, rows in enumerate(train)]
            train, val = [kept for kept, _ in sides], [held_out for _, held_out in sides]
        self._val = Rows.joined(val) if val else None
        self._train = self._mixed(train)
        self._announce(stage)

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer, for which no conversations need be there.

        Raises:
            UserError: it is missing, or none.
        """
        return Tokenizer.load(self._tokenizer_file)

    def val_dataloader(self) -> ResumableLoader | list[object]:
        """The conversations of the validation, each once, in order; or nothing."""
        return [] if self._val is None else self._loader(self._val, training=False)

    def test_dataloader(self) -> ResumableLoader:
        """The conversations of the validation.

        Raises:
            UserError: there are none.
        """
        if self._val is None:
            raise UserError(f"{type(self).__name__} has no conversations to test on: set val_fraction or val_sources")
        return self._loader(self._val, training=False)

    def report(self) -> dict[str, int]:
        """What becomes of the training conversations in one epoch.

        Returns:
            ``conversations`` and their ``tokens`` that the mixture takes; how many of them are ``cut``, being longer
            than the context, and how many conversations are ``dropped``, having no target left (neither when packing);
            ``tokens_left_out``, beyond the context or after the last window; the ``samples``, conversations or windows;
            and ``samples_left_out``, those that fill no batch, others in each epoch.
        """
        rows = self._rows()
        plan = self._train_loader().stream.plan
        tokens, context = int(rows.length.sum()), self.context
        beyond = int(np.maximum(rows.length - (context + 1), 0).sum())
        return {
            "conversations": len(rows.length),
            "cut": 0 if self.packing else int((rows.length > context + 1).sum()),
            "dropped": self._dropped,
            "tokens": tokens,
            "tokens_left_out": tokens - (plan.samples * context + 1) if self.packing else beyond,
            "samples": plan.samples,
            "samples_left_out": plan.samples - plan.batches * plan.batch_size * plan.world_size,
        }

    def _train_loader(self) -> ResumableLoader:
        return self._loader(self._rows(), training=True)

    def _loader(self, rows: Rows, training: bool) -> ResumableLoader:
        reader = self._reader(rows, whole=not training)
        try:
            order = IndexOrder(self._plan(training)(reader.counts()), reader)
        except UserError as error:
            what = f"a window of {self.context} tokens" if self.packing else "a conversation"
            raise UserError(f"{error} (in {type(self).__name__}, a sample is {what})") from error
        stream = TokenStream if self.packing else PaddedStream
        identity: dict[str, int | str] = {
            "packing": str(self.packing),
            "loss_on": self.loss_on,
            "mixture": self._identity(),
        }
        return self._over(stream(order, self.context, identity))

    def _reader(self, rows: Rows, whole: bool) -> PackedChats | SingleChats:
        kind = PackedChats if self.packing else SingleChats
        return kind(self._files, self._format(), self.context, rows, self.loss_on == "assistant", whole)

    def _rows(self) -> Rows:
        """The training conversations of an epoch; for packing in the order in which they follow one another."""
        if self._train is None:
            raise RuntimeError("call setup() before asking for data")
        if not self.packing:
            return self._train
        return self._train.take(permutation(len(self._train.length), mixed("packing", self._run_seed())))

    def _check_apart(self) -> None:
        """UserError if a file is trained on and validated on."""
        train = {self._hash(source): i for i, source in enumerate(self.sources)}
        for i, source in enumerate(self.val_sources):
            if (same := train.get(self._hash(source))) is not None:
                raise UserError(f"val_sources[{i}] has the same conversations as sources[{same}]: {source.file}")

    def _open(self, source: ChatSource, key: str) -> Rows:
        """The conversations in use of a source, whose shards join the others."""
        folder = self._folder(source, self.tokenizer)
        manifest = TokenManifest.load(folder)
        shards = manifest.split(SPLIT)
        for shard in shards:
            self._check_file(f"{folder.name}/{shard.file}", shard.bytes)
        files = [TokenFile(str(folder / shard.file), shard) for shard in shards]
        rows = Rows.of(files, self._format(), len(self._files))
        self._files += files
        count = len(rows.length)
        if source.limit is not None:
            if source.limit > count:
                raise UserError(f"{key}: limit {source.limit} is above the {count} conversations of {source.file}")
            rows = rows.take(chosen(count, source.limit, mixed("limit", self._hash(source))))
        if self.packing:
            return rows
        reader = self._reader(rows, whole=False)
        assert isinstance(reader, SingleChats)
        without = reader.without_targets()
        if without.all():
            raise UserError(
                f"{key}: no conversation of {source.file} has anything to predict within its first {self.context + 1} "
                "tokens: raise context"
            )
        self._dropped += int(without.sum())
        return rows.take(~without)

    def _split(self, rows: Rows, number: int) -> tuple[Rows, Rows]:
        """The rows of a source for training, and those held out."""
        source, count = self.sources[number], len(rows.length)
        held_out = round(count * self.val_fraction)
        if not 0 < held_out < count:
            raise UserError(
                f"val_fraction {self.val_fraction} of {count} conversations of sources[{number}] ({source.file}) "
                f"holds out {held_out}: both sides need some"
            )
        val = np.zeros(count, np.bool_)
        val[chosen(count, held_out, mixed("validation", self._hash(source), self.val_seed))] = True
        return rows.take(~val), rows.take(val)

    def _mixed(self, parts: Sequence[Rows]) -> Rows:
        """The rows that an epoch takes of each source."""
        counts = [len(rows.length) for rows in parts]
        return Rows.joined(
            [
                rows.take(repeated(count, number, mixed("epochs", self._hash(source))))
                for rows, count, number, source in zip(
                    parts, counts, taken(self.sources, counts), self.sources, strict=True
                )
            ]
        )

    def _announce(self, stage: str | None) -> None:
        """Say once how many conversations do not fit the context."""
        if self.packing or stage != "fit" or rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            return
        lengths = self._rows().length
        longer = int((lengths > self.context + 1).sum())
        if longer or self._dropped:
            notice(
                f"{len(lengths)} training conversations, {longer} of them cut at the context of {self.context} tokens; "
                f"{self._dropped} others dropped, as they have nothing to predict before it"
            )

    def _format(self) -> Format:
        return Format(dtype_of(self.vocab_size), self.vocab_size, loss=True)

    def _folder(self, source: ChatSource, tokenizer: Tokenizer) -> Path:
        return self.data_dir / folder_name(Path(source.file), self._hash(source), tokenizer)

    def _hash(self, source: ChatSource) -> str:
        """The SHA-256 (hex) of the source's file, computed once."""
        if source.file not in self._sha256:
            self._sha256[source.file] = source_sha256(Path(source.file))
        return self._sha256[source.file]

    def _identity(self) -> str:
        """A hash of all that decides which conversations the mixture takes, and their tokens."""
        sources = [(self._hash(source), source.epochs, source.limit, source.weight) for source in self.sources]
        content = repr((self.tokenizer.sha256, sources, self.val_fraction, self.val_seed if self.val_fraction else 0))
        return hashlib.sha256(content.encode()).hexdigest()[:12]
