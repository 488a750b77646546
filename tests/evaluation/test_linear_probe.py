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
from lapbench.evaluation import LinearProbe, linear_probe
from lapbench.evaluation.after_fit import AfterFit
from lapbench.evaluation.features import AT_ONCE
from lapbench.evaluation.probe_features import Features
from lapbench.results.record import read_record
from lapbench.tasks import ImageClassification
from lapbench.training.checkpoint_io import AtomicCheckpointIO

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own use of torch
SETTINGS = {
    "epochs": 3,
    "batch_size": 20,
    "lrs": [0.5],
    "lr_batch_size": None,
    "blocks": [1],
    "poolings": ["avg"],
    "momentum": 0.8,
    "weight_decay": 0.01,
    "init_std": 0.0,
    "cosine": "step",
    "batch_norm": False,
    "select_fraction": 0.0,
    "split": "val",
    "cache_features": False,
}
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
    assert (section["chosen"], section["chosen_on"]) == ({"lr": 0.5, "blocks": 1, "pooling": "avg"}, None)
    assert section["seconds"] > 0
    assert section["metrics"] == pytest.approx(expected, rel=1e-7)  # accuracies are recorded in float32
    assert section["metrics"]["linear/loss"] == pytest.approx(expected["linear/loss"], rel=1e-12)
    assert expected["linear/loss"] < math.log(10)  # it has learnt something
    assert record.metrics == {**before.metrics, **section["metrics"]}


def test_features_are_tokens_of_the_last_blocks_after_the_norm() -> None:
    model: Any = build_backbone(
        "vit_tiny_patch16_224",
        1,
        img_size=8,
        patch_size=4,
        embed_dim=16,
        depth=3,
        num_heads=2,
        reg_tokens=3,
    ).eval()
    with torch.no_grad():
        model.norm.weight.copy_(torch.linspace(0.5, 2, 16))
    images = torch.randn(40, 3, 8, 8)
    taken: list[torch.Tensor] = []
    for block in model.blocks[1:]:
        block.register_forward_hook(lambda module, inputs, output: taken.append(output))
    features = Features(model, [("token", 2), ("token", 1), ("avg", 1)])
    found = features(images)
    # One shape, whatever the batch's: what a batch of another process says of the same image is the same to the bit.
    assert [tokens.shape for tokens in taken] == [(AT_ONCE, 1 + 3 + 4, 16)] * 4
    assert torch.equal(found[35:38], features(images[35:38]))
    tokens = torch.stack([torch.cat([taken[i], taken[i + 2][:8]]) for i in (0, 1)])
    deviation = tokens - tokens.mean(-1, keepdim=True)
    normed = deviation / (deviation.square().mean(-1, keepdim=True) + model.norm.eps).sqrt() * model.norm.weight
    expected = torch.stack([normed[0][:, 0], normed[1][:, 0], normed[1][:, 4:].mean(1)], dim=1)
    assert torch.allclose(found, expected, atol=1e-6)
    assert found.dtype == torch.float32
    assert not found.requires_grad


def test_of_raw_pixels_all_are_seen() -> None:
    images = torch.randn(3, 1, 8, 8)
    found = Features(build_backbone("pixels", num_classes=0, patch_size=4, in_chans=1), [("avg", 1)])(images)
    assert found.shape == (3, 1, 64)
    assert torch.equal(found.sort().values, images.view(3, 1, 64).sort().values)


def after_fit(
    run: Path, folder: Path, task: ImageClassification, error: str | None = None, **changes: Any
) -> dict[str, Any]:
    """Probes a task with its own weights as ``lapbench fit`` does."""
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, plugins=[AtomicCheckpointIO()], barebones=True)
    file = folder / "weights.ckpt"
    folder.mkdir(exist_ok=True)
    torch.save({"state_dict": task.state_dict()}, file)
    after = AfterFit(trainer, task, digits_of(run), 0, folder, file, "last")
    sections: dict[str, Any] = {}
    failed = after.run([LinearProbe(**SETTINGS | changes)], sections.__setitem__)
    assert sections["linear"].get("error") == error
    assert failed == ["linear"] * (error is not None)
    return sections["linear"]


