"""The count of damaged images: told once, exact after a resume, and the same on all ranks."""

import io
import json
import tarfile
from contextlib import nullcontext

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from PIL import Image

from lapbench.datamodules import ImageShards, TrainTransform
from lapbench.datamodules.convert.index import index
from lapbench.training.damaged import LISTED, DamagedImages

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own use of torch
COUNT = 60


class Grey(ImageShards):
    num_classes = 2
    channels = 1
    mean = (0.5,)
    std = (0.5,)


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 2)

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])

    def validation_step(self, batch):
        raise AssertionError("there is nothing to validate on")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Killed(Exception):
    pass


class KilledAfter(pl.Callback):
    """Saves a checkpoint after a step and ends the run as a signal would."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps:
            trainer.save_checkpoint(f"{trainer.default_root_dir}/last.ckpt")
            raise Killed


def make_data(folder, damaged):
    """60 samples, of which the given ones are damaged."""
    stream = io.BytesIO()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save(stream, "PNG")
    with tarfile.open(folder / "a.tar", "w") as tar:
        for i in range(COUNT):
            image = stream.getvalue()[: 40 if i in damaged else None]
            for name, data in ((f"{i:02d}.png", image), (f"{i:02d}.cls", b"%d" % (i % 2))):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    index(folder, "grey", {"train": "*.tar"}, ("0", "1"))


def fit(folder, killed=0, resume=False):
    """Three epochs of 5 batches; the callback afterwards, and the logged values."""
    transform = TrainTransform(crop="none", hflip=0)
    data = Grey(str(folder), batch_size=12, num_workers=0, image_size=8, train_transform=transform)
    callback = DamagedImages()
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=[callback, *([KilledAfter(killed)] if killed else [])],
    )
    with pytest.raises(Killed) if killed else nullcontext():
        trainer.fit(
            Model(),
            datamodule=data,
            ckpt_path=folder / "last.ckpt" if resume else None,
            weights_only=True if resume else None,
        )
    return callback, trainer


def name_of(folder, number):
    return f"shard {folder}/a.tar, sample {number:02d}"


def told(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if "damaged" in line]


def test_no_damage_no_word(tmp_path, capsys):
    make_data(tmp_path, ())
    callback, trainer = fit(tmp_path)
    assert callback.notes == {}
    assert callback.state_dict() == {"count": 0, "samples": []}
    assert "train/damaged" not in trainer.callback_metrics
    assert told(capsys) == []


def test_counted_over_epochs_and_told_once(tmp_path, capsys):
    make_data(tmp_path, {3, 17, 40})
    callback, trainer = fit(tmp_path)
    (noted,) = callback.notes.values()
    assert noted["count"] == 9
    assert sorted(noted["samples"]) == [name_of(tmp_path, number) for number in (3, 17, 40)]
    assert trainer.progress_bar_metrics["train/damaged"] == 9
    (line,) = told(capsys)
    assert line == f"damaged image: {noted['samples'][0]} cannot be decoded; another of its batch takes its place"


def test_on_the_bar_only_once_there_is_one(tmp_path):
    make_data(tmp_path, {3})
    seen = []

    class Bar(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            seen.append(trainer.progress_bar_metrics.get("train/damaged"))

    callback = DamagedImages()
    data = Grey(str(tmp_path), batch_size=4, num_workers=0, image_size=8, train_transform=TrainTransform(crop="none"))
    pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=[callback, Bar()],
    ).fit(Model(), datamodule=data)
    where = [draw.sample.number for batch in data.train_dataloader().stream.order.batches(0, 0, 0, 1) for draw in batch]
    first = where.index(3) // 4
    assert 0 < first < 14
    assert seen == [None] * first + [1.0] * (15 - first)


@pytest.mark.parametrize("killed", [1, 3, 5, 7, 10, 14])
def test_a_resumed_count_is_that_of_the_uninterrupted_run(tmp_path, killed, capsys):
    make_data(tmp_path, range(0, COUNT, 2))
    whole, _ = fit(tmp_path)
    assert whole.notes["damaged_images"]["count"] == 3 * COUNT / 2
    assert len(whole.notes["damaged_images"]["samples"]) == LISTED == 20
    before, _ = fit(tmp_path, killed=killed)
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["DamagedImages"]
    assert {"damaged_images": state} == before.notes
    resumed, _ = fit(tmp_path, resume=True)
    assert resumed.notes == whole.notes
    assert len(told(capsys)) == 2  # the whole run's, and one of the two others'


TWO_RANKS = """
import json, os, sys
from types import SimpleNamespace
import torch.distributed as dist
from lapbench.datamodules.loader import ResumableLoader
from lapbench.training.damaged import DamagedImages

def met(callback, batch, *names):
    loader.damaged = list(names)
    trainer.fit_loop.epoch_loop.batch_progress.total.ready = batch
    callback.on_train_batch_end(trainer, SimpleNamespace(log=lambda *a, **k: None), None, None, 0)

def run(rank, agreements):
    callback = DamagedImages()
    for batch in range(1, 7):
        if rank == 0 and batch in (2, 5):
            met(callback, batch, f"a{batch}")
        if rank == 1 and batch in (1, 2, 3):
            met(callback, batch, f"b{batch}", "both", *(f"b{batch}-{i}" for i in range(8)))
        if batch in agreements:
            state = callback.state_dict()
            callback = DamagedImages()
            callback.load_state_dict(state)
    callback.on_train_epoch_end(None, None)
    return callback.notes

loader = object.__new__(ResumableLoader)
total = SimpleNamespace(ready=0)
progress = SimpleNamespace(batch_progress=SimpleNamespace(total=total))
trainer = SimpleNamespace(train_dataloader=loader, fit_loop=SimpleNamespace(epoch_loop=progress))
child = os.fork()
rank = int(child == 0)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
results = [run(rank, agreements) for agreements in ((), (3,), (1, 2, 3, 4, 5, 6))]
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(results, file)
dist.barrier()
dist.destroy_process_group()
if child == 0:
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_two_ranks_know_the_same_whenever_they_agree(tmp_path, forked):
    done = forked("-c", TWO_RANKS, tmp_path)
    assert done.returncode == 0, done.stderr
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert zero == one
    expected = ["b1", "both", *(f"b1-{i}" for i in range(8)), "a2", "b2", *(f"b2-{i}" for i in range(8))]
    assert len(expected) == 20
    for result in zero:
        assert result == {"damaged_images": {"count": 32, "samples": expected}}
