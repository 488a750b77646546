"""Linear probe: how well a linear classifier reads the classes off a frozen backbone's tokens."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from lapbench.backbones import VisionBackbone
from lapbench.datamodules.images import ImageShards, Part
from lapbench.datamodules.plan import mixed
from lapbench.errors import UserError
from lapbench.evaluation.base import Evaluation, FinishedTraining
from lapbench.evaluation.features import has_class_token
from lapbench.evaluation.plain_data import PlainData
from lapbench.evaluation.probe_features import CachedFeatures, Features
from lapbench.evaluation.probe_head import FeatureNorm, HeadGrid, HeadScores, Pooling, parts_of
from lapbench.evaluation.probe_settings import DINOV2_LRS, POOLINGS, ProbeSettings, Split
from lapbench.evaluation.processes import Processes
from lapbench.optim import LRSchedule, build_scheduler

Batch = tuple[Tensor, Tensor, list[str]]


class LinearProbe(Evaluation):
    """Trains linear classifiers on a frozen backbone and scores the best one: NAME/{loss,top1,top5}.

    A grid of classifiers (learning rates x last blocks x poolings) is trained in one pass over the features, each as it
    would be alone. Which one is best is decided by its top-1 accuracy (then its loss) on samples held out of the
    training split, never by ``split``. A single one needs no such choice and trains on all samples.

    Features are tokens after the model's final norm, in float32 (models that pool by "avg" have that norm behind the
    pooling, so none here): the class tokens of the last n blocks ("token"), these and the mean patch token of the last
    block ("token+avg"), or the mean patch tokens of the last n blocks ("avg", the only one without a class token; of
    raw pixels it is all of them). Patch tokens are no class, distillation or register tokens.

    Classifiers and their training are float64: SGD on cross-entropy, the learning rate falling to 0 by a cosine, on the
    training split with its augmentation, each image once an epoch. So the number of processes that share the global
    batches does not change the result, as far as float64 goes. Weights, gradients and momentum take 24 bytes a number:
    1.4 GB for dinov2's 52 heads, ViT-S and 1000 classes.

    The default grid, its scaling and momentum are dinov2's (https://arxiv.org/abs/2304.07193, eval/linear.py); epochs
    and batch size are our choice, for small data sets.

    Args:
        epochs: Epochs of training.
        batch_size: Images in a step of all processes together.
        lrs: Learning rates of the first step.
        lr_batch_size: Batch that ``lrs`` are stated for: they grow with batch_size in proportion. Null uses them as
            they are.
        blocks: Numbers of last blocks; null is 1 and 4, if the backbone has them.
        poolings: "token", "token+avg", "avg"; null is the first two with a class token, the last one without.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of the classifiers' weights and biases.
        init_std: Standard deviation of the classifiers' first weights.
        cosine: Whether the learning rate falls after each "step" or, as in DINO's protocol, each "epoch".
        batch_norm: Normalise each feature over the global batch first, without learned weights, as MAE's linear probe
            does (https://arxiv.org/abs/2111.06377, A.1): where features vary little about a large mean, SGD learns
            slowly without.
        select_fraction: Share of the training split that chooses the best of several classifiers.
        split: What is scored: "val" or "test".
        cache_features: Train without augmentation, on features computed once. All processes keep those of the whole
            training split in memory: 4 bytes a number, 9.8 GB for ImageNet and the five tokens of the default grid
            with ViT-S.
        name: Its name in record and tables.

    Raises:
        UserError: A setting out of range or one that backbone or data do not have, a batch that the processes cannot
            share.
    """

    def __init__(
        self,
        epochs: int = 10,
        batch_size: int = 64,
        lrs: tuple[float, ...] = DINOV2_LRS,
        lr_batch_size: int | None = 256,
        blocks: tuple[int, ...] | None = None,
        poolings: tuple[Pooling, ...] | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        init_std: float = 0.0,
        cosine: Literal["step", "epoch"] = "step",
        batch_norm: bool = False,
        select_fraction: float = 0.1,
        split: Split = "test",
        cache_features: bool = False,
        name: str = "linear",
    ) -> None:
        super().__init__(name)
        for setting, value, good, expected in (
            ("epochs", epochs, epochs >= 1, "at least 1"),
            ("batch_size", batch_size, batch_size >= 1, "at least 1"),
            ("lrs", lrs, _distinct(lrs) and min(lrs) > 0, "different numbers above 0"),
            ("lr_batch_size", lr_batch_size, lr_batch_size is None or lr_batch_size >= 1, "at least 1 or null"),
            ("blocks", blocks, blocks is None or (_distinct(blocks) and min(blocks) >= 1), "different numbers from 1"),
            (
                "poolings",
                poolings,
                poolings is None or (_distinct(poolings) and set(poolings) <= set(POOLINGS)),
                f"different ones of {', '.join(POOLINGS)}",
            ),
            ("momentum", momentum, 0 <= momentum < 1, "0 <= value < 1"),
            ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
            ("init_std", init_std, init_std >= 0, "at least 0"),
            ("select_fraction", select_fraction, 0 <= select_fraction < 1, "0 <= value < 1"),
        ):
            if not good:
                raise UserError(f"{type(self).__name__}.{setting}: expected {expected}, got {_show(value)}")
        self.settings = ProbeSettings(
            epochs,
            batch_size,
            tuple(lrs),
            lr_batch_size,
            blocks and tuple(blocks),
            poolings and tuple(poolings),
            momentum,
            weight_decay,
            init_std,
            cosine,
            batch_norm,
            select_fraction,
            split,
            cache_features,
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Says before training what would only be found out after it."""
        if stage == "fit":
            backbone = cast(VisionBackbone, pl_module.backbone)
            data, s = self._check(trainer.datamodule, trainer.world_size, backbone)  # type: ignore[attr-defined]
            if s.batch_size > (samples := data.samples_of("train")):
                expected = f"at most the {samples} training samples"
                raise UserError(f"{type(self).__name__}.batch_size: expected {expected}, got {s.batch_size}")

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        """Trains the classifiers and scores the best one."""
        backbone = cast(VisionBackbone, run.task.backbone)
        seed = mixed(self.name, run.seed)
        data, settings = self._check(run.data, run.outer.world_size, backbone, seed)
        heads = settings.heads
        features = Features(backbone, parts_of(heads))
        dim = features.dim(data, run.outer.strategy.root_device)
        classifiers = HeadGrid(heads, dim, data.num_classes, settings.init_std, seed)
        probe = _Probe(features, classifiers, settings)
        self._train(run, probe, data, seed)

        def scores_on(part: Part) -> dict[str, list[float]]:
            run.trainer().validate(probe, datamodule=PlainData(data, part), verbose=False)
            return probe.scores

        section: dict[str, Any] = {"chosen_on": None}
        best = 0
        if len(heads) > 1:
            scores = scores_on("select")
            best = max(range(len(heads)), key=lambda i: (scores["top1"][i], -scores["loss"][i]))
            shown = [
                {**asdict(head), "top1": top1, "loss": loss}
                for head, top1, loss in zip(heads, scores["top1"], scores["loss"], strict=True)
            ]
            section = {"chosen_on": "select", "heads": shown}
            if run.outer.is_global_zero:
                self._say_if_at_an_end(heads[best].lr)
        scores = scores_on(settings.split)
        metrics = {f"{self.name}/{key}": values[best] for key, values in scores.items()}
        return {"metrics": metrics, "settings": asdict(settings), **section, "chosen": asdict(heads[best])}

    def _say_if_at_an_end(self, lr: float) -> None:
        """Says that a grid may have missed the best learning rate."""
        lrs = self.settings.lrs
        if len(lrs) > 1 and lr in (min(lrs), max(lrs)):
            which, other = ("largest", "larger") if lr == max(lrs) else ("smallest", "smaller")
            line = f"{self.name}: the best learning rate, {lr:g}, is the {which} of lrs: {other} ones may be better"
            print(line, file=sys.stderr, flush=True)

    def _train(self, run: FinishedTraining, probe: "_Probe", images: ImageShards, seed: int) -> None:
        data: pl.LightningDataModule = images
        if self.settings.cache_features:
            predicted = run.trainer().predict(probe, datamodule=PlainData(images, "train"))
            processes = Processes.of(run.outer)
            parts = zip(*cast("list[tuple[Tensor, Tensor]]", predicted), strict=True)
            features, labels = (processes.cat(torch.cat(part)) for part in parts)
            data = CachedFeatures(features, labels, images.batch_size, seed, processes)
        trainer = run.trainer(self.settings.epochs)
        trainer.fit(probe, datamodule=data, ckpt_path=run.checkpoint, weights_only=True)

    def _check(
        self, data: object, world_size: int, backbone: VisionBackbone, seed: int = 0
    ) -> tuple[ImageShards, ProbeSettings]:
        """The data to train on, and the settings for this backbone."""
        s, me = self.settings, type(self).__name__
        if not isinstance(data, ImageShards):
            raise UserError(f"{me}: expected images with labels, got {type(data).__name__}")
        if s.split == "val" and not data.val_fraction and data.val_split is None:
            raise UserError(
                f"{me}.split val: {type(data).__name__} has no validation split: "
                "hold one out with data.val_fraction > 0, or score split test"
            )
        if s.batch_size % world_size:
            raise UserError(f"{me}.batch_size: expected a multiple of the {world_size} processes, got {s.batch_size}")
        s = s.of(backbone)
        assert s.blocks is not None
        assert s.poolings is not None
        if max(s.blocks) > backbone.num_layers:
            raise UserError(f"{me}.blocks: the backbone has {backbone.num_layers} blocks, got {_show(s.blocks)}")
        if s.poolings != ("avg",) and not has_class_token(backbone):
            raise UserError(f"{me}.poolings: the backbone has no class token, only avg, got {_show(s.poolings)}")
        if len(s.heads) > 1 and not s.select_fraction:
            raise UserError(
                f"{me}.select_fraction: expected more than 0 to choose the best of {len(s.heads)} classifiers, got 0"
            )
        return data.for_evaluation(s.batch_size // world_size, seed, s.select_fraction), s


def _distinct(values: Sequence[Any]) -> bool:
    return len(values) > 0 and len(set(values)) == len(values)


def _show(value: Any) -> str:
    return ", ".join(map(str, value)) or "none" if isinstance(value, tuple | list) else str(value)


class _Probe(pl.LightningModule):
    """Trains the classifiers; ``validate`` scores them, ``predict`` gives features and labels.

    The backbone is no module of it: checkpoints, optimizer and DDP must not see it.
    """

    def __init__(self, features: Features, classifiers: HeadGrid, settings: ProbeSettings) -> None:
        super().__init__()
        self.features = features
        self.classifiers = classifiers
        self.settings = settings
        self.norm = FeatureNorm(len(features.parts), classifiers.dim) if settings.batch_norm else None
        self.scored = HeadScores(len(classifiers.shares), classifiers.num_classes)
        self.scores: dict[str, list[float]] = {}

    def configure_optimizers(self) -> OptimizerLRScheduler:
        s = self.settings
        lr = self.classifiers.lr * s.lr_scale
        optimizer = torch.optim.SGD(self.classifiers.parameters(), lr, momentum=s.momentum)
        cosine = LRSchedule("cosine", warmup_epochs=0, warmup_lr=0.0, min_lr=0.0)
        total = int(self.trainer.estimated_stepping_batches) if s.cosine == "step" else s.epochs
        scheduler = build_scheduler(optimizer, cosine, total=total, warmup=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": s.cosine}}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, labels = batch
        features = inputs if self.settings.cache_features else self.features(inputs)
        if self.norm is not None:
            first = self.global_rank * len(labels)
            whole = cast(Tensor, self.all_gather(features)).reshape(-1, *features.shape[1:])
            features = self.norm(whole.double())[first : first + len(labels)]
        return self.classifiers.loss(features, labels, self.settings.weight_decay)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels, _ = batch
        features = self.features(images)
        if self.norm is not None:
            features = self.norm(features.double())
        self.scored.update(self.classifiers(features), labels)

    def on_validation_epoch_end(self) -> None:
        self.scores = self.scored.compute()
        self.scored.reset()

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        images, labels, _ = batch
        return self.features(images).cpu(), labels.cpu()
