"""Random access: how soon a run goes on in the middle of a million samples, and whether workers' memory stays flat."""

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.benchmarks.timing import Result

MILLION, BATCH, SIDE = 1_000_000, 256, 32
SAMPLES, SHARDS, EPOCHS, WORKERS = 8192, 8, 5, 2


def write_data(folder: Path, samples: int, shards: int, split: str, repeated: int = 1) -> None:
    """Shards of random images; with ``repeated`` each image stands in the index as that many samples."""
    import numpy as np

    from lapbench.datamodules.convert.formats import encode_png
    from lapbench.datamodules.convert.writer import ShardWriter
    from lapbench.datamodules.manifest import Manifest, Shard
    from lapbench.datamodules.offsets import save_indexed

    generator = np.random.default_rng(0)
    written, rows = [], b""
    for number in range(shards):
        with ShardWriter(folder / f"{number:06d}.tar") as writer:
            for i in range(samples // shards):
                writer.add(f"{i:09d}", "png", encode_png(generator.integers(0, 256, (SIDE, SIDE, 3), np.uint8)), i % 2)
            shard = writer.finish()
        written.append(Shard(shard.file, shard.samples * repeated, shard.bytes, shard.sha256))
        rows += bytes(writer.rows) * repeated
    save_indexed(folder, Manifest("bench", ("a", "b"), {split: tuple(written)}), {split: rows})


def data_module(folder: Path) -> Any:
    """Light work, so that it is the reading that counts."""
    from lapbench.datamodules import ImageShards, TrainTransform

    class Data(ImageShards):
        num_classes = 2

    transform = TrainTransform(crop="src", padding=4)
    return Data(str(folder), batch_size=BATCH, num_workers=WORKERS, image_size=SIDE, train_transform=transform)


def resume_seconds(folder: Path) -> float:
    """From the data module's construction to the first batch in the middle of the second epoch."""
    done = MILLION // BATCH * 3 // 2
    progress = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(processed=done)))
    trainer = SimpleNamespace(limit_train_batches=1.0, fit_loop=SimpleNamespace(epoch_loop=progress))

    times = []
    for _ in range(5):
        gc.collect()
        start = time.perf_counter()
        data = data_module(folder)
        data.trainer = trainer
        data.setup("fit")
        batches = iter(data.train_dataloader())
        next(batches)
        times.append(time.perf_counter() - start)
        del batches  # stops the workers, which takes as long again
    return statistics.median(times)


def memory_growth(folder: Path) -> float:
    """Memory of the workers after the last epoch over that after the first; a page's share goes to each that has it."""
    data = data_module(folder)
    data.setup("fit")
    loader = data.train_dataloader()
    sizes = []
    for _ in range(EPOCHS):
        for _ in loader:
            pass
        sizes.append(sum(proportional_kilobytes(worker.pid) for worker in loader._iterator._workers))
    return sizes[-1] / sizes[0]


def proportional_kilobytes(process: int) -> int:
    """Linux's count of a process's memory, pages shared by n processes being worth 1/n."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def results() -> Iterator[Result]:
    """Seconds, and a ratio."""
    import lapbench.datamodules.images  # noqa: F401  not the imports, but what comes after them, is to be measured

    with tempfile.TemporaryDirectory() as root:
        write_data(Path(root), 1000, 1, "train", MILLION // 1000)
        value = resume_seconds(Path(root))
    detail = f"median of 5, batch {BATCH}, {WORKERS} workers"
    yield Result("going on in the middle of 1,000,000 samples, seconds", value, 1.0, True, detail)
    with tempfile.TemporaryDirectory() as root:
        write_data(Path(root), SAMPLES, SHARDS, "train")
        value = memory_growth(Path(root))
    detail = f"{WORKERS} persistent workers, {SAMPLES:,} images an epoch"
    yield Result(f"workers' memory after epoch {EPOCHS} / after epoch 1", value, 1.05, True, detail)
