"""DINO pre-training, then evaluations of its teacher, by one ``lapbench fit``."""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lapbench.datamodules as datamodules
from lapbench.results.record import read_record
from lapbench.tasks import DINO

sys.path.insert(0, str(Path(__file__).parents[1] / "tasks"))
from rectangles import Rectangles, make

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*:FutureWarning",  # Lightning's own use of torch
    "ignore:.*in eval mode at the start of training",  # a frozen backbone's
)
MODEL = {
    "class_path": "lapbench.tasks.DINO",
    "init_args": {
        "backbone": {
            "name": "vit_tiny_patch16_224",
            "heads": 1,
            "img_size": 8,
            "patch_size": 4,
            "in_chans": 1,
            "options": {"embed_dim": 16, "depth": 2, "num_heads": 2},
        },
        "head": {"out_dim": 32, "hidden_dim": 16, "bottleneck_dim": 8, "freeze_epochs": 0},
        "optimizer": {"lr": 0.01, "lr_batch_size": None},
        "lr_schedule": {"warmup_epochs": 0},
    },
}
# Class tokens of different images are still much alike: it takes a probe some steps to tell them apart.
PROBE = {
    "epochs": 20,
    "batch_size": 12,
    "lrs": [0.2, 0.5],
    "lr_batch_size": None,
    "blocks": [1],
    "cache_features": True,
}
NEIGHBORS = {"k": [1, 20]}
PIXELS = {"epochs": 2, "warmup_epochs": 0.5, "batch_size": 4, "crop_size": 32}
EVALUATIONS = [
    {"class_path": "lapbench.evaluation.LinearProbe", "init_args": PROBE},
    {"class_path": "lapbench.evaluation.NearestNeighbors", "init_args": NEIGHBORS},
    {"class_path": "lapbench.evaluation.Segmentation", "init_args": PIXELS},
]
NAMES = ["linear", "knn", "segmentation"]


@pytest.fixture
def pretrain(
    few_digits: Path, tmp_path: Path, lapbench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Pre-trains and evaluates: ``pretrain(folder, max_epochs=0)``. Rectangles stand in for the shapes."""
    folder = make(tmp_path / "rectangles")
    monkeypatch.setattr(datamodules, "ShapesSegmentation", lambda **given: Rectangles(**given | {"data_dir": folder}))
    crops = {"local_crops": 2, "local_size": 4, "jitter_prob": 0.0, "blur_prob": [0.0, 0.0, 0.0], "grey_prob": 0.0}
    data = {"data_dir": str(few_digits), "val_fraction": 0.25, "batch_size": 40, "multicrop": crops}
    config = {
        "seed_everything": 0,
        "run": {"test": "none"},
        "model": MODEL,
        "data": {"class_path": "lapbench.datamodules.Digits", "init_args": data},
    }
    trainer = {"accelerator": "cpu", "devices": 1}

    def run(folder: Path, evaluations: list[Any] = EVALUATIONS, max_epochs: int = 1) -> Any:
        file = tmp_path / "dino.yaml"
        file.write_text(yaml.safe_dump(config | {"trainer": {**trainer, "callbacks": evaluations}}))
        return lapbench("fit", "--config", file, "--run.dir", folder, "--trainer.max_epochs", max_epochs)

    return run


def digest(run: Path) -> str:
    state = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    return hashlib.sha256(b"".join(v.numpy().tobytes() for v in state.values())).hexdigest()


def test_pretraining_ends_with_its_evaluations(
    pretrain: Callable[..., Any], tmp_path: Path, lapbench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    outcome = pretrain(run)
    assert outcome.status == 0, outcome.err
    record = read_record(run)
    assert (record.status, record.task, record.schedule, record.checkpoint) == ("finished", "DINO", "1L", "last")
    assert record.progress["step"] == 3
    assert list(record.evaluations) == NAMES
    assert record.evaluations["knn"]["samples"] == {"database": 120, "test": 37}
    assert record.metrics["linear/top1"] > 0.3
    assert record.metrics["knn/top1"] == record.metrics["knn/top1_k20"] > 0.3
    assert record.metrics["segmentation/aacc"] > 0.2  # four classes
    assert record.evaluations["segmentation"]["data"] == "shapes (synthetic)"
    table = lapbench("table", run, "--metric", "knn/top1")
    assert f"{100 * record.metrics['knn/top1']:.2f}" in table.out

    # The evaluations have read the teacher, of which they have changed nothing: done again they find the same.
    before = digest(run)
    original = DINO.load_state_dict

    def spoiled(self: DINO, state: dict[str, Any], *arguments: Any, **settings: Any) -> Any:
        state = {k: torch.zeros_like(v) if k.startswith("student.") else v for k, v in state.items()}
        return original(self, state, *arguments, **settings)

    monkeypatch.setattr(DINO, "load_state_dict", spoiled)
    settings = {f"--linear.{k}": v for k, v in PROBE.items()} | {f"--knn.{k}": v for k, v in NEIGHBORS.items()}
    settings |= {f"--segmentation.{k}": v for k, v in PIXELS.items()}
    flags = [f"{flag}={json.dumps(value)}" for flag, value in settings.items()]
    again = lapbench("evaluate", run, "--suite", ",".join(NAMES), *flags)
    assert again.status == 0, again.err
    assert digest(run) == before
    after = read_record(run)
    assert after.metrics == record.metrics


def test_its_untrained_backbone_is_evaluated_in_the_same_way(pretrain: Callable[..., Any], tmp_path: Path) -> None:
    outcome = pretrain(tmp_path / "run", EVALUATIONS[1:2], max_epochs=0)
    assert outcome.status == 0, outcome.err
    record = read_record(tmp_path / "run")
    assert (record.status, record.progress["step"], list(record.evaluations)) == ("finished", 0, NAMES[1:2])
