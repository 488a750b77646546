"""The image classification task against computations by hand."""

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lapbench.backbones import VisionSettings
from lapbench.errors import UserError
from lapbench.optim import LRSchedule, OptimizerSettings
from lapbench.tasks import ImageClassification
from lapbench.tasks.classification import Mixing, NonFiniteLossError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's own use of torch
]
CLASSES = 3
SGD = OptimizerSettings(name="sgd", lr=0.1, weight_decay=0.1, options={"momentum": 0.5, "nesterov": False})


def task(**settings: Any) -> ImageClassification:
    """A tiny ViT on 8 x 8 grey images in three classes, always with the same first weights."""
    torch.manual_seed(0)
    backbone = VisionSettings(
        "vit_tiny_patch16_224",
        heads=1,
        img_size=8,
        patch_size=4,
        in_chans=1,
        global_pool="avg",
        drop_path=settings.pop("drop_path", 0.0),
        options={"embed_dim": 8, "depth": 1, "num_heads": 2, "class_token": False},
    )
    settings.setdefault("lr_schedule", LRSchedule(warmup_epochs=0))
    return ImageClassification(backbone, num_classes=settings.pop("num_classes", CLASSES), **settings)


class Batches(pl.LightningDataModule):
    """The same ``count`` batches of ``batch_size`` random samples in each epoch; 10 validation samples, 4 a batch."""

    num_classes = CLASSES

    def __init__(self, count: int, batch_size: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        samples = count * batch_size
        self.batch_size = batch_size
        self.images = torch.randn(samples, 1, 8, 8, generator=generator)
        self.labels = torch.randint(CLASSES, (samples,), generator=generator)
        self.val_images = torch.randn(10, 1, 8, 8, generator=generator)
        self.val_labels = torch.randint(CLASSES, (10,), generator=generator)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.images, self.labels), self.batch_size)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.val_images, self.val_labels), 4)

    def batches(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.images.split(self.batch_size), self.labels.split(self.batch_size), strict=True))


def trainer(**settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"limit_val_batches": 0, "num_sanity_val_steps": 0, **settings},
    )


def sgd_by_hand(
    model: ImageClassification, windows: list[list[tuple[Tensor, Tensor]]], rates: list[float]
) -> list[dict[str, Tensor]]:
    """Plain SGD with momentum 0.5 and decay 0.1 of matrices, a step for each window. Weights after each step."""
    velocity: dict[str, Tensor] = {}
    history = []
    for window, rate in zip(windows, rates, strict=True):
        model.zero_grad()
        loss = sum(F.cross_entropy(model(images), labels) for images, labels in window) / len(window)
        loss.backward()
        with torch.no_grad():
            for name, p in model.backbone.named_parameters():
                assert p.grad is not None
                decay = 0.1 if p.ndim > 1 and name != "pos_embed" else 0.0
                gradient = p.grad + decay * p
                velocity[name] = gradient if name not in velocity else 0.5 * velocity[name] + gradient
                p -= rate * velocity[name]
        history.append({name: p.detach().clone() for name, p in model.backbone.named_parameters()})
    return history


def assert_weights(model: ImageClassification, expected: dict[str, Tensor]) -> None:
    for name, p in model.backbone.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name], msg=lambda text, name=name: f"{name}: {text}")


def test_accumulation_steps_on_every_window_and_weighs_the_last_by_its_size() -> None:
    data = Batches(10)
    model = task(optimizer=SGD, lr_schedule=LRSchedule(warmup_epochs=0, min_lr=0.01))
    run = trainer(max_epochs=3, accumulate_grad_batches=4)
    run.fit(model, data)
    assert run.global_step == 9
    scheduler = run.lr_scheduler_configs[0].scheduler
    assert scheduler.last_epoch == 9
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)
    rates = [0.01 + 0.09 * (1 + math.cos(math.pi * step / 9)) / 2 for step in range(9)]
    batches = data.batches()
    assert_weights(model, sgd_by_hand(task(), 3 * [batches[:4], batches[4:8], batches[8:]], rates)[-1])


