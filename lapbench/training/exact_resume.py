"""What Lightning leaves out of a checkpoint and a run needs to go on as if it had never stopped."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torchmetrics import Metric

CHECKPOINT_KEY = "lapbench"


class ExactResume(pl.Callback):
    """Completes every checkpoint that is written while training, and what a run takes from one.

    - Metrics: the sums that an epoch has gathered so far, of every process.
    - Logged values: those of an ending epoch, which loggers get only after its checkpoint is written.
    - Validation: one that a checkpoint was written in starts again, as its sums so far were over other batches.
    """

    def __init__(self) -> None:
        self._logs: dict[str, float] = {}
        self._step: int | None = None

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Adds them; called on every process."""
        if trainer.state.fn != TrainerFn.FITTING:
            return
        fit_loop = trainer.fit_loop
        epoch: Any = fit_loop.epoch_progress.current
        ending = epoch.processed == epoch.ready and epoch.completed < epoch.ready
        logs: dict[str, float] = {}
        if ending:
            connector: Any = trainer._logger_connector
            logs = {name: float(value) for name, value in connector.metrics["log"].items()}
            logs["epoch"] = trainer.current_epoch
        checkpoint[CHECKPOINT_KEY] = {
            # An ending epoch's sums are done with; Lightning resets them after its checkpoint is written.
            "metrics": _gathered({} if ending else _metric_states(pl_module), trainer.world_size),
            "logs": logs,
            "step": fit_loop.epoch_loop._batches_that_stepped - 1,
            # What its counters mean, for a run that goes on under another layout.
            "batches_per_epoch": trainer.num_training_batches,
            "accumulation": trainer.accumulate_grad_batches,
        }
        if trainer.validating:
            _restart_validation(checkpoint["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"])

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes them over for training."""
        if trainer.state.fn != TrainerFn.FITTING or CHECKPOINT_KEY not in checkpoint:
            return
        kept = checkpoint[CHECKPOINT_KEY]
        self._logs, self._step = kept["logs"], kept["step"]
        if len(kept["metrics"]) == trainer.world_size:
            _set_metric_states(pl_module, kept["metrics"][trainer.global_rank])

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs what the run that wrote the checkpoint may not have come to log."""
        if self._logs:
            for logger in trainer.loggers:
                logger.log_metrics(self._logs, step=self._step)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Counts the first batch of a validation that starts again once, not twice."""
        total: Any = trainer.fit_loop.epoch_loop.val_loop.batch_progress.total
        total.ready = total.started = total.completed


def _metric_states(module: pl.LightningModule) -> dict[str, dict[str, Any]]:
    """The states of the metrics that were updated since their last reset, by name, on the CPU."""
    return {
        name: {
            "count": metric.update_count,
            "state": {key: _moved(value, torch.device("cpu")) for key, value in metric.metric_state.items()},
        }
        for name, metric in module.named_modules()
        if isinstance(metric, Metric) and metric.update_count > 0
    }


def _set_metric_states(module: pl.LightningModule, states: dict[str, dict[str, Any]]) -> None:
    for name, kept in states.items():
        metric: Any = module.get_submodule(name)
        metric._update_count = kept["count"]
        metric._computed = None
        for key, value in kept["state"].items():
            setattr(metric, key, _moved(value, metric.device))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.detach().to(device, copy=True)


def _gathered(mine: Any, world_size: int) -> list[Any]:
    """``mine`` of every process, in order of their ranks."""
    if world_size == 1:
        return [mine]
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, mine)
    return everyone


def _restart_validation(progress: dict[str, Any]) -> None:
    """Make the counters those of a validation that was interrupted in its first batch: Lightning starts it again."""
    before = progress["total"]["completed"] - progress["current"]["completed"]
    for counter, done in ((progress["total"], before), (progress["current"], 0)):
        counter |= {"ready": done + 1, "started": done + 1, "processed": done, "completed": done}
    progress["is_last_batch"] = False
