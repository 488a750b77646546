"""`lapbench fit` against a bare PyTorch loop on the same model and batches."""

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tests.benchmarks.timing import Result

BATCHES = 24
ARGUMENTS = [
    "--config=supervised/digits",
    "--trainer.max_epochs=1",
    f"--trainer.limit_train_batches={BATCHES}",
    "--trainer.log_every_n_steps=10",
    "--trainer.enable_model_summary=false",
    "--trainer.gradient_clip_val=null",
    "--model.backbone.img_size=32",
    "--model.backbone.patch_size=4",
    "--model.backbone.options={embed_dim: 192, depth: 6, num_heads: 3}",
    "--model.lr_schedule.warmup_epochs=0",
    "--data.image_size=32",
]


def fit_rate(folder: Path) -> float:
    """Training samples/s of `lapbench fit`, logging and record keeping included."""
    import lightning.pytorch as pl

    from lapbench.training.parser import CLI

    ends: list[float] = []

    class Clock(pl.Callback):
        def on_train_batch_end(self, *arguments: object) -> None:
            ends.append(time.perf_counter())

    cli = CLI("fit", [*ARGUMENTS, f"--run.dir={folder / 'run'}", f"--data.data_dir={folder.parent / 'digits'}"])
    cli.trainer.callbacks.append(Clock())
    cli.trainer.fit(cli.model, cli.datamodule)
    return rate(ends, cli.datamodule.batch_size)


def bare_rate(folder: Path) -> float:
    """The same with a plain loop."""
    import torch
    from torch.nn import functional as F

    from lapbench.training.parser import CLI

    cli = CLI("fit", [*ARGUMENTS, f"--run.dir={folder / 'bare'}", f"--data.data_dir={folder.parent / 'digits'}"])
    model, data = cli.model.backbone, cli.datamodule
    data.prepare_data()
    data.trainer = None
    data.setup("fit")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model.train()
    ends = []
    for images, labels in islice(data.train_dataloader(), BATCHES):
        loss = F.cross_entropy(model(data.normalize(images)), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.perf_counter())
    return rate(ends, data.batch_size)


def rate(ends: list[float], batch_size: int) -> float:
    """Samples/s from the end of the first step, which starts everything up, to that of the last."""
    return (len(ends) - 1) * batch_size / (ends[-1] - ends[0])


def results() -> Iterator[Result]:
    """Median of paired rates."""
    rounds = 5
    with tempfile.TemporaryDirectory() as root:
        ratios = []
        for i in range(rounds + 1):
            folder = Path(root) / str(i)
            folder.mkdir()
            pair = [fit_rate, bare_rate] if i % 2 else [bare_rate, fit_rate]
            with contextlib.redirect_stderr(io.StringIO()):  # fit's own progress
                rates = {measure.__name__: measure(folder) for measure in pair}
            if i:  # the first one warms up
                ratios.append(rates["fit_rate"] / rates["bare_rate"])
    yield Result("fit / bare loop, samples/s", statistics.median(ratios), 0.95, False, f"{rounds} pairs, ViT d 192 x 6")
