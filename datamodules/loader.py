"""The loader that goes on exactly where a checkpoint left off."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lapbench.datamodules.streaming import BatchStream, Failure, Loaded
from lapbench.errors import UserError
from lapbench.process import outlive_stop_signals


class ResumableLoader:
    """Iterates over a ``BatchStream`` with worker processes, resuming from Lightning's own batch counter.

    The counter is part of every checkpoint, so whatever a checkpoint was made for (a step, an epoch's end, in the
    middle of validation) the next batch is the one that would have followed. The loader keeps no position of its own.

    It holds a ``DataLoader`` rather than being one: Lightning rebuilds and second-guesses loaders that it recognises.

    Args:
        stream: What to iterate over.
        trainer: Whose counter gives the position. None: each iteration is a whole epoch, the first one epoch 0
            (always epoch 0 for evaluation).
        num_workers: Worker processes; 0 loads in the main process.
        pin_memory: Copy batches to pinned memory, where there is an accelerator.
        persistent_workers: Keep the workers from one epoch to the next.

    Attributes:
        damaged: The damaged images in the batches handed out so far, in order; whoever reports them may empty it.
    """

    def __init__(
        self,
        stream: BatchStream,
        trainer: Trainer | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        self.stream = stream
        self.num_workers = num_workers
        self._trainer = trainer
        self.damaged: list[str] = []
        self._epoch = 0
        self._loader: DataLoader[Any] = DataLoader(
            stream,
            batch_size=None,  # the stream makes whole batches
            num_workers=num_workers,
            pin_memory=pin_memory and torch.accelerator.is_available(),
            persistent_workers=persistent_workers and num_workers > 0,
            generator=torch.Generator(),  # otherwise each epoch would draw from the model's generator
            worker_init_fn=outlive_stop_signals if num_workers > 0 else None,
        )

    def __len__(self) -> int:
        """Batches of an epoch on this rank."""
        return self.stream.plan.batches

    def __iter__(self) -> Iterator[Any]:
        """The batches from the current position to the end of the epoch.

        Raises:
            UserError: what a worker found wrong with the user's data.
        """
        # As a generator this starts nothing before the first batch: Lightning calls iter() also to see if it works.
        self.stream.set_position(*self._position())
        item: Loaded | Failure
        for item in self._loader:
            if isinstance(item, Failure):
                raise UserError(item.message)
            self.damaged += item.damaged
            yield item.batch

    @property
    def _iterator(self) -> Any:
        """The ``DataLoader``'s iterator: through it Lightning stops the workers when it is done with a loader."""
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        self._loader._iterator = value

    def _position(self) -> tuple[int, int]:
        """Epoch and batch to start at."""
        if not self.stream.plan.training:
            return 0, 0
        if self._trainer is None:
            self._epoch += 1
            return self._epoch - 1, 0
        done: int = self._trainer.fit_loop.epoch_loop.batch_progress.total.processed  # type: ignore[attr-defined]
        return divmod(done, max(1, self._epoch_batches()))

    def _epoch_batches(self) -> int:
        """Batches of an epoch that the trainer takes."""
        limit = self._trainer.limit_train_batches if self._trainer is not None else None
        if isinstance(limit, int):
            return min(len(self), limit)
        return len(self) if limit is None else int(len(self) * limit)

    def state_dict(self) -> dict[str, int | str]:
        """The layout that a position depends on; Lightning puts it into checkpoints."""
        return self.stream.layout(max(1, self.num_workers))

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Refuse a checkpoint whose position means other samples here.

        Raises:
            UserError: naming the settings that differ.
        """
        here = self.state_dict()
        # The readers have different settings: between them the reader itself is the only difference worth a word.
        names = dict.fromkeys((*here, *state)) if state.get("reader") == here["reader"] else ("reader",)
        changed = [
            f"{name} was {state.get(name)} and is {here.get(name)}"
            for name in names
            if state.get(name) != here.get(name)
        ]
        if changed:
            raise UserError(
                f"cannot resume the data stream from this checkpoint: {', '.join(changed)}; "
                "--allow_layout_change accepts it, at the cost of exactness"
            )
