"""A second trainer in the processes of a run: same ranks, same process group, same device, nothing else shared."""

import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import DDPStrategy

CHECKPOINT = "last.ckpt"


def second_trainer(outer: pl.Trainer, folder: Path, max_epochs: int) -> pl.Trainer:
    """A trainer for work after training.

    It has a strategy of its own, and as many devices as the outer one: with the outer one's strategy object, or with
    one device on each process, metrics of different processes would be mixed in silence.

    Args:
        outer: The run's trainer, whose processes are there and, if several, connected.
        folder: Keeps its checkpoint.
        max_epochs: Epochs that ``fit`` trains.
    """
    environment = SharedProcesses(outer)
    device = outer.strategy.root_device.type
    progress_bar = outer.progress_bar_callback is not None
    callbacks: list[pl.Callback] = [KeepLast(folder / CHECKPOINT)]
    if not progress_bar:
        callbacks.append(ProgressLines(folder.name))
    parallel: dict[str, Any] = {}
    if outer.world_size > 1:
        parallel = {
            "strategy": DDPStrategy(cluster_environment=environment, process_group_backend=dist.get_backend()),
            "num_nodes": outer.num_nodes,
        }
    return pl.Trainer(
        accelerator=device,
        devices=outer.num_devices if device == "cpu" else outer.device_ids,
        plugins=[outer.strategy.checkpoint_io, *([] if parallel else [environment])],
        callbacks=callbacks,
        max_epochs=max_epochs,
        check_val_every_n_epoch=max_epochs + 1,  # not while fitting, yet `validate` works
        logger=False,
        enable_progress_bar=progress_bar,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=folder,
        **parallel,
    )


class SharedProcesses(ClusterEnvironment):
    """The processes that a trainer runs in, for a second one: all answers are the first one's.

    Args:
        outer: The first trainer.
    """

    def __init__(self, outer: pl.Trainer) -> None:
        super().__init__()
        self._outer = outer

    @property
    def creates_processes_externally(self) -> bool:
        """They are there already."""
        return True

    @property
    def main_address(self) -> str:
        """Where the process group was made."""
        return self._environment.main_address

    @property
    def main_port(self) -> int:
        """Where the process group was made."""
        return self._environment.main_port

    @staticmethod
    def detect() -> bool:
        """Never chosen by itself."""
        return False

    def world_size(self) -> int:
        """Number of processes."""
        return self._outer.world_size

    def set_world_size(self, size: int) -> None:
        """Nothing to set."""

    def global_rank(self) -> int:
        """Number of this process."""
        return self._outer.global_rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing to set."""

    def local_rank(self) -> int:
        """Number of this process on its node."""
        return self._outer.local_rank

    def node_rank(self) -> int:
        """Number of this process's node."""
        return self._outer.node_rank

    @property
    def _environment(self) -> ClusterEnvironment:
        environment: ClusterEnvironment = self._outer.strategy.cluster_environment  # type: ignore[attr-defined]
        return environment


class KeepLast(Checkpoint):
    """Saves at the end of each epoch, over the one before."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Saves."""
        trainer.save_checkpoint(self.file)


class ProgressLines(pl.Callback):
    """A line on stderr every ten seconds of training or prediction: progress for log files."""

    def __init__(self, name: str, every_seconds: float = 10.0) -> None:
        self.name = name
        self.every_seconds = every_seconds
        self._next = time.monotonic() + every_seconds

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Prints epoch, batch and loss."""
        if self._due(trainer):
            where = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
            where += f", batch {batch_idx + 1}/{trainer.num_training_batches}"
            print(f"{self.name}: {where}  loss {float(outputs['loss']):.4g}", file=sys.stderr, flush=True)

    def on_predict_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Prints what is predicted from, and the batch."""
        if self._due(trainer):
            what = type(pl_module).__name__.strip("_").lower()
            where = f"{what}, batch {batch_idx + 1}/{trainer.num_predict_batches[dataloader_idx]}"
            print(f"{self.name}: {where}", file=sys.stderr, flush=True)

    def _due(self, trainer: pl.Trainer) -> bool:
        if not trainer.is_global_zero or time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self.every_seconds
        return True
