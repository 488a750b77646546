"""Resuming a run under another layout of its data: other batches, processes, workers or samples.

A checkpoint's position counts batches. Under another layout it is taken to the same share of the epoch, and the
learning-rate schedule with it. No sample order, and so no result, is then what it would have been without the change;
the record says so.
"""

import math
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from lapbench.training.exact_resume import CHECKPOINT_KEY
from lapbench.training.run_folder import RunFolder

OPTION = "--allow_layout_change"


class LayoutChange(pl.Callback):
    """Moves a checkpoint's counters to the layout of this run, where ``--allow_layout_change`` asks for it.

    Args:
        folder: The run's folder; its notes get what changed.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Rewrites the checkpoint before Lightning restores its loops from it."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        kept = checkpoint.get(CHECKPOINT_KEY)
        if trainer.state.fn != TrainerFn.FITTING or kept is None:
            return
        before = dict(checkpoint.get(type(data).__qualname__, {}))
        data.load_state_dict({})  # which would refuse another layout
        trainer.fit_loop.setup_data()
        after = data.state_dict()
        named = {key.rpartition(".")[2] for key in self.folder.changes}
        layout = {name: (before.get(name), after.get(name)) for name in (before | after).keys() - named}
        changes = self.folder.changes | {
            name: values for name, values in sorted(layout.items()) if len(set(values)) > 1
        }
        if not changes:
            return
        words = ", ".join(f"{name} was {old!r} and is {new!r}" for name, (old, new) in changes.items())
        note = f"at step {checkpoint['global_step']}: {words}"
        earlier = self.folder.notes.get("inexact_resumes", [])
        self.folder.notes["inexact_resumes"] = [*earlier, note]
        accumulation: int = trainer.accumulate_grad_batches
        steps = math.ceil(trainer.num_training_batches / accumulation)
        old_steps = math.ceil(kept["batches_per_epoch"] / kept["accumulation"])
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        _move(progress, kept["batches_per_epoch"], int(trainer.num_training_batches), accumulation)
        for scheduler in checkpoint["lr_schedulers"]:
            scheduler["last_epoch"] = round(scheduler["last_epoch"] * steps / old_steps)


def _move(progress: dict[str, Any], old: int, new: int, accumulation: int) -> None:
    """Take the counters of batches from epochs of ``old`` to epochs of ``new`` batches, to the end of a step."""
    total, current = progress["total"]["processed"], progress["current"]["processed"]
    moved = new if current == old else current * new // old // accumulation * accumulation
    progress["current"] |= dict.fromkeys(("ready", "started", "processed", "completed"), moved)
    epochs = (total - current) // old
    progress["total"] |= dict.fromkeys(("ready", "started", "processed", "completed"), epochs * new + moved)
    progress["is_last_batch"] = moved == new
