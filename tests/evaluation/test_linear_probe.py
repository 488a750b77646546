"""The linear probe against one written out by hand, and that it leaves the backbone alone."""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml

from lapbench.backbones import VisionSettings, build_backbone
from lapbench.datamodules import Digits
from lapbench.datamodules.plan import mixed
from lapbench.errors import UserError
from lapbench.evaluation import LinearProbe
from lapbench.evaluation.after_fit import AfterFit
from lapbench.evaluation.linear_probe import AT_ONCE, mean_patch_token
from lapbench.results.record import read_record
from lapbench.tasks import ImageClassification
from lapbench.training.checkpoint_io import AtomicCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own use of torch
SETTINGS = {"epochs": 3, "batch_size": 20, "lr": 0.5, "momentum": 0.8, "weight_decay": 0.01, "split": "val"}
TINY_OPTIONS = {"embed_dim": 16, "depth": 2, "num_heads": 2, "class_token": False}


def task_of(run: Path, **changes: Any) -> ImageClassification:
    """The task of a run's config, with weights of its own."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    return ImageClassification(VisionSettings(**config["model"]["init_args"]["backbone"] | changes), num_classes=10)


def digits_of(run: Path, **settings: Any) -> Digits:
    folder = yaml.safe_load((run / "config.yaml").read_text())["data"]["init_args"]["data_dir"]
    data = Digits(data_dir=folder, val_fraction=0.25, **settings)
    data.setup("fit")
    return data


def by_hand(run: Path) -> dict[str, float]:
    """Features through a hook, and SGD with momentum on a cosine, written out."""
    task = task_of(run)
    task.load_state_dict(torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"])
    backbone: Any = task.backbone.eval()
    taken: list[torch.Tensor] = []
    backbone.blocks[-1].register_forward_hook(lambda module, inputs, output: taken.append(output))

    def features(images: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            backbone(images)
            return backbone.norm(taken.pop()).mean(1).double()

    data = digits_of(run, batch_size=20, seed=mixed("linear", 0))
    loader = data.train_dataloader()
    weight, bias = torch.zeros(10, 16, dtype=torch.float64), torch.zeros(10, dtype=torch.float64)
    velocities, step = [torch.zeros_like(weight), torch.zeros_like(bias)], 0
    for _ in range(3):
        for images, labels in loader:
            x = features(data.normalize(images))
            error = (x @ weight.T + bias).softmax(1) - torch.nn.functional.one_hot(labels, 10)
            gradients = [error.T @ x / len(x), error.mean(0)]
            lr = 0.5 * (1 + math.cos(math.pi * step / 18)) / 2  # 120 images: 6 steps an epoch
            for value, velocity, gradient in zip((weight, bias), velocities, gradients, strict=True):
                velocity.mul_(0.8).add_(gradient + 0.01 * value)
                value -= lr * velocity
            step += 1
    assert step == 18
    images, labels = (torch.cat(part) for part in zip(*data.val_dataloader(), strict=True))
    logits = features(data.normalize(images)) @ weight.T + bias
    assert len(labels) == 40
    return {
        "linear/loss": -logits.log_softmax(1).gather(1, labels[:, None]).mean().item(),
        "linear/top1": (logits.argmax(1) == labels).double().mean().item(),
        "linear/top5": (logits.topk(5).indices == labels[:, None]).any(1).double().mean().item(),
    }


def test_the_section_is_that_of_a_probe_by_hand(
    finished: Path, with_evaluations: Callable[..., Path], again: Callable[[Path], Any]
) -> None:
    before = read_record(finished)
    expected = by_hand(finished)
    with_evaluations(finished, ("lapbench.evaluation.LinearProbe", SETTINGS))
    assert again(finished).status == 0
    record = read_record(finished)
    section = record.evaluations["linear"]
    assert (section["checkpoint"], section["settings"]) == ("last", SETTINGS)
    assert section["seconds"] > 0
    assert section["metrics"] == pytest.approx(expected, rel=1e-7)  # accuracies are recorded in float32
    assert section["metrics"]["linear/loss"] == pytest.approx(expected["linear/loss"], rel=1e-12)
    assert expected["linear/loss"] < math.log(10)  # it has learnt something
    assert record.metrics == {**before.metrics, **section["metrics"]}


def test_features_are_the_mean_of_the_patch_tokens_after_the_norm() -> None:
    model: Any = build_backbone(
        "vit_tiny_patch16_224",
        1,
        img_size=8,
        patch_size=4,
        embed_dim=16,
        depth=2,
        num_heads=2,
        reg_tokens=3,
    ).eval()
    with torch.no_grad():
        model.norm.weight.copy_(torch.linspace(0.5, 2, 16))
    images = torch.randn(40, 3, 8, 8)
    taken: list[torch.Tensor] = []
    model.blocks[-1].register_forward_hook(lambda module, inputs, output: taken.append(output))
    found = mean_patch_token(model, images)
    # One shape, whatever the batch's: what a batch of another process says of the same image is the same to the bit.
    assert [tokens.shape for tokens in taken] == [(AT_ONCE, 1 + 3 + 4, 16)] * 2
    assert torch.equal(found[35:38], mean_patch_token(model, images[35:38]))
    tokens = torch.cat([taken[0], taken[1][:8]])
    deviation = tokens - tokens.mean(-1, keepdim=True)
    normed = deviation / (deviation.square().mean(-1, keepdim=True) + model.norm.eps).sqrt() * model.norm.weight
    assert torch.allclose(found, normed[:, 4:].mean(1), atol=1e-6)
    assert found.dtype == torch.float32
    assert not found.requires_grad


def after_fit(run: Path, tmp_path: Path, task: ImageClassification) -> dict[str, Any]:
    """Probes a task with the run's weights as ``lapbench fit`` does."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, plugins=[AtomicCheckpointIO()], barebones=True)
    file = run / "checkpoints/last.ckpt"
    after = AfterFit(trainer, task, digits_of(run), 0, tmp_path, file, "last")
    sections: dict[str, Any] = {}
    assert after.run([LinearProbe(**SETTINGS)], sections.__setitem__) == []  # type: ignore[arg-type]
    return sections["linear"]