def by_hand_on_cached_features(run: Path, backbone: Any) -> dict[str, Any]:
    """Two heads, each trained alone on batch-normalised features of images that are not augmented."""
    seed = mixed("linear", 0)
    data = digits_of(run).for_evaluation(20, seed, 0.25)

    def part(name: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels, _ = zip(*data.plain_dataloader(name), strict=True)
        with torch.no_grad():
            blocks = backbone.forward_intermediates(data.normalize(torch.cat(images)), 2, norm=True)
        return torch.cat([tokens[:, 0] for tokens in blocks], dim=1).double(), torch.cat(labels)

    (x, y), heads = part("train"), {}
    assert len(y) == 90
    for lr in (4.0, 0.4):
        head = torch.nn.Linear(32, 10, dtype=torch.float64)
        torch.nn.init.zeros_(head.weight)
        torch.nn.init.zeros_(head.bias)
        optimizer = torch.optim.SGD(head.parameters(), momentum=0.9)
        mean, variance = torch.zeros(32).double(), torch.ones(32).double()
        for epoch in range(3):
            optimizer.param_groups[0]["lr"] = lr * 20 / 256 * (1 + math.cos(math.pi * epoch / 3)) / 2
            order = torch.randperm(90, generator=torch.Generator().manual_seed(mixed("probe", seed, epoch)))
            for rows in order.split(20)[:4]:
                optimizer.zero_grad()
                batch = x[rows]
                normed = (batch - batch.mean(0)) / (batch.var(0, correction=0) + 1e-6).sqrt()
                mean, variance = (0.9 * a + 0.1 * b for a, b in ((mean, batch.mean(0)), (variance, batch.var(0))))
                torch.nn.functional.cross_entropy(head(normed), y[rows]).backward()
                optimizer.step()
        (sx, sy), (tx, ty) = part("select"), part("test")
        assert (len(sy), len(ty)) == (30, 37)
        sx, tx = ((features - mean) / (variance + 1e-6).sqrt() for features in (sx, tx))
        with torch.no_grad():
            heads[lr] = {
                "select": float((head(sx).argmax(1) == sy).double().mean()),
                "test": float((head(tx).argmax(1) == ty).double().mean()),
                "loss": float(torch.nn.functional.cross_entropy(head(tx), ty)),
            }
    return heads


GRID: dict[str, Any] = {
    "lrs": [4.0, 0.4],
    "lr_batch_size": 256,
    "blocks": [2],
    "poolings": ["token"],
    "momentum": 0.9,
    "weight_decay": 0.0,
    "cosine": "epoch",
    "batch_norm": True,
    "select_fraction": 0.25,
    "split": "test",
    "cache_features": True,
}


def test_the_best_head_of_a_grid_is_chosen_on_samples_held_out_of_training(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_of(finished, options=TINY_OPTIONS | {"class_token": True}, global_pool="token").eval()
    expected = by_hand_on_cached_features(finished, task.backbone)
    section = after_fit(finished, tmp_path / "run", task, **GRID)
    assert section["chosen_on"] == "select"
    assert [head["lr"] for head in section["heads"]] == [4.0, 0.4]
    for head in section["heads"]:
        assert head["top1"] == pytest.approx(expected[head["lr"]]["select"], abs=1e-12)
    best = max(section["heads"], key=lambda head: (head["top1"], -head["loss"]))
    assert section["chosen"] == {"lr": best["lr"], "blocks": 2, "pooling": "token"}
    which = {4.0: "4, is the largest of lrs: larger", 0.4: "0.4, is the smallest of lrs: smaller"}[best["lr"]]
    assert f"linear: the best learning rate, {which} ones may be better\n" in capsys.readouterr().err
    assert section["metrics"]["linear/top1"] == pytest.approx(expected[best["lr"]]["test"], abs=1e-12)
    assert section["metrics"]["linear/loss"] == pytest.approx(expected[best["lr"]]["loss"], rel=1e-5)


@pytest.mark.parametrize("cached", [False, True])
def test_one_that_was_stopped_goes_on_to_the_same_end(
    cached: bool, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = GRID | {"cache_features": cached, "poolings": ["avg"]}
    task = task_of(finished)
    whole = after_fit(finished, tmp_path / "whole", task, **settings)
    steps, original = [], linear_probe._Probe.training_step

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        steps.append(batch_idx)
        if len(steps) == 10:
            raise RuntimeError("out of memory")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(linear_probe._Probe, "training_step", step)
    after_fit(finished, tmp_path / "run", task, error="RuntimeError: out of memory", **settings)
    section = after_fit(finished, tmp_path / "run", task, **settings)
    assert len(steps) == 10 + 4  # 4 steps an epoch, two whole ones were kept
    assert {**section, "seconds": 0} == {**whole, "seconds": 0}
    states = [
        torch.load(tmp_path / f"{name}/evaluations/linear/last.ckpt", weights_only=True) for name in ("run", "whole")
    ]
    for key, value in states[0]["state_dict"].items():
        assert torch.equal(value, states[1]["state_dict"][key])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "blocks": [1, 2],
            "poolings": ["token", "token+avg"],
            "cache_features": True,
            "select_fraction": 0.25,
        },
    ],
)
def test_the_backbone_stays_as_it_is_and_dropout_is_off(
    changes: dict[str, Any], finished: Path, tmp_path: Path
) -> None:
    def digest(module: torch.nn.Module) -> str:
        tensors = (*module.named_parameters(), *module.named_buffers())
        content = (name.encode() + value.detach().numpy().tobytes() for name, value in tensors)
        return hashlib.sha256(b"".join(content)).hexdigest()

    token = {"class_token": bool(changes)}
    pool = "token" if changes else "avg"
    rates = {"proj_drop_rate": 0.5, "pos_drop_rate": 0.5}
    dropping = task_of(finished, drop_path=0.9, options={**TINY_OPTIONS, **token, **rates}, global_pool=pool)
    dropping.backbone.register_buffer("counter", torch.arange(3.0), persistent=False)
    before = digest(dropping.train().backbone)
    section = after_fit(finished, tmp_path / "a", dropping, **changes)
    assert digest(dropping.backbone) == before
    assert all(parameter.grad is None and parameter.requires_grad for parameter in dropping.parameters())
    same = task_of(finished, options=TINY_OPTIONS | token, global_pool=pool)
    same.load_state_dict(dropping.state_dict(), strict=True)
    plain = after_fit(finished, tmp_path / "b", same, **changes)
    assert section["metrics"] == plain["metrics"]
    state = torch.load(tmp_path / "a/evaluations/linear/last.ckpt", weights_only=True)["state_dict"]
    banks = 4 if changes else 1
    assert set(state) == {f"classifiers.banks.{i}.{name}" for i in range(banks) for name in ("weight", "bias")}


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
        ("lrs", (), "LinearProbe.lrs: expected different numbers above 0, got none"),
        ("lrs", (0.1, 0.0), "LinearProbe.lrs: expected different numbers above 0, got 0.1, 0.0"),
        ("lr_batch_size", 0, "LinearProbe.lr_batch_size: expected at least 1 or null, got 0"),
        ("blocks", (), "LinearProbe.blocks: expected different numbers from 1, got none"),
        ("blocks", (4, 4), "LinearProbe.blocks: expected different numbers from 1, got 4, 4"),
        ("poolings", ("max",), "LinearProbe.poolings: expected different ones of token, token+avg, avg, got max"),
        ("init_std", -0.1, "LinearProbe.init_std: expected at least 0, got -0.1"),
        ("select_fraction", 1.0, "LinearProbe.select_fraction: expected 0 <= value < 1, got 1.0"),
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
    outcome = fit(tmp_path, *probe, "--trainer.callbacks.batch_size", 128)
    assert outcome.status == 2
    assert outcome.err.endswith("LinearProbe.batch_size: expected at most the 108 training samples, got 128\n")


