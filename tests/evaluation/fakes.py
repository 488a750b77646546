"""Evaluations for tests, by the class path ``fakes.NAME``: this folder is put on the path where they are needed."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lapbench.evaluation import Evaluation, FinishedTraining


class Draws(Evaluation):
    """Measures what it is given: the weights' sum, and one number drawn; then spoils the weights for the next one."""

    def __init__(self, name: str = "draws") -> None:
        super().__init__(name)

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        total = sum(float(p.detach().double().sum()) for p in run.task.parameters())
        metrics = {"weights": total, "drawn": float(torch.rand(())), "training": float(run.task.training)}
        run.task.train()
        for parameter in run.task.parameters():
            torch.nn.init.zeros_(parameter)
        return {"metrics": {f"{self.name}/{key}": value for key, value in metrics.items()}}


class Fails(Evaluation):
    """Fails on the process of that rank, or on all, as long as no file ``mended`` is in the run's folder."""

    def __init__(self, name: str = "fails", rank: int | None = None) -> None:
        super().__init__(name)
        self.rank = rank

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        if self.rank in (None, run.outer.global_rank) and not Path(run.folder, "../../mended").exists():
            raise RuntimeError("out of\nmemory")
        return {"metrics": {f"{self.name}/top1": 0.5}}


class Returns(Evaluation):
    """Returns what JSON cannot hold."""

    def __init__(self, name: str = "returns") -> None:
        super().__init__(name)

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        return {"metrics": {}, "tensor": torch.zeros(2)}


class Group(Evaluation):
    """Sums over the run's process group."""

    def __init__(self, name: str = "group") -> None:
        super().__init__(name)

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        value = torch.tensor([1.0 + run.outer.global_rank])
        dist.all_reduce(value)
        return {"metrics": {f"{self.name}/sum": float(value)}}
