"""One of two processes that train the tiny DINO together; the first writes what came of it to a file."""

import sys
from typing import Any

import torch
from dino_runs import Crops, task, trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler


class Halves(Crops):
    """Each process takes every second image of each batch of four."""

    def __init__(self) -> None:
        super().__init__(count=4, batch_size=4)
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(self.views, self.batch_size, sampler=DistributedSampler(self.views, shuffle=False))


class Losses(Callback):
    """The mean loss of each epoch."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.means.append(float(pl_module.train_loss.compute()))


def run(file: str) -> None:
    torch.set_num_threads(1)
    model, losses = task(), Losses()
    two = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    run = trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[losses], **two)
    run.fit(model, Halves())
    if run.is_global_zero:
        teacher, student = (list(m.parameters()) for m in (model.teacher, model.student))
        out = {"teacher": teacher, "student": student, "center": model.loss.center, "loss_epoch": losses.means}
        torch.save(out, file)


if __name__ == "__main__":
    run(sys.argv[1])
