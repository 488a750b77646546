"""Self-supervised pre-training by self-distillation (DINO, arXiv 2104.14294)."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from lapbench.analysis import within_sequence_similarity
from lapbench.backbones import VisionBackbone, VisionSettings, build_vision_backbone
from lapbench.errors import UserError
from lapbench.optim import (
    LRSchedule,
    OptimizerSettings,
    build_optimizer,
    clip_each_grad_norm_,
    cosine,
    set_weight_decay,
)
from lapbench.tasks.dino_head import ProjectedBackbone, ProjectionHead, check_crops
from lapbench.tasks.dino_health import CollapseError, CollapseWarning, collapse, entropy, feature_std, information
from lapbench.tasks.dino_loss import DINOLoss, Temperatures
from lapbench.tasks.metrics import SampleMean
from lapbench.tasks.steps import (
    check_finite,
    is_shown,
    log_step,
    optimizer_steps,
    step_samples,
    window_correction,
    with_schedule,
)

Crops = list[Tensor]


class DINO(pl.LightningModule):
    """A ViT with a head schedule that learns from its own moving average, without labels.

    The student sees all crops of an image, the teacher the global ones; the student learns to give each crop the
    output that the teacher gives to another. Everything goes by optimizer steps: accumulation stretches no schedule,
    and centre and teacher move once for a step.

    Logs train/{loss,loss_epoch,lr,grad_norm,weight_decay,ema,teacher_temperature}, and of the teacher
    train/{teacher_entropy,information,center_norm,feature_std,similarity}: entropy of its outputs and what they tell of
    the images (0 collapsed) in nats, norm of the centre, the spread of its features (1 everywhere, 0 collapsed) and the
    within-sequence similarity of its patch tokens.

    Args:
        backbone: The vision transformer and its head schedule. Drop-path and dropout are the student's alone. Any image
            size is accepted, as position embeddings have to fit crops of several sizes.
        head: The projection head.
        temperatures: Those of student and teacher.
        center_momentum: Momentum of the teacher's centre.
        ema: Momentum of the teacher's weights in the first step; it goes to 1 on half a cosine wave.
        weight_decay_end: Weight decay after the last step, where the optimizer's goes on half a cosine wave; null keeps
            it.
        clip_norm: Largest norm of the gradient of each parameter by itself; null for no clipping.
        stop_on_collapse: Whether a collapse ends the run instead of only being warned of.
        optimizer: Optimizer and peak learning rate.
        lr_schedule: Warm-up and decay.

    Raises:
        UserError: A setting out of range.
    """

    def __init__(
        self,
        backbone: VisionSettings,
        head: ProjectionHead = ProjectionHead(),  # noqa: B008  never mutated; jsonargparse documents dataclass defaults
        temperatures: Temperatures = Temperatures(),  # noqa: B008
        center_momentum: float = 0.9,
        ema: float = 0.996,
        weight_decay_end: float | None = 0.4,
        clip_norm: float | None = 3.0,
        stop_on_collapse: bool = False,
        optimizer: OptimizerSettings = OptimizerSettings(lr=5e-4, lr_batch_size=256, weight_decay=0.04),  # noqa: B008
        lr_schedule: LRSchedule = LRSchedule(warmup_epochs=10),  # noqa: B008
    ) -> None:
        super().__init__()
        head.check()
        temperatures.check()
        for name, value in (("center_momentum", center_momentum), ("ema", ema)):
            if not 0 <= value <= 1:
                raise UserError(f"{name}: expected 0 <= value <= 1, got {value:g}")
        if weight_decay_end is not None and weight_decay_end < 0:
            raise UserError(f"weight_decay_end: expected at least 0 or null, got {weight_decay_end:g}")
        if clip_norm is not None and not clip_norm > 0:
            raise UserError(f"clip_norm: expected a number above 0 or null, got {clip_norm:g}")
        self.settings = replace(backbone, dynamic_img_size=True)
        self.head_settings = head
        self.temperatures = temperatures
        self.ema = ema
        self.weight_decay_end = weight_decay_end
        self.clip_norm = clip_norm
        self.stop_on_collapse = stop_on_collapse
        self.optimizer_settings = optimizer
        self.lr_schedule = lr_schedule
        self.save_hyperparameters(
            {
                "backbone": asdict(self.settings),
                "head": asdict(head),
                "temperatures": asdict(temperatures),
                "center_momentum": center_momentum,
                "ema": ema,
                "weight_decay_end": weight_decay_end,
                "clip_norm": clip_norm,
                "stop_on_collapse": stop_on_collapse,
                "optimizer": asdict(optimizer),
                "lr_schedule": asdict(lr_schedule),
            }
        )
        trained = build_vision_backbone(num_classes=0, **vars(self.settings))
        if not any(True for _ in trained.parameters()):
            raise UserError(f"backbone.name: DINO trains a backbone, {backbone.name} has no parameters")
        self.student = ProjectedBackbone(trained, head)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        # A trial, so that what is wrong with the optimizer is said before a run starts.
        build_optimizer(nn.Linear(1, 1), optimizer, batch_size=1)
        # A copy is not compiled.
        self._teach: Callable[[VisionBackbone, Tensor], tuple[Tensor, Tensor]] = (
            torch.compile(_tokens_and_pooled) if backbone.compile else _tokens_and_pooled
        )
        self.loss = DINOLoss(head.out_dim, temperatures.student, center_momentum)
        self.train_loss = SampleMean()
        self.train_information = SampleMean()
        self.train_feature_std = SampleMean()
        self._total_steps = self._steps_per_epoch = 0
        self._warned = False

    @property
    def backbone(self) -> VisionBackbone:
        """The teacher's, which evaluations read."""
        return self.teacher.backbone

    def forward(self, images: Tensor) -> Tensor:
        """The teacher's features [B, D] of images [B, C, H, W]."""
        features: Tensor = self.teacher.backbone(images)
        return features

    def setup(self, stage: str) -> None:
        """Checks the task against the data and the trainer before anything is computed.

        Raises:
            UserError: No crops, crops whose size does not fit the backbone, or a second kind of clipping.
        """
        if stage != "fit":
            return
        data = getattr(self.trainer, "datamodule", None)
        multicrop = getattr(data, "multicrop", None)
        if data is None or multicrop is None:
            raise UserError(
                f"data.multicrop: DINO learns from several crops of an image, {type(data).__name__} gives none; "
                "set data.multicrop.local_crops, for instance"
            )
        check_crops(self.settings.name, self.student.backbone, data.image_size, multicrop)
        if self.trainer.gradient_clip_val is not None:
            raise UserError(
                "trainer.gradient_clip_val: expected null, as DINO clips each parameter's gradient by itself "
                f"(model.clip_norm), got {self.trainer.gradient_clip_val:g}"
            )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimizer and per-step schedule."""
        optimizer = build_optimizer(
            self.student, self.optimizer_settings, step_samples(self.trainer, self.optimizer_settings)
        )
        return with_schedule(self.trainer, optimizer, self.lr_schedule)

    def on_fit_start(self) -> None:
        """Raises:
        UserError: Weights of half precision, in which a moving average stands still.
        """
        dtype = self.loss.center.dtype
        if torch.finfo(dtype).bits < 32:
            raise UserError(
                f"trainer.precision: the teacher's moving average needs float32 weights, got {dtype}; "
                "expected 32-true, bf16-mixed or 16-mixed"
            )

    def on_train_start(self) -> None:
        """The teacher's backbone drops nothing; its head keeps BatchNorm over the batch, as the student's."""
        self._total_steps, self._steps_per_epoch = optimizer_steps(self.trainer)
        self.teacher.backbone.eval()

    def training_step(self, batch: tuple[Crops, Tensor], batch_idx: int) -> Tensor:
        """One micro-batch.

        Raises:
            NonFiniteLossError: Before the optimizer could spread it to the weights.
        """
        crops, _ = batch
        logits = self.student(crops)
        with torch.no_grad():
            tokens, features = self._teach(self.teacher.backbone, crops[0].flatten(0, 1))
            teacher_logits = self.teacher.head(features).unflatten(0, crops[0].shape[:2])
            targets = self.loss.targets(teacher_logits, self._temperature)
        loss: Tensor = self.loss(logits, targets)
        check_finite(self, loss, batch_idx)
        detached = loss.detach()
        self.train_loss.update(detached, weight=len(logits))
        self.log("train/loss", detached)
        self._examine(targets, features, tokens)
        return loss * window_correction(self.trainer, batch_idx)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Moves the centre and sets the weight decay of this step; logs the step."""
        trainer = self.trainer
        self.loss.move_center(partial(trainer.strategy.reduce, reduce_op="sum"))
        if self.weight_decay_end is not None:
            set_weight_decay(optimizer, self._cosine(self.optimizer_settings.weight_decay, self.weight_decay_end))
        log_step(self, self.student, optimizer)
        if is_shown(trainer):
            self.log("train/weight_decay", float(optimizer.param_groups[0]["weight_decay"]))
            self.log("train/ema", self._cosine(self.ema, 1.0))
            self.log("train/teacher_temperature", self._temperature)
            self.log("train/center_norm", self.loss.center.norm())

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clips the gradient of each parameter by itself, and takes that of a frozen last layer away."""
        if self.clip_norm is not None:
            clip_each_grad_norm_(self.student.parameters(), self.clip_norm)
        if self.current_epoch < self.head_settings.freeze_epochs:
            # Without a gradient there is no weight decay either. Only here: DDP has waited for all of them.
            for parameter in self.student.head.last_layer.parameters():
                parameter.grad = None

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """The student's step, then the teacher's."""
        momentum = self._cosine(self.ema, 1.0)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            teacher: list[Tensor] = list(self.teacher.parameters())
            torch._foreach_lerp_(teacher, list(self.student.parameters()), 1 - momentum)

    def on_train_epoch_end(self) -> None:
        """Logs the epoch's mean loss: here, not at each step, for an epoch that is resumed after its last step.

        Warns of a collapse, once.

        Raises:
            CollapseError: Instead of a warning, on all processes.
        """
        self.log("train/loss_epoch", self.train_loss)
        loss, told, spread = (
            float(m.compute()) for m in (self.train_loss, self.train_information, self.train_feature_std)
        )
        self.train_information.reset()  # Lightning resets what is logged
        self.train_feature_std.reset()
        began = self.trainer.global_step - self._steps_per_epoch
        wrong = collapse(loss, told, spread, self.head_settings.out_dim)
        # Until the warm-up is over, all may look alike because little has been learned.
        if wrong is None or began < self.lr_schedule.warmup(self._steps_per_epoch):
            return
        wrong = f"epoch {self.current_epoch}: {wrong}"
        if self.stop_on_collapse:
            raise CollapseError(wrong)
        if not self._warned and self.trainer.is_global_zero:
            warnings.warn(wrong, CollapseWarning, stacklevel=2)
        self._warned = True

    @property
    def _temperature(self) -> float:
        return self.temperatures.teacher_at(self.trainer.global_step, self._steps_per_epoch)

    def _cosine(self, start: float, end: float) -> float:
        """The value for the optimizer step that is under way."""
        return cosine(self.trainer.global_step, start=start, end=end, total=self._total_steps)

    def _examine(self, targets: Tensor, features: Tensor, tokens: Tensor) -> None:
        """Notes how the teacher is; its tokens only where that is shown."""
        told, spread = information(targets), feature_std(features)
        self.train_information.update(told, weight=len(targets))
        self.train_feature_std.update(spread, weight=len(targets))
        if is_shown(self.trainer):
            self.log("train/teacher_entropy", entropy(targets))
            self.log("train/information", told)
            self.log("train/feature_std", spread)
            patches = tokens[:, self.teacher.backbone.num_prefix_tokens :]
            if patches.size(1) > 1:
                self.log("train/similarity", within_sequence_similarity(patches).mean())


def _tokens_and_pooled(backbone: VisionBackbone, images: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B, T, D] of the last block and what the backbone makes of them, [B, D]: its forward in two parts."""
    tokens: Tensor = backbone.forward_features(images)  # type: ignore[operator]
    pooled: Tensor = backbone.forward_head(tokens)  # type: ignore[operator]
    return tokens, pooled
