"""Segmentation: how well a head labels each pixel from a frozen backbone's tokens."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch

import lapbench.datamodules as datamodules
from lapbench.backbones import VisionBackbone, VisionSettings
from lapbench.datamodules.plan import mixed
from lapbench.datamodules.segmentation import SegmentationFolder
from lapbench.errors import UserError
from lapbench.evaluation.base import Evaluation, FinishedTraining
from lapbench.optim import LRSchedule, OptimizerSettings
from lapbench.tasks.segmentation import Head, Inference, SemanticSegmentation, check_data


@dataclass(frozen=True)
class DataSet:
    """A data set that a head can be trained on: its class in ``datamodules``, its name in the record, its crop."""

    module: str
    title: str
    crop_size: int


DATA = {
    "shapes": DataSet("ShapesSegmentation", "shapes (synthetic)", 64),
    "ade20k": DataSet("ADE20K", "ADE20K", 512),
}


@dataclass(frozen=True)
class SegmentationSettings:
    """The settings of a ``Segmentation``, as its section in the record shows them."""

    data: Literal["shapes", "ade20k"]
    data_dir: str | None
    head: Head
    channels: int
    dropout: float
    epochs: int
    warmup_epochs: float
    batch_size: int
    lr: float
    weight_decay: float
    crop_size: int
    mode: Literal["whole", "slide"]
    stride: int
    num_workers: int


class Segmentation(Evaluation):
    """Trains a segmentation head on the frozen backbone and scores it: NAME/{miou,macc,aacc}.

    The head is trained as ``SemanticSegmentation`` is: AdamW, a linear warm-up from 1e-6, a linear fall to 0. It reads
    a copy of the backbone whose position embeddings are interpolated to the crop. Images are normalised as those that
    the backbone was trained on, where these have as many channels as it takes, else as ImageNet's. A backbone of one
    channel sees grey images. The last state is scored, on the validation split.

    Where the processes share the same global batches, their number does not change the result, but for rounding.

    Args:
        data: What it is trained on: "shapes" is our synthetic data set, made on first use, "ade20k" is ADE20K.
        data_dir: Folder of the data; null takes the data module's own.
        head: "linear" (last block), "linear4" (last four blocks) or "upernet".
        channels: Width of UPerNet.
        dropout: Share of channels dropped before the classifier.
        epochs: Epochs of training. The defaults are for shapes, our choice; ADE20K takes 32 (40 thousand
            steps), a learning rate of 0.001 and warmup_epochs 1.2 (DINOv2, arXiv 2304.07193).
        warmup_epochs: Epochs of the warm-up.
        batch_size: Images in a step of all processes together.
        lr: Peak learning rate.
        weight_decay: Weight decay of matrices.
        crop_size: Side of the training crops and of the windows, a multiple of the patch size; null takes 64 for
            shapes and 512 for ADE20K.
        mode: Whether images are labelled as a "whole", or by a window that "slide"s over them.
        stride: Pixels from one window to the next; null takes two thirds of the window.
        num_workers: Worker processes that load for one process.
        name: Its name in record and tables.

    Raises:
        UserError: A setting out of range, data that are not there, a backbone that the head or the crop does not fit,
            a batch that the processes cannot share.
    """

    def __init__(
        self,
        data: Literal["shapes", "ade20k"] = "shapes",
        data_dir: str | None = None,
        head: Head = "linear",
        channels: int = 512,
        dropout: float = 0.0,
        epochs: int = 8,
        warmup_epochs: float = 1.0,
        batch_size: int = 16,
        lr: float = 3e-3,
        weight_decay: float = 1e-4,
        crop_size: int | None = None,
        mode: Literal["whole", "slide"] = "whole",
        stride: int | None = None,
        num_workers: int = 0,
        name: str = "segmentation",
    ) -> None:
        super().__init__(name)
        crop = DATA[data].crop_size if crop_size is None else crop_size
        step = max(1, crop * 2 // 3) if stride is None else stride
        for setting, value, good, expected in (
            ("epochs", epochs, epochs >= 1, "at least 1"),
            ("warmup_epochs", warmup_epochs, 0 <= warmup_epochs < epochs, f"0 <= value < {epochs} (epochs)"),
            ("batch_size", batch_size, batch_size >= 1, "at least 1"),
            ("lr", lr, lr >= 1e-6, "at least 1e-6"),
            ("weight_decay", weight_decay, weight_decay >= 0, "at least 0"),
            ("crop_size", crop, crop >= 1, "at least 1"),
            ("stride", step, 1 <= step <= crop, f"1..{crop}"),
        ):
            if not good:
                raise UserError(f"{type(self).__name__}.{setting}: expected {expected}, got {value}")
        self.settings = SegmentationSettings(
            data=data,
            data_dir=data_dir,
            head=head,
            channels=channels,
            dropout=dropout,
            epochs=epochs,
            warmup_epochs=warmup_epochs,
            batch_size=batch_size,
            lr=lr,
            weight_decay=weight_decay,
            crop_size=crop,
            mode=mode,
            stride=step,
            num_workers=num_workers,
        )

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Says before training what would only be found out after it."""
        if stage == "fit":
            self.check(pl_module, trainer.datamodule, trainer.world_size)  # type: ignore[attr-defined]

    def check(self, task: pl.LightningModule, data: object, world_size: int) -> None:
        """Builds the model without its weights, and looks for the data.

        Raises:
            UserError: As the class says.
        """
        images = self._images(_settings_of(task, self), world_size, seed=0)
        with torch.device("meta"):
            model = self._model(task, data, images)
        check_data(model, images, world_size, f"{type(self).__name__}.")
        if self.settings.data != "shapes":  # those are made on first use
            images.setup("fit")

    def evaluate(self, run: FinishedTraining) -> dict[str, Any]:
        """Trains and scores the head."""
        seed = mixed(self.name, run.seed)
        images = self._images(_settings_of(run.task, self), run.outer.world_size, seed)
        model = self._model(run.task, run.data, images)
        model.seed = seed
        trained = cast(VisionBackbone, run.task.backbone).state_dict()
        model.backbone.load_state_dict({name: trained[name] for name in model.backbone.state_dict()})
        trainer = run.trainer(self.settings.epochs)
        trainer.fit(model, datamodule=images, ckpt_path=run.checkpoint, weights_only=True)
        (found,) = trainer.validate(model, datamodule=images, verbose=False)
        metrics = {f"{self.name}/{key.removeprefix('val/')}": value for key, value in found.items()}
        return {"metrics": metrics, "data": DATA[self.settings.data].title, "settings": asdict(self.settings)}

    def _images(self, backbone: VisionSettings, world_size: int, seed: int) -> SegmentationFolder:
        settings = self.settings
        if settings.batch_size % world_size:
            raise UserError(
                f"{type(self).__name__}.batch_size: expected a multiple of the {world_size} processes, "
                f"got {settings.batch_size}"
            )
        where: dict[str, Any] = {} if settings.data_dir is None else {"data_dir": settings.data_dir}
        module: type[SegmentationFolder] = getattr(datamodules, DATA[settings.data].module)
        return module(
            batch_size=settings.batch_size // world_size,
            num_workers=settings.num_workers,
            crop_size=settings.crop_size,
            channels=backbone.in_chans,
            seed=seed,
            **where,
        )

    def _model(self, task: pl.LightningModule, data: object, images: SegmentationFolder) -> "_HeadOnFrozen":
        settings, backbone = self.settings, _settings_of(task, self)
        # What the images that it was trained on were normalised by.
        known = getattr(data, "channels", None) == backbone.in_chans
        mean, std = (getattr(data, name, None) if known else None for name in ("mean", "std"))
        return _HeadOnFrozen(
            replace(backbone, pretrained=False, weights=None, compile=False),
            num_classes=images.num_classes,
            head=settings.head,
            channels=settings.channels,
            dropout=settings.dropout,
            inference=Inference(settings.mode, settings.crop_size, settings.stride),
            mean=None if mean is None else list(mean),
            std=None if std is None else list(std),
            optimizer=OptimizerSettings("adamw", lr=settings.lr, weight_decay=settings.weight_decay),
            lr_schedule=LRSchedule("linear", warmup_epochs=settings.warmup_epochs, warmup_lr=1e-6, min_lr=0.0),
        )


class _HeadOnFrozen(SemanticSegmentation):
    """Draws each epoch's dropout from a seed of its own: one that goes on after an epoch repeats what follows."""

    seed: int

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(mixed(self.seed, self.current_epoch, self.global_rank))


def _settings_of(task: pl.LightningModule, evaluation: Evaluation) -> VisionSettings:
    settings = getattr(task, "settings", None)
    if not isinstance(settings, VisionSettings):
        raise UserError(f"{type(evaluation).__name__}: expected a vision backbone, got a run of {type(task).__name__}")
    return settings
