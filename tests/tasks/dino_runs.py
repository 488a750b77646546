"""A tiny DINO, crops for it, a trainer, and the published algorithm written plainly."""

import copy
import math
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lapbench.backbones import VisionSettings
from lapbench.optim import LRSchedule, OptimizerSettings
from lapbench.tasks import DINO
from lapbench.tasks.dino_head import ProjectionHead
from lapbench.tasks.dino_loss import Temperatures

K, PEAK, FREEZE = 24, 0.01, 1
EPS = 1e-3  # the gradient of the keys' biases is nothing but rounding, which Adam would blow up
# So many prototypes in so few dimensions: DINO's own temperatures would make all outputs certain.
WARM = Temperatures(student=0.5, teacher=0.2, teacher_start=0.3, warmup_epochs=1.5)
HEAD = ProjectionHead(out_dim=K, hidden_dim=12, bottleneck_dim=8, freeze_epochs=FREEZE)


def task(head: ProjectionHead = HEAD, *, drop_path: float = 0.0, **settings: Any) -> DINO:
    """A tiny ViT on 8 x 8 grey images, always with the same first weights."""
    torch.manual_seed(0)
    backbone = VisionSettings(
        "vit_tiny_patch16_224",
        heads=1,
        img_size=8,
        patch_size=4,
        in_chans=1,
        drop_path=drop_path,
        options={"embed_dim": 8, "depth": 2, "num_heads": 2},
    )
    settings.setdefault("temperatures", WARM)
    settings.setdefault("optimizer", OptimizerSettings(lr=PEAK, weight_decay=0.04, options={"eps": EPS}))
    settings.setdefault("lr_schedule", LRSchedule(warmup_epochs=0.5, warmup_lr=0.0, min_lr=1e-4))
    return DINO(backbone, head, **settings)


class Views(Dataset[Any]):
    """Random crops: two large and three small ones of each image."""

    def __init__(self, images: int) -> None:
        generator = torch.Generator().manual_seed(1)
        # A few levels that differ between images, so that there is something to tell them apart by.
        base = 2 * torch.randn(images, 1, 1, 1, 1, generator=generator)
        self.large = base + torch.randn(images, 2, 1, 8, 8, generator=generator)
        self.small = base + torch.randn(images, 3, 1, 4, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.large)

    def __getitem__(self, i: int) -> Any:
        return [self.large[i], self.small[i]], 0


class Crops(pl.LightningDataModule):
    """The same ``count`` batches of ``batch_size`` images in each epoch."""

    image_size = 8

    def __init__(self, count: int, batch_size: int = 3) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.views = Views(count * batch_size)
        self.multicrop = SimpleNamespace(global_crops=2, local_crops=3, local_size=4)

    def train_dataloader(self) -> Any:
        return DataLoader(self.views, self.batch_size)

    def batches(self) -> list[list[Tensor]]:
        return [crops for crops, _ in self.train_dataloader()]


def trainer(**settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        **{
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 1,
            **settings,
        },
    )


class Steps(pl.Callback):
    """What is logged and what the centre is after each micro-batch."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.centers: list[Tensor] = []
        self.teachers: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *arguments: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.centers.append(pl_module.loss.center.clone())
        self.teachers.append(nn.utils.parameters_to_vector(pl_module.teacher.parameters()))


def published_loss(student: list[Tensor], teacher: list[Tensor], center: Tensor, temperature: float) -> Tensor:
    """Of the outputs [B, K] for each crop, pair by pair."""
    terms = []
    for i, t in enumerate(teacher):
        q = torch.exp(F.log_softmax((t - center) / temperature, dim=-1)).detach()
        for j, s in enumerate(student):
            if i != j:
                p = torch.exp(s / WARM.student) / torch.exp(s / WARM.student).sum(-1, keepdim=True)
                terms.append(-(q * torch.log(p)).sum(-1))
    return torch.stack(terms).mean()


def published(model: DINO, windows: list[list[list[Tensor]]], windows_per_epoch: int) -> dict[str, list[Any]]:
    """Trains ``model``'s student and teacher as published, one crop at a time; a window is an optimizer step."""
    student, teacher, total = model.student, model.teacher, len(windows)
    center, momentum_start = torch.zeros(K), model.ema
    matrices = [p for n, p in student.named_parameters() if p.ndim > 1 and p.requires_grad and not special(n)]
    others = [p for n, p in student.named_parameters() if p.requires_grad and (p.ndim <= 1 or special(n))]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], eps=EPS)
    out: dict[str, list[Any]] = {"loss": [], "center": [], "norm": []}
    for step, window in enumerate(windows):
        warmup = round(0.5 * windows_per_epoch)
        wave = (1 + math.cos(math.pi * (step - warmup) / (total - warmup))) / 2
        for group in optimizer.param_groups:
            group["lr"] = PEAK * step / warmup if step < warmup else 1e-4 + (PEAK - 1e-4) * wave
        rising = (1 - math.cos(math.pi * step / total)) / 2
        optimizer.param_groups[0]["weight_decay"] = 0.04 + (0.4 - 0.04) * rising
        temperature = 0.3 - 0.1 * min(1.0, step / (1.5 * windows_per_epoch))
        student.zero_grad()
        outputs = []
        for large, small in window:
            with torch.no_grad():
                teacher_outputs = [teacher.head(teacher.backbone(large[:, v])) for v in range(large.size(1))]
            crops = [large[:, v] for v in range(large.size(1))] + [small[:, v] for v in range(small.size(1))]
            student_outputs = [student.head(student.backbone(crop)) for crop in crops]
            loss = published_loss(student_outputs, teacher_outputs, center, temperature)
            (loss / len(window)).backward()
            out["loss"].append(loss.item())
            outputs += teacher_outputs
        center = 0.9 * center + 0.1 * torch.cat(outputs).mean(dim=0)
        gradients = [p.grad for p in student.parameters() if p.grad is not None]
        out["norm"].append(torch.stack([g.norm() for g in gradients]).norm().item())
        for parameter in student.parameters():
            if parameter.grad is not None and model.clip_norm is not None:
                nn.utils.clip_grad_norm_([parameter], model.clip_norm)
        if step // windows_per_epoch < FREEZE:
            student.head.last_layer.direction.grad = None
        optimizer.step()
        momentum = 1 - (1 - momentum_start) * (math.cos(math.pi * step / total) + 1) / 2
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                t.copy_(momentum * t + (1 - momentum) * s)
        out["center"].append(copy.deepcopy(center))
    return out


def special(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in ("cls_token", "pos_embed")
