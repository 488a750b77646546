"""Semantic segmentation: a head of mmsegmentation on a vision transformer, frozen or fine-tuned."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from lapbench.backbones import VisionBackbone, VisionSettings, build_vision_backbone
from lapbench.errors import UserError
from lapbench.optim import LRSchedule, OptimizerSettings, build_optimizer
from lapbench.tasks.metrics import SampleMean
from lapbench.tasks.segmentation_scores import IGNORED, SegmentationScores
from lapbench.tasks.steps import check_finite, log_step, step_samples, with_schedule

Head = Literal["linear", "linear4", "upernet"]
Stage = Literal["val", "test"]
Batch = dict[str, list[Any]]


@dataclass
class Inference:
    """How whole images are labelled.

    Args:
        mode: "whole" takes an image at once, "slide" in overlapping windows whose logits are averaged.
        crop_size: Side of the square windows in pixels.
        stride: Pixels from one window to the next.
    """

    mode: Literal["whole", "slide"] = "whole"
    crop_size: int = 512
    stride: int = 341


class SemanticSegmentation(pl.LightningModule):
    """A ViT with a head schedule and a head of mmsegmentation that labels each pixel.

    Logs train/{loss,loss_epoch,aacc,lr,grad_norm} and {val,test}/{miou,macc,aacc}: mean intersection over union and
    mean accuracy of the classes, accuracy of all pixels; fractions, over the labelled pixels of all images at their
    labels' own size. A batch is ``{"inputs": [uint8 [C, H, W], ...], "data_samples": [SegDataSample, ...]}``, and the
    step's loss is the mean over its labelled pixels on all processes, however these share them.

    Images of any size are taken: position embeddings are interpolated, sides padded to whole patches.

    Args:
        backbone: The vision transformer and its head schedule; ``weights`` says what it starts from.
        num_classes: Number of classes; on the command line it comes from the data.
        head: Batch norm and one linear layer on the tokens of the last block ("linear") or of the last four
            ("linear4"), or UPerNet (arXiv 1807.10221) on four blocks at even distances ("upernet").
        channels: Width of UPerNet.
        dropout: Share of channels dropped before the classifier.
        frozen: Whether only the head is trained.
        inference: How whole images are labelled in evaluation.
        mean: Mean of each channel, of values in 0..1; null takes ImageNet's, for grey images their mean.
        std: Standard deviation of each channel, likewise.
        optimizer: Optimizer and peak learning rate.
        lr_schedule: Warm-up and decay.

    Raises:
        UserError: Settings that contradict each other, or mmsegmentation is not installed.
    """

    def __init__(
        self,
        backbone: VisionSettings,
        num_classes: int,
        head: Head = "linear",
        channels: int = 512,
        dropout: float = 0.0,
        frozen: bool = True,
        inference: Inference = Inference(),  # noqa: B008  never mutated; jsonargparse documents dataclass defaults
        mean: list[float] | None = None,
        std: list[float] | None = None,
        optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008
        lr_schedule: LRSchedule = LRSchedule(),  # noqa: B008
    ) -> None:
        from lapbench.tasks.mmseg_model import build_model, patch_size

        super().__init__()
        if num_classes < 2:
            raise UserError(f"num_classes: expected at least 2, got {num_classes}")
        if channels < 1:
            raise UserError(f"channels: expected at least 1, got {channels}")
        if not 0 <= dropout < 1:
            raise UserError(f"dropout: expected 0 <= value < 1, got {dropout}")
        if backbone.compile:
            raise UserError("backbone.compile: segmentation reads tokens inside the model; expected false")
        self.settings = replace(backbone, dynamic_img_size=True)
        self.optimizer_settings = optimizer
        self.lr_schedule = lr_schedule
        self.num_classes = num_classes
        self.head = head
        self.save_hyperparameters(
            {
                "backbone": asdict(backbone),
                "num_classes": num_classes,
                "head": head,
                "channels": channels,
                "dropout": dropout,
                "frozen": frozen,
                "inference": asdict(inference),
                "mean": mean,
                "std": std,
                "optimizer": asdict(optimizer),
                "lr_schedule": asdict(lr_schedule),
            }
        )
        built = build_vision_backbone(
            num_classes=0, **{name: getattr(self.settings, name) for name in self.settings.__dataclass_fields__}
        )
        self.patch_size = max(patch_size(built))
        if inference.mode == "slide":
            check_whole_patches("inference.crop_size", inference.crop_size, self.patch_size)
            if not 0 < inference.stride <= inference.crop_size:
                raise UserError(
                    f"inference.stride: expected 1..{inference.crop_size} (the window), got {inference.stride}"
                )
        self.model = build_model(
            built,
            num_classes=num_classes,
            head=head,
            channels=channels,
            dropout=dropout,
            frozen=frozen,
            inference=inference,
            mean=_of_channels("mean", mean, IMAGENET_DEFAULT_MEAN, backbone.in_chans),
            std=_of_channels("std", std, IMAGENET_DEFAULT_STD, backbone.in_chans),
        )
        # A trial, so that what is wrong with the optimizer is said before a run starts.
        build_optimizer(nn.Linear(1, 1), optimizer, batch_size=1)
        self.train_loss = SampleMean()
        self.val_scores, self.test_scores = SegmentationScores(num_classes), SegmentationScores(num_classes)

    @property
    def backbone(self) -> VisionBackbone:
        """The vision transformer."""
        backbone: VisionBackbone = self.model.backbone.backbone
        return backbone

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
        check_data(self, data, self.trainer.world_size)
        # Images smaller than the crop are padded to it: all processes then have equally many pixels.
        preprocessor = self.model.data_preprocessor
        preprocessor.size, preprocessor.size_divisor = (data.crop_size, data.crop_size), None

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimizer and per-step schedule."""
        optimizer = build_optimizer(
            self.model, self.optimizer_settings, step_samples(self.trainer, self.optimizer_settings)
        )
        return with_schedule(self.trainer, optimizer, self.lr_schedule)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One micro-batch.

        Raises:
            NonFiniteLossError: Before the optimizer could spread it to the weights.
        """
        prepared = self._prepared(batch, training=True)
        losses = self.model.loss(**prepared)
        loss: Tensor = losses["decode.loss_ce"]
        check_finite(self, loss, batch_idx)
        detached = loss.detach()
        self.train_loss.update(detached, weight=len(batch["inputs"]))
        self.log("train/loss", detached)
        self.log("train/aacc", losses["decode.acc_seg"].detach().squeeze() / 100)
        return loss * _share(prepared["data_samples"])

    def on_train_epoch_end(self) -> None:
        """Logs the epoch's mean: here, not at each step, for an epoch that is resumed after its last step."""
        self.log("train/loss_epoch", self.train_loss)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Logs the learning rate and the gradient norm before clipping."""
        log_step(self, self.model, optimizer)

    def on_validation_epoch_start(self) -> None:
        """Forgets what an interrupted validation gathered."""
        self.val_scores.reset()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Counts the pixels of validation images."""
        self._count(batch, self.val_scores)

    def on_validation_epoch_end(self) -> None:
        """Logs the scores of all images."""
        self._log_scores("val", self.val_scores)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Counts the pixels of test images."""
        self._count(batch, self.test_scores)

    def on_test_epoch_end(self) -> None:
        """Logs the scores of all images."""
        self._log_scores("test", self.test_scores)

    def _prepared(self, batch: Batch, training: bool) -> dict[str, Any]:
        """Normalised, padded and stacked images on the model's device, with their samples."""
        preprocessor = self.model.data_preprocessor
        if preprocessor.device != self.device:  # Lightning moves its buffers, and not where it moves batches to
            preprocessor.to(self.device)
        prepared: dict[str, Any] = preprocessor(batch, training)
        return prepared

    def _count(self, batch: Batch, scores: SegmentationScores) -> None:
        # One by one: their sizes differ, and the last bits of a result must not depend on how images fall into batches.
        for image, sample in zip(batch["inputs"], batch["data_samples"], strict=True):
            prepared = self._prepared({"inputs": [image], "data_samples": [sample]}, training=False)
            (found,) = self.model.predict(**prepared)
            scores.update(found.pred_sem_seg.data, found.gt_sem_seg.data)

    def _log_scores(self, stage: Stage, scores: SegmentationScores) -> None:
        found = {f"{stage}/{name}": value for name, value in scores.compute().items()}
        self.log_dict(found, sync_dist=True)  # they are the same on all processes, which Lightning cannot know
        scores.reset()


