"""Segmentation as an evaluation: of frozen backbones, on a small data set, through a stop in its middle."""

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

import lapbench.datamodules as datamodules
from lapbench.backbones import VisionSettings
from lapbench.datamodules import Digits
from lapbench.errors import UserError
from lapbench.evaluation import FinishedTraining, Segmentation
from lapbench.evaluation.second_trainer import KeepLast
from lapbench.evaluation.segmentation import load_backbone
from lapbench.tasks import DINO, FrozenBackbone, ImageClassification, SemanticSegmentation
from lapbench.tasks.dino_head import ProjectionHead
from lapbench.training.checkpoint_io import AtomicCheckpointIO

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from rectangles import Rectangles, make

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's own use of torch
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*in eval mode at the start of training"),  # a frozen backbone's
]
SETTINGS: dict[str, Any] = {"epochs": 3, "batch_size": 4, "crop_size": 32, "lr": 0.03}
OPTIONS = {"embed_dim": 16, "depth": 4, "num_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("rectangles") / "data")


@pytest.fixture
def evaluation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Segmentation]:
    """The rectangles stand in for the shapes."""
    monkeypatch.setattr(datamodules, "ShapesSegmentation", Rectangles, raising=False)
    return lambda **changes: Segmentation(data_dir=str(folder), **SETTINGS | changes)


@pytest.fixture
def run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., FinishedTraining]:
    caplog.set_level(logging.ERROR, "lightning.pytorch")

    def build(task: pl.LightningModule, name: str = "segmentation", seed: int = 0) -> FinishedTraining:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        outer = pl.Trainer(accelerator="cpu", devices=1, logger=False, barebones=True, plugins=[AtomicCheckpointIO()])
        torch.manual_seed(seed)
        return FinishedTraining(task.eval(), Digits(), seed, folder, outer)

    return build


def settings(**changes: Any) -> VisionSettings:
    small = {"heads": 1, "img_size": 16, "patch_size": 8, "in_chans": 1, "options": OPTIONS}
    return VisionSettings("vit_tiny_patch16_224", **small | changes)


def digest(module: nn.Module) -> str:
    tensors = (*module.named_parameters(), *module.named_buffers())
    content = (name.encode() + value.detach().numpy().tobytes() for name, value in tensors)
    return hashlib.sha256(b"".join(content)).hexdigest()


def test_a_supervised_backbone_is_read_and_left_as_it_is(
    evaluation: Callable[..., Segmentation], run: Callable[..., FinishedTraining]
) -> None:
    torch.manual_seed(1)
    task = ImageClassification(settings(global_pool="avg", drop_path=0.5), num_classes=10)
    before = digest(task)
    work = run(task)
    section = evaluation().evaluate(work)
    assert digest(task) == before
    assert all(parameter.requires_grad and parameter.grad is None for parameter in task.parameters())
    json.dumps(section)
    metrics = section["metrics"]
    assert list(metrics) == ["segmentation/miou", "segmentation/macc", "segmentation/aacc"]
    assert metrics["segmentation/aacc"] > 0.35  # grey rectangles of four classes
    assert section["data"] == "shapes (synthetic)"
    assert {name: section["settings"][name] for name in SETTINGS} == SETTINGS
    # The checkpoint holds what the head was trained on: the trained weights, whatever the copy began with.
    assert work.checkpoint is not None
    state = torch.load(work.checkpoint, weights_only=True)["state_dict"]
    for name, value in task.backbone.state_dict().items():
        if not name.startswith("head."):
            assert torch.equal(state[f"model.backbone.backbone.{name}"], value), name


