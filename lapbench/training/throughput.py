"""Training throughput."""

import time
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import STEP_OUTPUT

from lapbench.backbones import Decoder

# Dense bfloat16 matrix products in operations per second, by what torch calls the device: NVIDIA's data sheets.
BF16_PEAK = {
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA A10": 125e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
    "NVIDIA GeForce RTX 3090": 71e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
}


class Work(NamedTuple):
    """What was done by all devices together; tokens and operations are a language model's."""

    samples: int = 0
    tokens: int = 0
    flops: float = 0.0


class Throughput(pl.Callback):
    """Training samples per second over all devices, waiting for data included, validation and checkpoints excluded.

    Logs train/samples_per_second after each epoch; for decoders also train/tokens_per_second and, where the device's
    peak is known, train/mfu: the share of its bfloat16 peak that the model's operations make up (recomputed ones do not
    count; PaLM, arXiv 2204.02311, appendix B). The number for the record leaves out the first epoch of this process,
    which starts workers and compiles, unless it is the only one.
    """

    def __init__(self) -> None:
        self._epochs: list[tuple[int, float]] = []
        self._work = Work()
        self._seconds = 0.0
        self._since: float | None = None

    @property
    def samples_per_second(self) -> float | None:
        """Mean over the epochs of this process; None before the first one ends."""
        counted = self._epochs[1:] or self._epochs
        return sum(n for n, _ in counted) / sum(s for _, s in counted) if counted else None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # An epoch that is resumed in its middle has no other beginning.
        self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._work, self._seconds, self._since = Work(), 0.0, time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
    ) -> None:
        done, world = self._work, trainer.world_size
        samples, tokens, flops = samples_of(batch) * world, 0, 0.0
        if isinstance(pl_module.backbone, Decoder):
            tokens = batch[0].numel() * world
            flops = pl_module.backbone.flops_per_token(batch[0].size(1)) * tokens
        self._work = Work(done.samples + samples, done.tokens + tokens, done.flops + flops)
        if trainer.is_last_batch:
            self._pause(pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # Its stage is still that of the validation.
        if trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking and not trainer.is_last_batch:
            self._since = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(pl_module)
        work = self._work
        if not work.samples:
            return
        self._epochs.append((work.samples, self._seconds))
        pl_module.log("train/samples_per_second", work.samples / self._seconds, rank_zero_only=True)
        if work.tokens:
            pl_module.log("train/tokens_per_second", work.tokens / self._seconds, rank_zero_only=True)
        peak = bf16_peak(pl_module.device)
        if work.flops and peak is not None:
            pl_module.log("train/mfu", work.flops / self._seconds / (peak * trainer.world_size), rank_zero_only=True)

    def _pause(self, pl_module: pl.LightningModule) -> None:
        if self._since is None:
            return
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        self._seconds += time.perf_counter() - self._since
        self._since = None


def samples_of(batch: Any) -> int:
    """Samples of a training batch.

    Args:
        batch: (images [B, ...], ...), (crops of each resolution [[B, V, ...], ...], ...) or {"inputs": B images, ...}.
    """
    if isinstance(batch, dict):
        return len(batch["inputs"])
    images = batch[0]
    return len(images[0] if isinstance(images, list) else images)


def bf16_peak(device: torch.device) -> float | None:
    """Operations per second of one device at its best; None where nobody has entered them."""
    return BF16_PEAK.get(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
