"""One of two processes that train the tiny decoder together; the first writes weights and metrics to a file."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

spec = spec_from_file_location("tests_of_the_task", Path(__file__).with_name("test_language_modeling.py"))
assert spec is not None
assert spec.loader is not None
tests: Any = module_from_spec(spec)
spec.loader.exec_module(tests)


class Halves(tests.Windows):  # type: ignore[misc]
    """Each process takes one window of each batch of two."""

    batch_size, eval_batch_size = 1, 1

    def train_dataloader(self) -> Any:
        return self.half(TensorDataset(self.inputs[:-5], self.targets[:-5]))

    def val_dataloader(self) -> Any:
        # Six windows for two processes: the last is the first one's alone, the other's has nothing to predict.
        inputs, targets = self.inputs[-5:], self.targets[-5:]
        inputs, targets = torch.cat((inputs, inputs[:1])), torch.cat((targets, torch.full_like(targets[:1], -100)))
        return self.half(TensorDataset(inputs, targets))

    def half(self, data: TensorDataset) -> Any:
        return DataLoader(data, self.batch_size, sampler=DistributedSampler(data, shuffle=False))


def run(file: str) -> None:
    torch.set_num_threads(1)
    data, steps, model = Halves(8), tests.Steps(), tests.task()
    settings = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    trainer = tests.trainer(
        max_epochs=1, accumulate_grad_batches=4, callbacks=[steps], limit_val_batches=1.0, **settings
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        weights = {name: p.detach() for name, p in model.backbone.named_parameters()}
        validated = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
        torch.save({"weights": weights, "logged": steps.logged, "validated": validated}, file)


if __name__ == "__main__":
    run(sys.argv[1])