def test_one_that_was_stopped_goes_on_to_the_same_scores(
    evaluation: Callable[..., Segmentation], run: Callable[..., FinishedTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    task = FrozenBackbone(settings(in_chans=3))
    settled = evaluation(dropout=0.3, head="linear4", name="seg")
    expected = settled.evaluate(run(task, "whole"))["metrics"]
    assert set(expected) == {"seg/miou", "seg/macc", "seg/aacc"}
    save, saved = KeepLast.on_train_epoch_end, []

    def stop(self: KeepLast, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        save(self, trainer, pl_module)
        saved.append(trainer.current_epoch)
        if len(saved) == 2:
            raise InterruptedError

    monkeypatch.setattr(KeepLast, "on_train_epoch_end", stop)
    with pytest.raises(InterruptedError):
        settled.evaluate(run(task, "stopped"))
    assert settled.evaluate(run(task, "stopped"))["metrics"] == expected
    assert saved == [0, 1, 2]


@pytest.mark.parametrize(
    "backbone",
    [
        VisionSettings("pixels", patch_size=8, img_size=16),
        settings(in_chans=3, options={**OPTIONS, "class_token": False}, global_pool="avg"),
    ],
    ids=["pixels", "no class token"],
)
def test_other_backbones(
    backbone: VisionSettings, evaluation: Callable[..., Segmentation], run: Callable[..., FinishedTraining]
) -> None:
    metrics = evaluation(mode="slide", stride=24).evaluate(run(FrozenBackbone(backbone)))["metrics"]
    assert metrics["segmentation/aacc"] > 0.6  # the classes are colours


def test_images_are_normalised_as_those_of_the_training(evaluation: Callable[..., Segmentation]) -> None:
    grey, color = FrozenBackbone(settings()), FrozenBackbone(settings(in_chans=3))
    found = [evaluation()._model(task, Digits(), Rectangles("")).hparams["mean"] for task in (grey, color)]
    assert found == [list(Digits.mean), None]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"epochs": 0}, "Segmentation.epochs: expected at least 1, got 0"),
        ({"warmup_epochs": 3.0}, r"Segmentation.warmup_epochs: expected 0 <= value < 3 \(epochs\), got 3.0"),
        ({"batch_size": 0}, "Segmentation.batch_size: expected at least 1, got 0"),
        ({"lr": 0.0}, "Segmentation.lr: expected at least 1e-6, got 0.0"),
        ({"weight_decay": -1.0}, "Segmentation.weight_decay: expected at least 0, got -1.0"),
        ({"crop_size": 0}, "Segmentation.crop_size: expected at least 1, got 0"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named(
    changes: dict[str, Any], reason: str, evaluation: Callable[..., Segmentation]
) -> None:
    with pytest.raises(UserError, match=reason):
        evaluation(**changes)


@pytest.mark.parametrize(
    ("changes", "processes", "reason"),
    [
        ({"crop_size": 36}, 1, "Segmentation.crop_size: expected a multiple of the patch size 8, got 36"),
        ({"mode": "slide", "stride": 40}, 1, "Segmentation.stride: expected 1..32, got 40"),
        ({}, 3, "Segmentation.batch_size: expected a multiple of the 3 processes, got 4"),
        ({"head": "upernet"}, 4, "Segmentation.batch_size: upernet normalises over at least 2 images on each process"),
        ({"data": "ade20k", "data_dir": "nowhere"}, 1, "no data folder nowhere: make it with `lapbench data ade20k"),
    ],
)
def test_what_does_not_fit_is_said_before_training(
    changes: dict[str, Any], processes: int, reason: str, evaluation: Callable[..., Segmentation]
) -> None:
    with pytest.raises(UserError, match=reason):
        Segmentation(**SETTINGS | {"data_dir": "x"} | changes).check(FrozenBackbone(settings()), Digits(), processes)


def test_a_check_draws_no_random_numbers_and_refuses_other_tasks(evaluation: Callable[..., Segmentation]) -> None:
    task = FrozenBackbone(settings())
    state = torch.get_rng_state()
    evaluation().check(task, Digits(), 2)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(UserError, match="Segmentation: expected a vision backbone, got a run of LightningModule"):
        evaluation().check(pl.LightningModule(), Digits(), 1)


def test_the_teacher_of_dino_and_fine_tuned_backbones_are_taken(evaluation: Callable[..., Segmentation]) -> None:
    evaluation().check(SemanticSegmentation(settings(in_chans=3), num_classes=4, frozen=False), Rectangles(""), 1)
    dino = DINO(settings(), head=ProjectionHead(out_dim=8, hidden_dim=8, bottleneck_dim=4))
    with torch.no_grad():
        for parameter in dino.teacher.parameters():
            parameter.add_(1.0)
    copied = evaluation()._model(dino, Digits(), Rectangles(""))
    load_backbone(copied, dino)
    assert torch.equal(copied.backbone.pos_embed, dino.teacher.backbone.pos_embed)  # type: ignore[arg-type, union-attr]
    assert not torch.equal(copied.backbone.pos_embed, dino.student.backbone.pos_embed)  # type: ignore[arg-type, union-attr]
