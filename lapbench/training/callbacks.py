"""Callbacks of every run: checkpoints, seeding, throughput, record, progress in log files, non-finite losses."""

import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lapbench.tasks.steps import NonFiniteLossError
from lapbench.training.damaged import DamagedImages
from lapbench.training.exact_resume import ExactResume
from lapbench.training.recording import RecordWriter
from lapbench.training.run_folder import CHECKPOINTS, RunFolder
from lapbench.training.step_checkpoint import StepCheckpoint
from lapbench.training.stop_signals import StopSignals
from lapbench.training.throughput import Throughput


def fit_callbacks(folder: RunFolder, seed: int, signals: StopSignals) -> list[pl.Callback]:
    """What every training run has besides the callbacks of its config."""
    assert folder.path is not None
    # No metric in the names: "val/top1" would make a sub-folder.
    checkpoint = partial(
        RunCheckpoint, folder.path / CHECKPOINTS, auto_insert_metric_name=False, enable_version_counter=False
    )
    throughput, damaged = Throughput(), DamagedImages()
    callbacks: list[pl.Callback] = [
        StepSeeds(seed),
        throughput,
        damaged,
        RecordWriter(folder, throughput, damaged, seed),
        SaveNonFinite(folder),
        ExactResume(),
    ]
    if not sys.stderr.isatty():  # a progress bar in a log file is a mess
        callbacks.append(EpochLines())
    if folder.settings.test == "best":
        monitor, mode = folder.settings.monitor, folder.settings.monitor_mode
        callbacks.append(checkpoint(filename="best", monitor=monitor, mode=mode))
    # After the best one, whose score so far it holds for a resumed run.
    callbacks.append(checkpoint(filename="last", save_on_train_epoch_end=True))
    # After the epoch's: a run that is asked to stop leaves here.
    callbacks.append(StepCheckpoint(folder.checkpoint_file("last"), signals, folder.settings.save_every_n_steps))
    return callbacks


class RunCheckpoint(ModelCheckpoint):
    """Lightning's, but that the run's folder may have been moved before it is resumed."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over the best score so far, with the files where they are now."""
        assert self.dirpath is not None
        folder = Path(self.dirpath)

        def moved(file: str) -> str:
            return str(folder / Path(file).name) if file else ""

        files = {name: moved(state_dict[name]) for name in state_dict if name.endswith("_model_path")}
        best = {moved(file): score for file, score in state_dict["best_k_models"].items()}
        super().load_state_dict({**state_dict, **files, "best_k_models": best, "dirpath": self.dirpath})


class StepSeeds(pl.Callback):
    """Seeds the main process's generators from (seed, rank, batch) at each training batch.

    Dropout, drop-path and mixing then do not depend on what was drawn before, so that a resumed run repeats them.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Seeds python, numpy and torch."""
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        words = np.random.SeedSequence([self.seed, trainer.global_rank, done]).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))  # noqa: NPY002  timm draws from the global generator
        torch.default_generator.manual_seed(int(words[2]))
        if pl_module.device.type == "cuda":
            torch.cuda.manual_seed(int(words[2]))


class SaveNonFinite(pl.Callback):
    """Saves checkpoints/nonfinite.ckpt, the state before the step, when the loss is not finite."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Saves, and says where."""
        if isinstance(exception, NonFiniteLossError):
            file = self.folder.checkpoint_file("nonfinite")
            trainer.save_checkpoint(file)
            exception.args = (f"{exception}; the state before this step is in {file}",)


class EpochLines(Checkpoint):
    """One line for an epoch on stderr, at most every ten seconds, and the last: progress for log files.

    A ``Checkpoint`` to Lightning, as these see what the task logs when its epoch ends.
    """

    def __init__(self, every_seconds: float = 10.0) -> None:
        self.every_seconds = every_seconds
        self._next = 0.0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the epoch and its metrics."""
        epoch = trainer.current_epoch + 1
        if not trainer.is_global_zero:
            return
        if time.monotonic() < self._next and epoch != trainer.max_epochs:
            return
        self._next = time.monotonic() + self.every_seconds
        # A length in steps has no number of epochs.
        total = f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else f", step {trainer.global_step}"
        print(f"epoch {epoch}{total}  {_shown(trainer)}", file=sys.stderr, flush=True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Prints the step and its metrics, after a validation within an epoch."""
        within = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and not trainer.is_last_batch
        if within and trainer.is_global_zero and time.monotonic() >= self._next:
            self._next = time.monotonic() + self.every_seconds
            print(f"step {trainer.global_step}  {_shown(trainer)}", file=sys.stderr, flush=True)


def _shown(trainer: pl.Trainer) -> str:
    names = ("train/loss_epoch", "val/loss", "val/top1", "val/miou", "val/bits_per_byte", "train/samples_per_second")
    metrics = trainer.callback_metrics
    return "  ".join(f"{name} {float(metrics[name]):.4g}" for name in names if name in metrics)