def check_data(task: SemanticSegmentation, data: Any, world_size: int, where: str = "data.") -> None:
    """UserError if the images and batches of a data module do not fit the task; ``where`` the settings stand."""
    channels = task.settings.in_chans
    if data.channels != channels:
        raise UserError(f"{where}channels: the backbone takes {channels}, {type(data).__name__} gives {data.channels}")
    check_whole_patches(f"{where}crop_size", data.crop_size, task.patch_size)
    if task.head == "upernet" and data.batch_size < 2:
        raise UserError(
            f"{where}batch_size: upernet normalises over at least 2 images on each process, got {data.batch_size}"
        )
    if world_size > 1 and data.eval_batch_size < 2:
        # Some processes would have a batch more than others, and wait for them in it.
        raise UserError(f"{where}eval_batch_size: several processes need at least 2, got {data.eval_batch_size}")


def check_whole_patches(name: str, size: int, patch: int) -> None:
    """UserError if the image size ``size`` is not a multiple of the patch size."""
    if size < patch or size % patch:
        raise UserError(f"{name}: expected a multiple of the patch size {patch}, got {size}")


def _of_channels(name: str, values: list[float] | None, of_imagenet: tuple[float, ...], channels: int) -> list[float]:
    """One value for each channel."""
    if values is None and channels == 1:
        return [sum(of_imagenet) / len(of_imagenet)]
    found = list(of_imagenet) if values is None else values
    if len(found) != channels:
        raise UserError(f"{name}: expected {channels} numbers, one for each channel of the backbone, got {found}")
    return found


def _share(samples: list[Any]) -> Tensor | float:
    """What turns means over the labelled pixels of each process, averaged by DDP, into the mean over all of them."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return 1.0
    labelled = torch.stack([(sample.gt_sem_seg.data != IGNORED).sum() for sample in samples]).sum().double()
    total = labelled.clone()
    dist.all_reduce(total)
    return (labelled * dist.get_world_size() / total.clamp(min=1)).float()
