"""A pre-training that was interrupted within an epoch ends exactly as one that was not, teacher and centre included."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lapbench.backbones import build_backbone
from lapbench.results.record import read_record
from lapbench.tasks import DINO

# Everything that keeps a state of its own: BatchNorm, drop-path, a frozen layer, accumulation, all schedules.
CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 1, "accumulate_grad_batches": 2},
    "model": {
        "class_path": "lapbench.tasks.DINO",
        "init_args": {
            "backbone": {
                "name": "vit_tiny_patch16_224",
                "heads": 1,
                "img_size": 8,
                "patch_size": 4,
                "in_chans": 1,
                "drop_path": 0.2,
                "options": {"embed_dim": 16, "depth": 2, "num_heads": 2},
            },
            "head": {"out_dim": 32, "hidden_dim": 16, "bottleneck_dim": 8, "batch_norm": True},
            "temperatures": {"teacher_start": 0.02, "warmup_epochs": 1},
            "optimizer": {"lr": 1e-3, "weight_decay": 0.04},
            "lr_schedule": {"warmup_epochs": 0.5},
        },
    },
    "data": {
        "class_path": "lapbench.datamodules.Digits",
        "init_args": {
            "batch_size": 32,
            "multicrop": {"local_crops": 2, "local_size": 4, "interpolation": "bilinear", "blur_prob": [0.0, 0.0, 0.0]},
        },
    },
    "run": {"test": "none"},
}


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(
    few_digits: Path,
    tmp_path: Path,
    lapbench: Callable[..., Any],
    scalars: Callable[[Path], dict[str, dict[int, float]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    CONFIG["data"]["init_args"]["data_dir"] = str(few_digits)
    file = tmp_path / "dino.yaml"
    file.write_text(yaml.safe_dump(CONFIG))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert lapbench("fit", "--config", file, "--run.dir", whole).status == 0

    original = DINO.training_step

    def stopped(self: DINO, batch: Any, batch_idx: int) -> Any:
        # Five batches are three steps: in the middle of the second epoch.
        if self.trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(DINO, "training_step", stopped)
        assert lapbench("fit", "--config", file, "--run.dir", broken).status == 75
    assert read_record(broken).progress == {"epoch": 1, "max_epochs": 2, "step": 4, "max_steps": 6}
    assert lapbench("fit", "--config", file, "--run.dir", broken).status == 0

    states = [torch.load(run / "checkpoints/last.ckpt", weights_only=True) for run in (whole, broken)]
    one, other = (state["state_dict"] for state in states)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {"loss.center", "teacher.backbone.cls_token", "teacher.head.last_layer.direction"} <= one.keys()
    moments = [list(state["optimizer_states"][0]["state"].values()) for state in states]
    assert all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in zip(*moments, strict=True))
    logs = [scalars(run / "tensorboard") for run in (whole, broken)]
    for log in logs:
        log.pop("train/samples_per_second")
    assert logs[0] == logs[1]
    assert {f"train/{name}" for name in ("loss", "loss_epoch", "lr", "grad_norm", "weight_decay", "ema")} <= set(
        logs[0]
    )

    # What is loaded as weights is the teacher.
    built = build_backbone(
        **{**CONFIG["model"]["init_args"]["backbone"], "dynamic_img_size": True, "num_classes": 0},
        weights=str(broken / "checkpoints/last.ckpt"),
    )
    for name, weights in built.state_dict().items():
        assert torch.equal(weights, one[f"teacher.backbone.{name}"])