def test_warmup_counts_optimizer_steps() -> None:
    rates: list[float] = []

    class Rates(pl.Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    schedule = LRSchedule(warmup_epochs=1, warmup_lr=0.001, min_lr=0.0)
    run = trainer(max_epochs=2, accumulate_grad_batches=2, callbacks=[Rates()])
    run.fit(task(optimizer=SGD, lr_schedule=schedule), Batches(8))
    assert rates[:4] == pytest.approx([0.001, 0.02575, 0.0505, 0.07525])
    assert rates[4:] == pytest.approx([0.1 * (1 + math.cos(math.pi * i / 4)) / 2 for i in range(4)])


@pytest.mark.parametrize(("scaling", "peak"), [("linear", 0.1 * 24 / 16), ("sqrt", 0.1 * (24 / 16) ** 0.5)])
def test_the_rate_scales_with_all_samples_of_a_step(scaling: Any, peak: float) -> None:
    optimizer = OptimizerSettings(name="adamw", lr=0.1, lr_batch_size=16, lr_scaling=scaling)
    run = trainer(max_steps=1, accumulate_grad_batches=4)
    run.fit(task(optimizer=optimizer, lr_schedule=LRSchedule("constant", warmup_epochs=0)), Batches(8, batch_size=6))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(peak)


def loss_of(**settings: Any) -> Callable[[Tensor, Tensor], float]:
    """The training loss of a task with these settings."""
    function = task(**settings).train_loss_fn
    return lambda logits, targets: function(logits, targets).item()


def test_binary_cross_entropy() -> None:
    logits, targets = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([[0.7, 0.3, 0.0]])
    mixing = Mixing(mixup=0.8)
    assert loss_of(loss="bce", mixing=mixing)(logits, targets) == pytest.approx(0.7714, abs=5e-5)
    assert loss_of(loss="bce_binarized", mixing=mixing)(logits, targets) == pytest.approx(0.8048, abs=5e-5)
    # Class indices are one-hot, mixed or not.
    expected = F.binary_cross_entropy_with_logits(logits, torch.tensor([[0.0, 1.0, 0.0]])).item()
    for name in ("bce", "bce_binarized"):
        assert loss_of(loss=name)(logits, torch.tensor([1])) == pytest.approx(expected)
    smooth = F.binary_cross_entropy_with_logits(logits, torch.tensor([[0.1, 0.8, 0.1]])).item()
    assert loss_of(loss="bce", label_smoothing=0.3)(logits, torch.tensor([1])) == pytest.approx(smooth)


def test_cross_entropy() -> None:
    logits, targets = torch.tensor([[2.0, -1.0, 0.5]]), torch.tensor([[0.7, 0.3, 0.0]])
    logs = logits.log_softmax(1)
    soft = -(0.7 * logs[0, 0] + 0.3 * logs[0, 1]).item()
    # Mixup smooths the targets that it makes: the loss must not do so again.
    for smoothing in (0.0, 0.1):
        value = loss_of(mixing=Mixing(cutmix=1.0), label_smoothing=smoothing)(logits, targets)
        assert value == pytest.approx(soft)
    assert loss_of()(logits, torch.tensor([2])) == pytest.approx(-logs[0, 2].item())
    smooth = -(0.9 * logs[0, 2] + 0.1 / 3 * logs.sum()).item()
    assert loss_of(label_smoothing=0.1)(logits, torch.tensor([2])) == pytest.approx(smooth)


@pytest.mark.parametrize("mixing", [Mixing(mixup=0.8), Mixing(cutmix=1.0), Mixing(0.8, 1.0, mode="elem")])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_mixed_targets_are_soft_and_smoothed_once(mixing: Mixing, smoothing: float) -> None:
    model = task(mixing=mixing, label_smoothing=smoothing)
    assert model.mixup is not None
    torch.manual_seed(0)
    labels = torch.tensor([0, 1, 2, 0])
    soft = torch.cat([model.mixup(torch.randn(4, 1, 8, 8), labels)[1] for _ in range(20)])
    torch.testing.assert_close(soft.sum(1), torch.ones(80))
    assert soft.min().item() == pytest.approx(smoothing / 3, abs=1e-6)
    assert ((soft > smoothing / 3 + 0.01).sum(1) == 2).any()  # labels 1 and 2 are mixed with each other
    one_hot = torch.full((CLASSES,), smoothing / 3)
    one_hot[0] += 1 - smoothing
    torch.testing.assert_close(soft[::4], one_hot.expand(20, -1))  # label 0 meets label 0


def test_training_under_mixing_uses_the_soft_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    model = task(mixing=Mixing(cutmix=1.0), optimizer=SGD)
    original = model.train_loss_fn.forward
    monkeypatch.setattr(
        model.train_loss_fn, "forward", lambda logits, targets: seen.append(targets) or original(logits, targets)
    )
    run = trainer(max_epochs=1)
    run.fit(model, Batches(4, batch_size=4))
    assert all(targets.shape == (4, CLASSES) and targets.dtype == torch.float32 for targets in seen)
    assert any(((targets > 0) & (targets < 1)).any() for targets in seen)
    assert "train/top1" not in run.callback_metrics  # there is no right answer to compare with


def test_mixing_needs_pairs() -> None:
    with pytest.raises(UserError, match=r"data\.batch_size: mixing pairs samples; expected an even number, got 3"):
        trainer(max_epochs=1).fit(task(mixing=Mixing(mixup=0.8)), Batches(4, batch_size=3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"loss": "bce_binarized", "label_smoothing": 0.1},
            r"label_smoothing: expected 0 with loss bce_binarized, got 0.1",
        ),
        ({"label_smoothing": 1.0}, r"label_smoothing: expected 0 <= value < 1, got 1.0"),
        ({"ema_decay": 1.0}, r"ema_decay: expected 0 < value < 1 or null, got 1.0"),
        ({"optimizer": OptimizerSettings(name="adamm")}, r"optimizer.name: timm has no optimizer 'adamm'; did you"),
        (
            {"optimizer": OptimizerSettings(options={"betta": 1})},
            r"optimizer.options: adamw has no option betta; expected",
        ),
        ({"optimizer": OptimizerSettings(options={"betas": (2, 0.9)})}, r"optimizer adamw: Invalid beta parameter"),
    ],
)
def test_contradicting_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        task(**settings)


