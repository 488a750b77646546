"""`lapbench fit` against a bare PyTorch loop on the same model and batches."""

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.timing import Result

ARGUMENTS = [
    "--config=supervised/digits",
    "--trainer.max_epochs=1",
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
    """Training samples/s of one epoch of `lapbench fit`, logging and record keeping included."""
    from lapbench.training.parser import CLI
    from lapbench.training.throughput import Throughput

    cli = CLI("fit", [*ARGUMENTS, f"--run.dir={folder / 'run'}", f"--data.data_dir={folder.parent / 'digits'}"])
    cli.trainer.fit(cli.model, cli.datamodule)
    rate = next(c for c in cli.trainer.callbacks if isinstance(c, Throughput)).samples_per_second
    assert rate is not None
    return rate


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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model.train()
    samples, start = 0, time.perf_counter()
    for images, labels in data.train_dataloader():
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        samples += len(images)
    return samples / (time.perf_counter() - start)


def results() -> Iterator[Result]:
    """Median of paired rates."""
    rounds = 7
    with tempfile.TemporaryDirectory() as root:
        ratios = []
        for i in range(rounds + 1):
            folder = Path(root) / str(i)
            folder.mkdir()
            pair = [fit_rate, bare_rate] if i % 2 else [bare_rate, fit_rate]
            rates = {measure.__name__: measure(folder) for measure in pair}
            if i:  # the first one warms up
                ratios.append(rates["fit_rate"] / rates["bare_rate"])
    yield Result("fit / bare loop, samples/s", statistics.median(ratios), 0.95, False, f"{rounds} pairs, ViT d 192 x 6")
