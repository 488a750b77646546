"""Damaged training images: counted, told of once, and kept in checkpoints and the record."""

import sys
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lapbench.datamodules.loader import ResumableLoader

LISTED = 20


class DamagedImages(pl.Callback):
    """Counts the images of training batches that could not be decoded, over ranks, epochs and resumes.

    An image that is drawn again in a later epoch counts again. The first one is told on stderr by the process that
    met it, and from then on ``train/damaged`` is on the progress bar: what this process met, and what the others had
    met when the ranks last agreed, which they do at each checkpoint and each epoch's end.
    """

    def __init__(self) -> None:
        self._agreed = 0
        self._listed: list[str] = []
        self._own = 0
        # Batch and name of what this process has met since the ranks agreed, each name once and not more than fit.
        self._found: list[tuple[int, str]] = []

    @property
    def notes(self) -> dict[str, Any]:
        """For `Record.notes`: ``{"damaged_images": {"count", "samples"}}``, empty if there were none."""
        if not self._count:
            return {}
        return {"damaged_images": {"count": self._count, "samples": _listed(self._listed, self._found)}}

    @property
    def _count(self) -> int:
        return self._agreed + self._own

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        """Takes over what the loader found in this batch."""
        loader = trainer.train_dataloader
        if isinstance(loader, ResumableLoader) and loader.damaged:
            if not self._count:
                first = loader.damaged[0]
                sys.stderr.write(f"damaged image: {first} cannot be decoded; another of its batch takes its place\n")
            self._own += len(loader.damaged)
            done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
            known = {*self._listed, *(name for _, name in self._found)}
            new = [name for name in dict.fromkeys(loader.damaged) if name not in known]
            self._found += [(done, name) for name in new][: LISTED - len(self._found)]
            loader.damaged.clear()
        if self._count:
            pl_module.log("train/damaged", float(self._count), prog_bar=True, on_step=True, rank_zero_only=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The ranks agree."""
        self._agree()

    def state_dict(self) -> dict[str, Any]:
        """Count and first names over all ranks; Lightning asks every rank whenever it saves."""
        self._agree()
        return {"count": self._agreed, "samples": list(self._listed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        self._agreed, self._listed = state_dict["count"], list(state_dict["samples"])
        self._own, self._found = 0, []

    def _agree(self) -> None:
        """Adds up what the ranks have met since the last time: afterwards all of them know the same."""
        parts: list[Any] = [(self._own, self._found)]
        if dist.is_available() and dist.is_initialized():
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (self._own, self._found))
        self._agreed += sum(own for own, _ in parts)
        # By batch, so that the names do not depend on when the ranks agreed; sorting keeps the order of ranks.
        self._listed = _listed(self._listed, sorted((item for _, found in parts for item in found), key=lambda i: i[0]))
        self._own, self._found = 0, []


def _listed(names: list[str], found: list[tuple[int, str]]) -> list[str]:
    return list(dict.fromkeys([*names, *(name for _, name in found)]))[:LISTED]
