"""Linear probe: how well a linear classifier reads the classes off a frozen backbone's tokens."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lapbench.backbones import VisionBackbone
from lapbench.datamodules.images import ImageShards
from lapbench.datamodules.plan import mixed
from lapbench.errors import UserError
from lapbench.evaluation.base import Evaluation, FinishedTraining
from lapbench.optim import LRSchedule, build_scheduler
from lapbench.tasks.metrics import SampleMean

AT_ONCE = 32
Split = Literal["val", "test"]


@dataclass(frozen=True)
class ProbeSettings:
    """The settings of a ``LinearProbe``, as its section in the record shows them."""

    epochs: int
    batch_size: int
    lr: float
    momentum: float
    weight_decay: float
    split: Split


class LinearProbe(Evaluation):
    """Trains a linear classifier on a frozen backbone and scores it: NAME/{loss,top1,top5}.

    Features are the mean over the patch tokens (no class, distillation or register tokens) of the last block, after the
    model's final norm, in float32; models that pool by "avg" have that norm behind the pooling, so none here. The
    classifier starts at zero and is trained in float64 by SGD and cross-entropy, its learning rate falling to 0 by a
    cosine, on the training split with its augmentation, each image once an epoch. What is scored is its last state: no
    split chooses anything.

    Where the processes share the same global batches, their number does not change the result, as far as float64 goes.

    Args:
        epochs: Epochs of training. This and the following defaults are our choice, for small data sets: of the learning
            rates 0.001 to 1, 0.01 and 0.03 were the best for a ViT trained on the digits (97.5 and 97.2 % of 360).
        batch_size: Images in a step of all processes together.
        lr: Learning rate of the first step.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of the classifier's weights and biases.
        split: What is scored: "val" or "test".
        name: Its name in record and tables.

    Raises:
        UserError: A setting out of range, a split that the data do not have, a batch that the processes cannot share.
    """

    def __init__(
        self,
        epochs: int = 10,
        batch_size: int = 64,
        lr: float = 0.03,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        split: Split = "val",
        name: str = "linear",
    ) -> None:
        super().__init__(name)
        for setting, value, good, expected in (
            ("epochs", epochs, epochs >= 1, "at least 1"),
            ("batch_size", batch_size, batch_size >= 1, "at least 1"),
            ("lr", lr, lr > 0, "above 0"),
            ("momentum", momentum, 0 <= momentum < 1, "0 <= value < 1"),
            ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
        ):
            if not good:
                raise UserError(f"{type(self).__name__}.{setting}: expected {expected}, got {value}")
        self.settings = ProbeSettings(epochs, batch_size, lr, momentum, weight_decay, split)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Says before training what would only be found out after it."""
        if stage == "fit":
            self._check(trainer.datamodule, trainer.world_size)  # type: ignore[attr-defined]

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        """Trains and scores the classifier."""
        settings, world_size = self.settings, run.outer.world_size
        shards = self._check(run.data, world_size)
        data = shards.for_evaluation(settings.batch_size // world_size, seed=mixed(self.name, run.seed))
        backbone = cast(VisionBackbone, run.task.backbone)
        probe = _Probe(backbone, shards.num_classes, settings, self.name)
        trainer = run.trainer(settings.epochs)
        trainer.fit(probe, datamodule=data, ckpt_path=run.checkpoint, weights_only=True)
        score = trainer.validate if settings.split == "val" else trainer.test
        score(probe, datamodule=data, verbose=False)
        return {"metrics": probe.scores, "settings": asdict(settings)}

    def _check(self, data: object, world_size: int) -> ImageShards:
        if not isinstance(data, ImageShards):
            raise UserError(f"{type(self).__name__}: expected images with labels, got {type(data).__name__}")
        if self.settings.split == "val" and not data.val_fraction and data.val_split is None:
            raise UserError(
                f"{type(self).__name__}.split val: {type(data).__name__} has no validation split: "
                "hold one out with data.val_fraction > 0, or score split test"
            )
        if self.settings.batch_size % world_size:
            raise UserError(
                f"{type(self).__name__}.batch_size: expected a multiple of the {world_size} processes, "
                f"got {self.settings.batch_size}"
            )
        return data


def mean_patch_token(backbone: VisionBackbone, images: Tensor) -> Tensor:
    """Mean of the patch tokens of the last block, after the final norm: [B, D] of images [B, C, H, W], no gradient.

    The backbone sees ``AT_ONCE`` images each time, the last of them blank where there are no more: the last bits of a
    matrix product depend on its shape, so features would depend on how samples fall into the batches of processes.
    """
    features = []
    with torch.no_grad():
        for piece in torch.split(images, AT_ONCE):
            padded = nn.functional.pad(piece, (0, 0) * (images.ndim - 1) + (0, AT_ONCE - len(piece)))
            (tokens,) = backbone.forward_intermediates(padded, 1, norm=True)
            features.append(tokens[: len(piece), backbone.num_prefix_tokens :].mean(dim=1))
    return torch.cat(features)


class _Probe(pl.LightningModule):
    """The classifier. The backbone is no module of it: checkpoints, optimizer and DDP must not see it."""

    def __init__(self, backbone: VisionBackbone, num_classes: int, settings: ProbeSettings, name: str) -> None:
        super().__init__()
        self.settings = settings
        self.name = name
        self.features = partial(mean_patch_token, backbone)
        self.head = nn.Linear(backbone.embed_dim, num_classes, dtype=torch.float64)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.loss = SampleMean()
        self.top1 = MulticlassAccuracy(num_classes, average="micro")
        self.top5 = MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes))
        self.scores: dict[str, float] = {}

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, num_classes] in float64."""
        logits: Tensor = self.head(self.features(images).double())
        return logits

    def configure_optimizers(self) -> OptimizerLRScheduler:
        s = self.settings
        optimizer = torch.optim.SGD(self.head.parameters(), s.lr, momentum=s.momentum, weight_decay=s.weight_decay)
        cosine = LRSchedule("cosine", warmup_epochs=0, warmup_lr=0.0, min_lr=0.0)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = build_scheduler(optimizer, cosine, total=total, warmup=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.loss.update(nn.functional.cross_entropy(logits, labels, reduction="none"))
        self.top1.update(logits, labels)
        self.top5.update(logits, labels)

    def on_validation_epoch_end(self) -> None:
        metrics = {"loss": self.loss, "top1": self.top1, "top5": self.top5}
        self.scores = {f"{self.name}/{key}": float(metric.compute()) for key, metric in metrics.items()}

    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end
