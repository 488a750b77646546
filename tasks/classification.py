"""Supervised image classification (DeiT-III and relatives)."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lapbench.backbones import VisionSettings, build_vision_backbone
from lapbench.errors import UserError
from lapbench.optim import LRSchedule, OptimizerSettings, build_optimizer
from lapbench.optim.ema import EMA
from lapbench.tasks.metrics import SampleMean
from lapbench.tasks.steps import (
    NonFiniteLossError,
    check_finite,
    log_step,
    step_samples,
    window_correction,
    with_schedule,
)

__all__ = ["ImageClassification", "Mixing", "NonFiniteLossError"]

Stage = Literal["val", "test"]


@dataclass
class Mixing:
    """Mixup and CutMix of a batch with its mirror image (arXiv 1710.09412, 1905.04899), by timm.

    Args:
        mixup: Alpha of mixup's Beta distribution; 0 turns it off.
        cutmix: Alpha of CutMix's Beta distribution; 0 turns it off.
        prob: Share of batches that are mixed.
        switch_prob: Share of CutMix where both are on.
        mode: One mixing ratio for each "batch", "pair" or "elem"(ent).
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"

    @property
    def active(self) -> bool:
        """Whether anything is mixed."""
        return self.prob > 0 and (self.mixup > 0 or self.cutmix > 0)


