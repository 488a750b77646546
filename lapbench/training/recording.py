"""Keeps a run's record.json true while it trains."""

import math
import platform
import shutil
import subprocess
import time
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.trainer.states import TrainerFn

from lapbench.evaluation.after_fit import FOLDER as EVALUATIONS
from lapbench.results.record import Record, write_record
from lapbench.training.damaged import DamagedImages
from lapbench.training.run_folder import RunFolder, schedule_name
from lapbench.training.throughput import Throughput

_VERSIONS = ("lapbench", "torch", "torchvision", "lightning", "timm", "torchmetrics", "webdataset", "numpy", "pillow")


class RecordWriter(Checkpoint):
    """Writes the record when training starts, after each epoch, and when the run fails or is interrupted.

    A ``Checkpoint`` to Lightning, as these see what the task logs when its epoch ends.

    Args:
        folder: The run's folder.
        throughput: What measures samples/s.
        damaged: What counts damaged images.
        seed: The run's seed.
    """

    def __init__(self, folder: RunFolder, throughput: Throughput, damaged: DamagedImages, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.throughput = throughput
        self.damaged = damaged
        self.record: Record | None = None
        self._clock = time.monotonic()
        self._earlier = (folder.previous.wall_time or 0.0) if folder.previous is not None else 0.0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The first record: what is run, with which versions, on what."""
        assert self.folder.path is not None
        leftover = self.folder.path / EVALUATIONS
        if trainer.is_global_zero and leftover.exists():  # of weights that are trained anew now
            shutil.rmtree(leftover)
        task: Any = pl_module
        previous = self.folder.previous
        self.record = Record(
            task=type(pl_module).__name__,
            data=type(trainer.datamodule).__name__,  # type: ignore[attr-defined]
            backbone=task.settings.name,
            schedule=schedule_name(pl_module),
            seed=self.seed,
            parameters=sum(p.numel() for p in task.backbone.parameters()),
            started=previous.started if previous is not None else _now(),
            # A run that was stopped after its last epoch trains no more: what it had then stays.
            metrics=previous.metrics if previous is not None else {},
            progress=previous.progress if previous is not None else self._progress(trainer),
            throughput=previous.throughput if previous is not None else None,
            git_revision=_git_revision(),
            notes=self.folder.notes,
            versions={"python": platform.python_version(), **{name: version(name) for name in _VERSIONS}},
            hardware=_hardware(trainer),
        )
        self._save(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Metrics and progress of the epoch."""
        self._write(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The run failed, or was stopped by a signal."""
        interrupted = isinstance(exception, KeyboardInterrupt | SystemExit)
        reason = " ".join(str(exception).split()) or type(exception).__name__
        self._write(
            trainer, status="interrupted" if interrupted else "failed", error=None if interrupted else reason[:500]
        )

    def trained(self, trainer: pl.Trainer, test_metrics: dict[str, float], checkpoint: str | None) -> None:
        """Training is done, and its test: with a checkpoint, a later start has only evaluations to do."""
        assert self.record is not None
        self.record = replace(self.record, metrics={**self.record.metrics, **test_metrics}, checkpoint=checkpoint)
        self._write(trainer)

    def resume(self, trainer: pl.Trainer) -> None:
        """Another start of a run that was trained before: ``fit`` is not called."""
        assert self.folder.previous is not None
        self.record = replace(self.folder.previous, error=None, finished=None)
        self._write(trainer, status="running")

    def evaluated(self, trainer: pl.Trainer, name: str, section: dict[str, Any]) -> None:
        """An evaluation is done, or has failed; its metrics stand among the run's, where tables find them."""
        assert self.record is not None
        metrics = {**self.record.metrics, **section.get("metrics", {})}
        evaluations = {**self.record.evaluations, name: section}
        self.record = replace(self.record, metrics=metrics, evaluations=evaluations)
        self._write(trainer)

    def finish(self, trainer: pl.Trainer) -> None:
        """The run is done, its test and evaluations included."""
        self._write(trainer, status="finished", finished=_now())

    def _write(self, trainer: pl.Trainer, **changes: Any) -> None:
        if self.record is None:
            return
        metrics, progress = self.record.metrics, self.record.progress
        if trainer.state.fn == TrainerFn.FITTING:
            metrics = {**metrics, **{name: float(value) for name, value in trainer.callback_metrics.items()}}
            progress = self._progress(trainer)
        self.record = replace(
            self.record,
            metrics=metrics,
            progress=progress,
            throughput=self.throughput.samples_per_second or self.record.throughput,
            notes={**self.folder.notes, **self.damaged.notes},
            wall_time=self._earlier + time.monotonic() - self._clock,
            **changes,
        )
        self._save(trainer)

    def _save(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            assert self.folder.path is not None
            assert self.record is not None
            write_record(self.folder.path, self.record)

    @staticmethod
    def _progress(trainer: pl.Trainer) -> dict[str, int | None]:
        # Lightning takes no epochs for one.
        max_steps = trainer.estimated_stepping_batches if trainer.max_epochs != 0 else 0
        return {
            # Whole epochs, one that ends now among them.
            "epoch": trainer.fit_loop.epoch_progress.current.processed,  # type: ignore[attr-defined]
            "max_epochs": trainer.max_epochs,
            "step": trainer.global_step,
            "max_steps": int(max_steps) if math.isfinite(max_steps) else None,
        }


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _git_revision() -> str | None:
    """The revision of lapbench's checkout, with a mark if it has changes; None for an installed package."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _hardware(trainer: pl.Trainer) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if trainer.strategy.root_device.type == "cuda" else None
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "device": gpu or str(trainer.strategy.root_device),
        "world_size": trainer.world_size,
        "threads": torch.get_num_threads(),
        "precision": str(trainer.precision),
    }
