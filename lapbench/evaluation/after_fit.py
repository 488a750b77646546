"""The evaluations of a run: after training, one after the other, in the processes that trained it."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch.distributed.constants import default_pg_timeout

from lapbench.errors import UserError
from lapbench.evaluation.base import Evaluation, FinishedTraining
from lapbench.results.files import plain
from lapbench.results.record import Record

FOLDER = "evaluations"
Keep = Callable[[str, dict[str, Any]], None]


def evaluations_of(callbacks: Iterable[pl.Callback]) -> list[Evaluation]:
    """The evaluations among a trainer's callbacks, in order.

    Raises:
        UserError: Two of the same name.
    """
    found = [callback for callback in callbacks if isinstance(callback, Evaluation)]
    names = [evaluation.name for evaluation in found]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"trainer.callbacks: two evaluations are named {name!r}; give one of them another name")
    return found


def join_processes(trainer: pl.Trainer) -> None:
    """Starts the run's other processes and connects them as ``fit`` would, where there is nothing to fit any more."""
    launcher, setup = trainer.strategy.launcher, trainer.strategy.setup_environment
    if launcher is None:
        setup()
    else:
        launcher.launch(setup, trainer=trainer)


@dataclass(frozen=True)
class AfterFit:
    """Runs evaluations of a trained run.

    An evaluation that fails does not stop the others. Its exception on one process becomes known to the others when
    these are done or fail too. One that waits in a collective operation for the process that failed cannot be told: it
    waits until the process group's time is up (30 minutes; 10 under NCCL, which then ends the process: the record says
    "running", and the next start tries again).

    Args:
        trainer: The run's trainer, its processes connected.
        task: The run's task.
        data: The run's data module.
        seed: The run's seed.
        folder: The run's folder.
        checkpoint: The checkpoint that is evaluated.
        choice: What the record calls it: "last" or "best".
    """

    trainer: pl.Trainer
    task: pl.LightningModule
    data: pl.LightningDataModule
    seed: int
    folder: Path
    checkpoint: Path
    choice: str

    def run(self, evaluations: Sequence[Evaluation], keep: Keep) -> list[str]:
        """Runs ``evaluations``, in order.

        Args:
            evaluations: Those that are missing in the record, the same on all processes.
            keep: Gets the name and section of each as soon as it is there; that of a failed one is {"error": reason}.

        Returns:
            The names of those that failed.
        """
        weights = self.trainer.strategy.checkpoint_io.load_checkpoint(
            self.checkpoint, map_location="cpu", weights_only=True
        )["state_dict"]
        group = _control_group(self.trainer)
        failed = []
        for evaluation in evaluations:
            section, error = self._attempt(evaluation, weights)
            error = _agreed(error, group, self.trainer)
            if error is not None:
                failed.append(evaluation.name)
                section = {"error": error}
                self._say(f"evaluation {evaluation.name} failed: {error}")
            else:
                self._say(f"evaluation {evaluation.name}: {_show(section['metrics'])}")
            keep(evaluation.name, section)
        return failed

    def _attempt(self, evaluation: Evaluation, weights: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The section, or why there is none."""
        folder = self.folder / FOLDER / evaluation.name
        begin = time.monotonic()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.task.load_state_dict(weights)
            self.task.to(self.trainer.strategy.root_device).eval()
            seed_everything(self.seed, workers=True, verbose=False)
            found = evaluation.evaluate(FinishedTraining(self.task, self.data, self.seed, folder, self.trainer))
            section = {"checkpoint": self.choice, **found, "seconds": time.monotonic() - begin}
            _check(evaluation.name, section)
        except Exception as error:  # noqa: BLE001  whatever it is, training and the other evaluations stand
            _keep_traceback(folder, self.trainer.global_rank)
            return {}, _one_line(error)
        return section, None

    def _say(self, line: str) -> None:
        if self.trainer.is_global_zero:
            print(line, file=sys.stderr, flush=True)


def missing(evaluations: Sequence[Evaluation], previous: Record | None) -> list[Evaluation]:
    """Those that the record of an earlier start lacks, or says of that they failed."""
    if previous is None:
        return list(evaluations)
    return [e for e in evaluations if e.name not in previous.evaluations or e.name in previous.failed_evaluations]


def _check(name: str, section: dict[str, Any]) -> None:
    """Finds out what an evaluation returned wrongly while the fault can still be laid on it."""
    json.dumps(plain(section))
    for metric, value in section["metrics"].items():
        if not metric.startswith(f"{name}/") or not isinstance(value, int | float):
            raise ValueError(f"metrics: expected numbers named {name}/..., got {metric!r}: {value!r:.50}")


def _control_group(trainer: pl.Trainer) -> dist.ProcessGroup | None:
    """A process group in which processes say how an evaluation went.

    Not the run's own: there the message of a process that failed would be taken for the next operation that the others
    are waiting for. It waits longer, so that these run out of time first and come here too.
    """
    if trainer.world_size == 1:
        return None
    group = dist.new_group(backend="gloo", timeout=2 * default_pg_timeout)
    assert isinstance(group, dist.ProcessGroup)  # every process is a member
    return group


def _agreed(error: str | None, group: dist.ProcessGroup | None, trainer: pl.Trainer) -> str | None:
    """The first process's error, the same on all."""
    if group is None:
        return error
    errors: list[str | None] = [None] * trainer.world_size
    dist.all_gather_object(errors, error, group=group)
    failed = [(rank, text) for rank, text in enumerate(errors) if text is not None]
    if not failed:
        return None
    rank, text = failed[0]
    return text if len(failed) == trainer.world_size else f"process {rank} of {trainer.world_size}: {text}"


def _keep_traceback(folder: Path, rank: int) -> None:
    """Write where the exception came from beside the evaluation's files; the record has only its reason."""
    with suppress(OSError):  # a full disk may be what failed the evaluation
        (folder / f"error-{rank}.txt").write_text(traceback.format_exc(), encoding="utf-8")


def _one_line(error: Exception) -> str:
    reason = " ".join(str(error).split())[:500]
    return reason if isinstance(error, UserError) else f"{type(error).__name__}: {reason}"


def _show(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
