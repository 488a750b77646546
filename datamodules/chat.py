"""Conversations as batches for mid-training and fine-tuning: mixtures of JSONL files, packed or one in a row."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from lapbench.datamodules.chat_rows import ChatReader, PackedChats, Rows, SingleChats
from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.mixtures import chosen, repeated, rows_by_epochs, rows_by_weights
from lapbench.datamodules.orders import Draw, IndexOrder, permutation
from lapbench.datamodules.plan import mixed
from lapbench.datamodules.sharded import ShardedData, check_at_least
from lapbench.datamodules.streaming import Loaded
from lapbench.datamodules.text import TokenStream
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.datamodules.token_shards import Format, TokenFile
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError

WIDTH_MULTIPLE = 64  # of the tokens in a padded row: few shapes, so that compiled models and allocators meet them again


@dataclass(frozen=True)
class ChatSource:
    """A file of conversations in a mixture.

    Args:
        file: Conversation JSONL (see `conversations`).
        epochs: How often an epoch of the mixture takes each conversation; 0.5 takes half of them, always the same.
        limit: Use this many conversations, chosen by the file's content alone; all when null.
        weight: The source's share in the mixture, in proportion to the other sources' weights, instead of epochs.
    """

    file: str
    epochs: float = 1.0
    limit: int | None = None
    weight: float | None = None


@dataclass(frozen=True)
class _Source:
    """A source that has been rendered: its SHA-256 (hex), and where its conversations in use lie."""

    sha256: str
    rows: Rows

    def seed(self, purpose: str, *more: int) -> int:
        """A seed that does not depend on the source's place in the mixture."""
        return mixed(purpose, self.sha256, *more)


class PaddedStream(TokenStream):
    """A conversation in each row, padded to the longest of its batch, rounded up to a multiple of 64 tokens."""

    def _batch(self, epoch: int, draws: Sequence[Draw]) -> Loaded:
        batch, damaged = super()._batch(epoch, draws)
        longest = max(len(draw.sample.tokens) for draw in draws) - 1
        width = min(self.context, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        return Loaded(tuple(part[:, :width].contiguous() for part in batch), damaged)


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
        _check_sources(sources, val_sources or [])
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
        self._format: Format | None = None
        self._train: Rows | None = None
        self._val: Rows | None = None
        self._mixture = ""

    def prepare_data(self) -> None:
        """Render the files that have not been rendered with this tokenizer.

        Raises:
            UserError: a missing file or tokenizer, a line that is no conversation, a full disk.
        """
        from lapbench.datamodules.convert.chat_shards import render_file

        tokenizer = Tokenizer.load(self._tokenizer_file)
        for source in (*self.sources, *self.val_sources):
            folder = self._folder(source, tokenizer)
            render_file(
                Path(source.file), self._hash(source), tokenizer, folder, progress=sys.stderr.isatty()
            )

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
        self.tokenizer = Tokenizer.load(self._tokenizer_file)
        self.vocab_size = self.tokenizer.vocab_size
        self.token_bytes = self.tokenizer.token_bytes()
        self._files = []
        sources = [self._open(source, f"sources[{i}]") for i, source in enumerate(self.sources)]
        validation = [self._open(source, f"val_sources[{i}]").rows for i, source in enumerate(self.val_sources)]
        if self.val_fraction:
            sides = [self._held_out(source, f"sources[{i}]") for i, source in enumerate(sources)]
            sources, validation = [train for train, _ in sides], [val for _, val in sides]
        self._val = Rows.joined(validation) if validation else None
        self._mixture = self._identity([source.sha256 for source in sources])
        self._train = self._mixed(sources)

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
            ``conversations`` and ``tokens`` that the mixture takes; of these ``cut`` conversations, that are longer
            than the context, and ``dropped`` ones, that have no target left (both 0 when packing); ``predicted``
            tokens, whether or not they are targets; ``left_out``, the tokens that are not: the first one of each row,
            what was cut off or dropped, and what fills no batch (in each epoch other rows: estimated by the mean).
        """
        raise NotImplementedError

    def _train_loader(self) -> ResumableLoader:
        return self._loader(self._rows(), training=True)

    def _loader(self, rows: Rows, training: bool) -> ResumableLoader:
        reader = self._reader(rows, training)
        try:
            order = IndexOrder(self._plan(training)(reader.counts()), reader)
        except UserError as error:
            what = f"a window of {self.context} tokens" if self.packing else "a conversation"
            raise UserError(f"{error} (a sample of {type(self).__name__} is {what})") from error
        stream = TokenStream if self.packing else PaddedStream
        identity: dict[str, int | str] = {"packing": self.packing, "loss_on": self.loss_on, "mixture": self._mixture}
        return self._over(stream(order, self.context, identity))