@pytest.mark.parametrize(
    ("settings", "processes", "reason"),
    [
        ({}, 3, "LinearProbe.batch_size: expected a multiple of the 3 processes, got 64"),
        ({"blocks": (1, 4)}, 1, "LinearProbe.blocks: the backbone has 2 blocks, got 1, 4"),
        (
            {"poolings": ("avg", "token")},
            1,
            "LinearProbe.poolings: the backbone has no class token, only avg, got avg, t",
        ),
        (
            {"select_fraction": 0},
            1,
            "LinearProbe.select_fraction: expected more than 0 to choose the best of 13 classifiers, got 0",
        ),
    ],
)
def test_what_does_not_fit_the_backbone_is_named(
    settings: dict[str, Any], processes: int, reason: str, finished: Path
) -> None:
    backbone: Any = task_of(finished).backbone
    with pytest.raises(UserError) as caught:
        LinearProbe(**settings)._check(Digits(val_fraction=0.5), processes, backbone)
    assert str(caught.value).startswith(reason)
    with pytest.raises(UserError, match="expected images with labels, got LightningDataModule"):
        LinearProbe()._check(pl.LightningDataModule(), 1, backbone)


def test_what_null_leaves_to_the_backbone() -> None:
    def resolved(**options: Any) -> tuple[Any, Any, int]:
        small = {"img_size": 8, "patch_size": 4, "embed_dim": 8, "num_heads": 2, "num_classes": 0}
        settings = LinearProbe().settings.of(build_backbone("vit_tiny_patch16_224", **small | options))
        return settings.blocks, settings.poolings, len(settings.heads)

    assert resolved(depth=4) == ((1, 4), ("token", "token+avg"), 52)
    assert resolved(depth=3) == ((1,), ("token", "token+avg"), 26)
    assert resolved(depth=4, class_token=False, global_pool="avg") == ((1, 4), ("avg",), 26)