def test_the_backbone_stays_as_it_is_and_dropout_is_off(finished: Path, tmp_path: Path) -> None:
    def digest(module: torch.nn.Module) -> str:
        tensors = (*module.named_parameters(), *module.named_buffers())
        content = (name.encode() + value.detach().numpy().tobytes() for name, value in tensors)
        return hashlib.sha256(b"".join(content)).hexdigest()

    dropping = task_of(finished, drop_path=0.9, options={**TINY_OPTIONS, "proj_drop_rate": 0.5, "pos_drop_rate": 0.5})
    dropping.backbone.register_buffer("counter", torch.arange(3.0), persistent=False)
    dropping.load_state_dict(torch.load(finished / "checkpoints/last.ckpt", weights_only=True)["state_dict"])
    before = digest(dropping.train().backbone)
    section = after_fit(finished, tmp_path / "a", dropping)
    assert digest(dropping.backbone) == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in dropping.parameters())
    plain = after_fit(finished, tmp_path / "b", task_of(finished))
    assert section["metrics"] == plain["metrics"]
    state = torch.load(tmp_path / "a/evaluations/linear/last.ckpt", weights_only=True)["state_dict"]
    assert set(state) == {"head.weight", "head.bias"}


def test_the_runs_data_module_stays_as_it_is(few_digits: Path) -> None:
    data = Digits(data_dir=str(few_digits), batch_size=12, seed=3, repeats=2, val_fraction=0.25)
    data.setup("fit")
    data.train_dataloader()
    before = dict(vars(data))
    state = data.state_dict()
    copy = data.for_evaluation(30, seed=7)
    assert copy.state_dict() == {}
    labels = torch.cat([labels for _, labels in copy.train_dataloader()])
    assert len(labels) == 120
    assert {name: copy.state_dict()[name] for name in ("global_batch_size", "seed", "repeats")} == {
        "global_batch_size": 30,
        "seed": 7,
        "repeats": 1,
    }
    assert vars(data) == before
    assert data.state_dict() == state


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("epochs", 0, "LinearProbe.epochs: expected at least 1, got 0"),
        ("batch_size", 0, "LinearProbe.batch_size: expected at least 1, got 0"),
        ("lr", 0.0, "LinearProbe.lr: expected above 0, got 0.0"),
        ("momentum", 1.0, "LinearProbe.momentum: expected 0 <= value < 1, got 1.0"),
        ("weight_decay", -1.0, "LinearProbe.weight_decay: expected at least 0, got -1.0"),
        ("name", "val", "name of an evaluation: expected small letters, digits, - and _, and none of train, val"),
        ("name", "../x", "got '../x'"),
    ],
)
def test_a_setting_out_of_range_is_named(setting: str, value: Any, reason: str) -> None:
    with pytest.raises(UserError) as caught:
        LinearProbe(**{setting: value})
    assert reason in str(caught.value)


def test_what_does_not_fit_the_run_is_said_before_training(tmp_path: Path, fit: Callable[..., Any]) -> None:
    probe = ("--trainer.callbacks+=LinearProbe", "--trainer.callbacks.split=val")
    outcome = fit(tmp_path, *probe, "--data.val_fraction", 0)
    assert outcome.status == 2
    reason = "LinearProbe.split val: Digits has no validation split: hold one out with data.val_fraction > 0"
    assert outcome.err.splitlines()[-1].startswith(f"lapbench: error: {reason}")
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(UserError, match=r"batch_size: expected a multiple of the 3 processes, got 64"):
        LinearProbe()._check(Digits(val_fraction=0.5), 3)
    with pytest.raises(UserError, match="expected images with labels, got LightningDataModule"):
        LinearProbe()._check(pl.LightningDataModule(), 1)