class ImageClassification(pl.LightningModule):
    """A ViT with a head schedule, trained with labels.

    Logs train/{loss,loss_epoch,lr,grad_norm}, train/top1 where images are not mixed, {val,test}/{loss,top1,top5}.
    Accuracies are fractions over all samples (micro average).

    Args:
        backbone: The vision transformer and its head schedule.
        num_classes: Number of classes; on the command line it comes from the data.
        loss: "ce" is cross-entropy with class indices or, under mixing, soft targets; "bce" is binary cross-entropy
            with soft targets; "bce_binarized" with every target above 0 set to 1 (DeiT-III).
        label_smoothing: Label smoothing.
        mixing: Mixup and CutMix.
        optimizer: Optimizer and peak learning rate.
        lr_schedule: Warm-up and decay.
        ema_decay: Decay of an exponential moving average of the weights, which is then what is validated and tested;
            null for none.

    Raises:
        UserError: Settings that contradict each other.
    """

    def __init__(
        self,
        backbone: VisionSettings,
        num_classes: int,
        loss: Literal["ce", "bce", "bce_binarized"] = "ce",
        label_smoothing: float = 0.0,
        mixing: Mixing = Mixing(),  # noqa: B008  never mutated; jsonargparse documents dataclass defaults
        optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008
        lr_schedule: LRSchedule = LRSchedule(),  # noqa: B008
        ema_decay: float | None = None,
    ) -> None:
        super().__init__()
        if loss == "bce_binarized" and label_smoothing > 0:
            raise UserError(
                f"label_smoothing: expected 0 with loss bce_binarized, got {label_smoothing}: smoothing lifts every "
                "target above 0, so binarising would label every class"
            )
        if not 0 <= label_smoothing < 1:
            raise UserError(f"label_smoothing: expected 0 <= value < 1, got {label_smoothing}")
        if ema_decay is not None and not 0 < ema_decay < 1:
            raise UserError(f"ema_decay: expected 0 < value < 1 or null, got {ema_decay}")
        self.settings = backbone
        self.optimizer_settings = optimizer
        self.lr_schedule = lr_schedule
        self.mixing = mixing
        self.ema_decay = ema_decay
        self.num_classes = num_classes
        self.save_hyperparameters(
            {
                "backbone": asdict(backbone),
                "num_classes": num_classes,
                "loss": loss,
                "label_smoothing": label_smoothing,
                "mixing": asdict(mixing),
                "optimizer": asdict(optimizer),
                "lr_schedule": asdict(lr_schedule),
                "ema_decay": ema_decay,
            }
        )
        self.backbone = build_vision_backbone(num_classes=num_classes, **_shallow(backbone))
        # A trial, so that what is wrong with the optimizer is said before a run starts.
        build_optimizer(nn.Linear(1, 1), optimizer, batch_size=1)
        self.train_loss_fn = _loss(loss, label_smoothing, mixing.active)
        self.mixup = (
            Mixup(
                mixup_alpha=mixing.mixup,
                cutmix_alpha=mixing.cutmix,
                prob=mixing.prob,
                switch_prob=mixing.switch_prob,
                mode=mixing.mode,
                label_smoothing=label_smoothing,
                num_classes=num_classes,
            )
            if mixing.active
            else None
        )
        self.train_loss = SampleMean()
        self.train_top1 = MulticlassAccuracy(num_classes, average="micro")
        # Not in a ModuleDict: metrics of both stages need attribute names for Lightning to find and reset them.
        self.val_loss, self.test_loss = SampleMean(), SampleMean()
        self.val_accuracy, self.test_accuracy = _accuracies(num_classes, "val"), _accuracies(num_classes, "test")

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] of images [B, C, H, W]."""
        logits: Tensor = self.backbone(images)
        return logits

    def setup(self, stage: str) -> None:
        """Checks the task against the data before anything is computed."""
        data = getattr(self.trainer, "datamodule", None)
        if data is None:
            return
        if data.num_classes != self.num_classes:
            raise UserError(
                f"num_classes: the model has {self.num_classes}, "
                f"the data set {type(data).__name__} has {data.num_classes}"
            )
        if stage == "fit" and self.mixup is not None and data.batch_size % 2:
            raise UserError(f"data.batch_size: mixing pairs samples; expected an even number, got {data.batch_size}")

    def configure_callbacks(self) -> list[pl.Callback]:
        """The moving average, where one is asked for."""
        return [] if self.ema_decay is None else [EMA(decay=self.ema_decay)]

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimizer and per-step schedule."""
        optimizer = build_optimizer(
            self.backbone, self.optimizer_settings, step_samples(self.trainer, self.optimizer_settings)
        )
        return with_schedule(self.trainer, optimizer, self.lr_schedule)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """One micro-batch.

        Raises:
            NonFiniteLossError: Before the optimizer could spread it to the weights.
        """
        images, labels = batch
        targets = labels
        if self.mixup is not None:
            images, targets = self.mixup(images, labels)
        logits = self(images)
        loss: Tensor = self.train_loss_fn(logits, targets)
        check_finite(self, loss, batch_idx)
        detached = loss.detach()
        self.train_loss.update(detached, weight=len(labels))
        self.log("train/loss", detached)
        if self.mixup is None:
            self.train_top1.update(logits.detach(), labels)
        return loss * window_correction(self.trainer, batch_idx)

    def on_train_epoch_end(self) -> None:
        """Logs the epoch's means: here, not at each step, for an epoch that is resumed after its last step."""
        self.log("train/loss_epoch", self.train_loss)
        if self.mixup is None:
            self.log("train/top1", self.train_top1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Logs the learning rate and the gradient norm before clipping."""
        log_step(self, self.backbone, optimizer)

    def on_validation_epoch_start(self) -> None:
        """Forgets what an interrupted validation gathered."""
        self.val_loss.reset()
        self.val_accuracy.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and accuracy of a validation batch."""
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and accuracy of a test batch."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: tuple[Tensor, Tensor, list[str]], batch_idx: int) -> dict[str, Any]:
        """Keys, labels and class probabilities [B, num_classes] of a batch."""
        images, labels, keys = batch
        return {"keys": list(keys), "labels": labels, "probabilities": self._evaluated(images).softmax(dim=-1)}

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: Stage) -> None:
        images, labels = batch
        logits = self._evaluated(images)
        loss, accuracy = getattr(self, f"{stage}_loss"), getattr(self, f"{stage}_accuracy")
        # Plain cross-entropy whatever the training loss is, so that runs with different losses can be compared.
        loss.update(nn.functional.cross_entropy(logits, labels, reduction="none"))
        accuracy.update(logits, labels)
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        self.log_dict(accuracy, on_step=False, on_epoch=True)

    def _evaluated(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] of evaluation images, in float32.

        Every batch goes through the model at the same size: the last bits of a matrix product depend on its shape, so
        a score would depend on how samples fall into batches, and so on the number of processes.
        """
        full: int = getattr(getattr(self.trainer, "datamodule", None), "eval_batch_size", len(images))
        padded = nn.functional.pad(images, (0, 0) * (images.ndim - 1) + (0, full - len(images)))
        logits: Tensor = self(padded)
        return logits[: len(images)].float()


def _shallow(settings: VisionSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in settings.__dataclass_fields__}


def _accuracies(num_classes: int, stage: Stage) -> MetricCollection:
    top5 = min(5, num_classes)
    return MetricCollection(
        {
            "top1": MulticlassAccuracy(num_classes, average="micro"),
            "top5": MulticlassAccuracy(num_classes, average="micro", top_k=top5),
        },
        prefix=f"{stage}/",
        compute_groups=False,
    )


def _loss(name: str, label_smoothing: float, mixed: bool) -> nn.Module:
    """The training loss; under mixing, timm's Mixup has already smoothed the targets."""
    if name == "ce":
        return nn.CrossEntropyLoss(label_smoothing=0.0 if mixed else label_smoothing)
    bce: nn.Module = BinaryCrossEntropy(label_smoothing, target_threshold=0.0 if name == "bce_binarized" else None)
    return bce
