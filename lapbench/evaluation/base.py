"""What an evaluation is, and what it is given."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from lapbench.errors import UserError
from lapbench.evaluation.second_trainer import CHECKPOINT, second_trainer

# The run's own sections, folders and splits: metrics "val/top1" are the task's.
_TAKEN = ("train", "val", "validate", "test", "predict")


@dataclass(frozen=True)
class FinishedTraining:
    """A run whose training and test are done, as an evaluation gets it.

    Attributes:
        task: The task with the weights of the declared checkpoint (averaged ones where there are), in evaluation mode
            on the run's device. Each evaluation gets it so, whatever the one before has done to it.
        data: The run's data module.
        seed: The run's seed; python's, numpy's and torch's generators are seeded with it.
        folder: RUN/evaluations/NAME, for the evaluation's own files; there already.
        outer: The run's trainer. It says where we are; fit and test with ``trainer()`` instead.
    """

    task: pl.LightningModule
    data: pl.LightningDataModule
    seed: int
    folder: Path
    outer: pl.Trainer

    def trainer(self, max_epochs: int = 1) -> pl.Trainer:
        """A trainer in the run's processes, process group and device, on ``SharedProcesses``.

        It logs nothing, skips validation while fitting (``validate`` and ``test`` work), shows its progress, and keeps
        its state at the end of each epoch in ``checkpoint``.
        """
        return second_trainer(self.outer, self.folder, max_epochs)

    @property
    def checkpoint(self) -> Path | None:
        """What an evaluation that was stopped goes on from; None at its first start."""
        file = self.folder / CHECKPOINT
        return file if file.is_file() else None


class Evaluation(pl.Callback, ABC):
    """Measures a trained model: named in ``trainer.callbacks``, called once after training, on every process.

    Args:
        name: Its section in ``record.evaluations``, its folder, and what its metrics begin with: "linear/top1".

    Raises:
        UserError: The name is no name, or one of the run's own.
    """

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_-]*", name) or name in _TAKEN:
            raise UserError(
                f"name of an evaluation: expected small letters, digits, - and _, and none of {', '.join(_TAKEN)}, "
                f"got {name!r}"
            )
        self.name = name

    @abstractmethod
    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        """Measures ``run``.

        An exception fails this evaluation only. It must go on from ``run.checkpoint`` or repeat itself exactly when
        it is started again.

        Returns:
            A section for the record, the same on all processes, that JSON can hold. ``"metrics"`` maps names that
            begin with ``name/`` to numbers; these stand among the run's metrics too, where tables find them.
        """
