"""Text as windows of tokens, streamed from token shards that a manifest describes."""

import hashlib
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import default_collate

from lapbench.datamodules.loader import ResumableLoader
from lapbench.datamodules.orders import Draw, IndexOrder, Order, StreamOrder
from lapbench.datamodules.sharded import ShardedData, check_at_least
from lapbench.datamodules.shards import local_path
from lapbench.datamodules.streaming import BatchStream, Loaded
from lapbench.datamodules.token_manifest import TokenManifest
from lapbench.datamodules.token_shards import Format, RandomTokens, StreamedTokens, TokenFile, Window, windows_of
from lapbench.datamodules.tokenizer import Tokenizer
from lapbench.errors import UserError

IGNORED = -100  # the target where nothing is to be predicted


class TokenStream(BatchStream):
    """Batches ``(inputs [B, T] int64, targets [B, T] int64)`` of one split on one rank.

    Targets are `IGNORED` where the data say that a token is not to be predicted, and after the end of a window that is
    shorter than T, where inputs are 0.

    Args:
        order: Which windows make up which batch.
        context: Tokens in a window, T.
        identity: What else decides the batches: settings that go into checkpoints beside those of the order.
    """

    def __init__(self, order: Order, context: int, identity: dict[str, int | str] | None = None) -> None:
        super().__init__(order)
        self.context = context
        self.identity = identity or {}

    def layout(self, workers: int) -> dict[str, int | str]:
        """The settings of the order, the context, and which data these are."""
        return {**self.order.layout(workers), "context": self.context, **self.identity}

    def _batch(self, epoch: int, draws: Sequence[Draw]) -> Loaded:
        # default_collate stacks straight into shared memory when it runs in a worker.
        return Loaded(tuple(default_collate([self._pair(draw.sample) for draw in draws])), [])

    def _pair(self, window: Window) -> tuple[Tensor, Tensor]:
        length = len(window.tokens) - 1
        pair = torch.zeros(2, self.context, dtype=torch.int64)
        inputs, targets = pair
        tokens = torch.from_numpy(window.tokens.astype(np.int64))
        inputs[:length] = tokens[:-1]
        targets[:length] = tokens[1:]
        targets[length:] = IGNORED
        if window.loss is not None:
            targets[:length][torch.from_numpy(window.loss[1:] == 0)] = IGNORED
        return inputs, targets