def test_classes_of_model_and_data_must_agree() -> None:
    with pytest.raises(UserError, match="num_classes: the model has 4, the data set Batches has 3"):
        trainer(max_epochs=1).fit(task(num_classes=4), Batches(2))


def test_top1_is_the_share_of_all_samples() -> None:
    model = task(num_classes=2)
    logits = torch.tensor([[1.0, 0.0]]).repeat(3, 1)
    model.test_accuracy.update(logits, torch.tensor([0, 1, 1]))
    # Averaged over classes it would be 0.5.
    assert model.test_accuracy.compute()["test/top1"].item() == pytest.approx(1 / 3)
    assert model.test_accuracy.compute()["test/top5"].item() == 1.0  # of two classes


def test_validation_is_over_samples_not_batches() -> None:
    data, model = Batches(2), task()
    (metrics,) = trainer(limit_val_batches=1.0).validate(model, data, verbose=False)
    with torch.no_grad():
        logits = model.eval()(data.val_images)
    assert metrics["val/loss"] == pytest.approx(F.cross_entropy(logits, data.val_labels).item())
    assert metrics["val/top1"] == pytest.approx((logits.argmax(1) == data.val_labels).float().mean().item())
    assert set(metrics) == {"val/loss", "val/top1", "val/top5"}


class Recorder(pl.Callback):
    """Keeps the weights that each validation sees and those that follow it, and what is logged at each step."""

    def __init__(self) -> None:
        self.validated: list[dict[str, Tensor]] = []
        self.trained: list[dict[str, Tensor]] = []
        self.norms: list[float] = []

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if batch_idx == 0:
            self.validated.append(weights(pl_module))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.trained.append(weights(pl_module))
        self.norms.append(float(trainer.callback_metrics.get("train/grad_norm", "nan")))


def weights(model: ImageClassification) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.backbone.named_parameters()}


def test_ema_is_validated_and_training_goes_on_from_the_raw_weights() -> None:
    data, recorder = Batches(4), Recorder()
    model = task(optimizer=SGD, lr_schedule=LRSchedule("constant", warmup_epochs=0), ema_decay=0.6)
    first = weights(model)
    run = trainer(
        max_epochs=2, limit_val_batches=1.0, num_sanity_val_steps=1, callbacks=[recorder], log_every_n_steps=1
    )
    run.fit(model, data)
    # Before the first update the average is what the model starts from.
    assert all(torch.equal(recorder.validated[0][name], first[name]) for name in first)
    raw = sgd_by_hand(task(), [[batch] for batch in data.batches()] * 2, [0.1] * 8)
    for step, expected in zip(recorder.trained, raw, strict=True):
        for name in expected:
            torch.testing.assert_close(step[name], expected[name])
    average = dict(raw[0])  # the first update takes the weights as they are
    averages = [average]
    for step in raw[1:]:
        average = {name: 0.6 * average[name] + 0.4 * step[name] for name in step}
        averages.append(average)
    for validated, expected in zip(recorder.validated[1:], (averages[3], averages[7]), strict=True):
        for name in expected:
            torch.testing.assert_close(validated[name], expected[name])
    assert any(not torch.allclose(averages[7][name], raw[7][name]) for name in first)


def test_the_gradient_is_clipped_and_its_norm_logged_before() -> None:
    data, recorder = Batches(3), Recorder()
    model = task(
        optimizer=OptimizerSettings(name="sgd", lr=1.0, weight_decay=0.0, options={"momentum": 0.0, "nesterov": False})
    )
    model.lr_schedule = LRSchedule("constant", warmup_epochs=0)
    first = weights(model)
    trainer(max_epochs=1, gradient_clip_val=0.01, callbacks=[recorder], log_every_n_steps=1).fit(model, data)
    twin = task()
    images, labels = data.batches()[0]
    F.cross_entropy(twin(images), labels).backward()
    norm = torch.stack([p.grad.norm() for p in twin.backbone.parameters() if p.grad is not None]).norm().item()
    assert norm > 0.1
    assert recorder.norms[0] == pytest.approx(norm, rel=1e-5)
    step = torch.stack([(recorder.trained[0][name] - first[name]).norm() for name in first]).norm().item()
    assert step == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_loss_stops_before_the_step(value: float) -> None:
    data = Batches(4)
    data.images[4] = value  # in the third batch
    model = task(optimizer=SGD, lr_schedule=LRSchedule("constant", warmup_epochs=0))
    with pytest.raises(
        NonFiniteLossError, match=r"train/loss is nan at optimizer step 2, epoch 0, batch 2: expected a fin"
    ):
        trainer(max_epochs=1).fit(model, data)
    assert_weights(model, sgd_by_hand(task(), [[batch] for batch in data.batches()[:2]], [0.1, 0.1])[-1])


def test_drop_path_is_off_in_evaluation() -> None:
    model = task(drop_path=0.5).eval()
    images = torch.randn(4, 1, 8, 8)
    assert torch.equal(model(images), model(images))
    assert isinstance(model.backbone, nn.Module)


def test_lr_scaling_needs_to_know_the_batch() -> None:
    model = task(optimizer=OptimizerSettings(lr_batch_size=16))
    with pytest.raises(UserError, match=r"optimizer\.lr_batch_size: scaling the learning rate needs a DataModule"):
        trainer(max_epochs=1).fit(model, Batches(2).train_dataloader(), Batches(2).val_dataloader())


@pytest.mark.parametrize(("settings", "steps"), [({"max_steps": 5}, 5), ({"max_steps": 5, "max_epochs": 1}, 4)])
def test_the_length_of_training_may_be_steps(settings: dict[str, int], steps: int) -> None:
    run = trainer(**settings)
    run.fit(task(optimizer=SGD, lr_schedule=LRSchedule(warmup_epochs=0.5, min_lr=0.01)), Batches(4))
    assert run.global_step == steps
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01)


def test_training_without_end_has_no_schedule() -> None:
    with pytest.raises(
        UserError, match=r"trainer\.max_epochs: expected a number of epochs or trainer\.max_steps, got tr"
    ):
        trainer(max_epochs=-1).fit(task(), Batches(4))