class TextShards(ShardedData):
    """Loads one data set of text: ``(inputs [B, T] int64, targets [B, T] int64)``.

    Documents, each beginning with ``<|bos|>``, lie one after the other and are cut into windows of T tokens. Every
    process reads its own part of each epoch. Training takes full windows, and each at most once an epoch; evaluation
    predicts every token of a split exactly once, in order.

    Args:
        data_dir: Folder with manifest and tokenizer (and the shards, unless shards_url says otherwise).
        context: Tokens in a window, T.
        batch_size: Training windows in a batch of one process.
        eval_batch_size: Evaluation windows in a batch of one process; as batch_size when null.
        val_split: The split to validate on; null for none.
        test_split: The split to test on.
        num_workers: Worker processes that load for one process; 0 loads in the process itself, which is enough for
            local shards.
        reader: ``index`` draws each epoch's order from the whole split, the same for any number of workers, and
            resumes at once; it needs local shards. ``stream`` reads shards from front to back, also from https, each
            of which is then wholly in memory.
        shuffle_buffer: Windows that each worker of the stream holds in memory to shuffle them.
        seed: Seed of the order; the run's seed when null, 0 if the run has none.
        pin_memory: Copy batches to pinned memory when there is an accelerator.
        persistent_workers: Keep worker processes from one epoch to the next.
        shards_url: Where the shards are, if not in data_dir: a folder, file: or https: URL.

    Attributes:
        tokenizer: The data set's tokenizer; after ``setup``, like those below.
        vocab_size: Its number of tokens, special ones included.
        token_bytes: How many bytes of text each token stands for, int64 [vocab_size]; 0 for special tokens.

    Raises:
        UserError: a setting out of range.
    """

    train_split: ClassVar[str] = "train"

    tokenizer: Tokenizer
    vocab_size: int
    token_bytes: npt.NDArray[np.int64]

    def __init__(
        self,
        data_dir: str,
        context: int = 2048,
        batch_size: int = 32,
        eval_batch_size: int | None = None,
        val_split: str | None = "val",
        test_split: str = "val",
        num_workers: int = 0,
        reader: Literal["index", "stream"] = "index",
        shuffle_buffer: int = 2048,
        seed: int | None = None,
        pin_memory: bool = True,
        persistent_workers: bool = True,
        shards_url: str | None = None,
    ) -> None:
        super().__init__(
            data_dir,
            batch_size,
            eval_batch_size,
            num_workers,
            reader,
            shuffle_buffer,
            seed,
            pin_memory,
            persistent_workers,
            shards_url,
        )
        check_at_least("context", context, 1)
        if reader == "index" and shards_url is not None and local_path(shards_url) is None:
            raise UserError(
                f"reader index needs local shards, got {shards_url}: set reader to stream, or copy the shards to "
                f"{data_dir}"
            )
        self.context = context
        self.val_split = val_split
        self.test_split = test_split
        self._manifest: TokenManifest | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read the manifest and the tokenizer, and see that they belong together and that local shards are there.

        Raises:
            UserError: no data or tokenizer, another tokenizer than the shards', a missing or cut shard; ``validate``
                without a split for it.
        """
        if self.val_split is None:
            if stage == "validate":
                raise UserError(f"{type(self).__name__} has no validation split: set val_split")
            if stage == "fit" and self.trainer is not None:
                # Lightning has no quiet way to say that a data module has no validation data this time.
                self.trainer.limit_val_batches = 0
        if self._manifest is not None:
            return
        manifest = TokenManifest.load(self.data_dir)
        self.tokenizer = manifest.load_tokenizer(self.data_dir)
        for shard in (shard for shards in manifest.splits.values() for shard in shards):
            self._check_file(shard.file, shard.bytes)
        self.vocab_size = manifest.vocab_size
        self.token_bytes = self.tokenizer.token_bytes()
        self._manifest = manifest

    def load_tokenizer(self) -> Tokenizer:
        """The data set's tokenizer, for which no shard need be there.

        Raises:
            UserError: no manifest or tokenizer, or another one than the shards'.
        """
        return TokenManifest.load(self.data_dir).load_tokenizer(self.data_dir)

    def val_dataloader(self) -> ResumableLoader | list[object]:
        """The validation split, each token predicted once, in order; or nothing."""
        return self._loader(self.val_split, training=False) if self.val_split is not None else []

    def test_dataloader(self) -> ResumableLoader:
        """The test split, each token predicted once, in order."""
        return self._loader(self.test_split, training=False)

    def report(self) -> dict[str, int]:
        """What becomes of the tokens of the training split in one epoch; the last three sum up to the first.

        Returns:
            ``tokens``; ``predicted``; ``dropped_tails``, those that no full window of their shard predicts, the first
            of each shard among them; ``dropped_windows``, those of windows that fill no batch, other windows in each
            epoch.
        """
        manifest = self._loaded_manifest()
        plan = self._train_loader().stream.plan
        tokens = manifest.tokens(self.train_split)
        full = plan.samples * self.context
        predicted = plan.batches * plan.batch_size * plan.world_size * self.context
        return {
            "tokens": tokens,
            "predicted": predicted,
            "dropped_tails": tokens - full,
            "dropped_windows": full - predicted,
        }

    def _train_loader(self) -> ResumableLoader:
        return self._loader(self.train_split, training=True)

    def _loader(self, split: str, training: bool) -> ResumableLoader:
        stream = TokenStream(self._order(split, training), self.context, self._identity(split))
        return self._over(stream)

    def _identity(self, split: str) -> dict[str, int | str]:
        """What the order of the windows does not tell: a hash of the shards of ``split``, tokenizer included."""
        manifest = self._loaded_manifest()
        parts = [manifest.tokenizer_sha256, *(shard.sha256 for shard in manifest.split(split))]
        return {"data": hashlib.sha256("".join(parts).encode()).hexdigest()[:12]}

    def _order(self, split: str, training: bool) -> Order:
        """Which windows make up the batches of this process."""
        manifest = self._loaded_manifest()
        files = [TokenFile(self._url(shard.file), shard) for shard in manifest.split(split)]
        longest = max(shard.tokens for shard in manifest.split(split))
        if training and not windows_of(longest, self.context, whole=False):
            raise UserError(
                f"context {self.context} is longer than every shard of {split!r} in {self.data_dir}: the longest has "
                f"{longest} tokens, of which the first is not predicted"
            )
        arguments = (files, Format.of(manifest), self.context, not training)
        plan = self._plan(training)
        try:
            if self.reader == "index":
                reader = RandomTokens(*arguments)
                return IndexOrder(plan(reader.counts()), reader)
            stream = StreamedTokens(*arguments)
            return StreamOrder(plan(stream.counts()), stream, self.shuffle_buffer)
        except UserError as error:
            raise UserError(f"{error} (in {self.data_dir}, a sample is a window of {self.context} tokens)") from error

    def _loaded_manifest(self) -> TokenManifest:
        if self._manifest is None:
            raise RuntimeError("call setup() before asking for data")
        return self._manifest
