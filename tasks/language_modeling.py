"""Language modelling: pre-training, mid-training and fine-tuning of a decoder, by the data that it is given."""

from dataclasses import asdict
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F

from lapbench.backbones import DecoderSettings, build_decoder
from lapbench.backbones.decoder import load_decoder_weights
from lapbench.backbones.generation import generate
from lapbench.datamodules.text import IGNORED
from lapbench.errors import UserError
from lapbench.optim import LRSchedule, MuonSettings, OptimizerSettings, build_muon, build_optimizer, set_momentum
from lapbench.tasks.initial_weights import checkpoint_of
from lapbench.tasks.metrics import BitsPerByte, SampleMean
from lapbench.tasks.steps import check_finite, log_step, with_schedule

Stage = Literal["val", "test"]
SAMPLE_TOP_K = 50


class LanguageModeling(pl.LightningModule):
    """A decoder with a head schedule that predicts the next token.

    Logs train/{loss,lr,grad_norm} and {val,test}/{loss,bits_per_byte}. Losses are means over predicted tokens, in nats:
    each token of an optimizer step weighs the same, whichever micro-batch or process it is in.

    Batches are (inputs [B, T] int64, targets [B, T] int64), with targets of -100 where nothing is to be predicted.

    Args:
        backbone: The decoder and its head schedule.
        vocab_size: Number of tokens; that of the data.
        optimizer: Optimizer and peak learning rate, for all parameters alike.
        muon: Muon for the matrices of blocks and AdamW for the rest, in place of ``optimizer``.
        lr_schedule: Warm-up and decay.
        init_from: Run (its folder) or checkpoint whose weights training starts from. A run that is resumed does not
            read it again.
        sample_prompts: Texts that the model continues after each validation, for TensorBoard.
        sample_tokens: New tokens of each sample.

    Raises:
        UserError: Settings that contradict each other.
    """

    step_sums: Tensor
    token_bytes: Tensor

    def __init__(
        self,
        backbone: DecoderSettings,
        vocab_size: int,
        optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008  never mutated; jsonargparse documents it
        muon: MuonSettings | None = None,
        lr_schedule: LRSchedule = LRSchedule("trapezoid", warmup_epochs=0),  # noqa: B008
        init_from: str | None = None,
        sample_prompts: list[str] | None = None,
        sample_tokens: int = 64,
    ) -> None:
        super().__init__()
        if muon is not None and optimizer != OptimizerSettings():
            raise UserError("optimizer, muon: expected one of them, got both")
        if sample_tokens < 1:
            raise UserError(f"sample_tokens: expected at least 1, got {sample_tokens}")
        self.settings = backbone
        self.optimizer_settings = optimizer
        self.muon_settings = muon
        self.lr_schedule = lr_schedule
        self.init_from = init_from
        self.sample_prompts = sample_prompts or []
        self.sample_tokens = sample_tokens
        self.save_hyperparameters(
            {
                "backbone": asdict(backbone),
                "vocab_size": vocab_size,
                "optimizer": asdict(optimizer),
                "muon": None if muon is None else asdict(muon),
                "lr_schedule": asdict(lr_schedule),
                "init_from": init_from,
                "sample_prompts": self.sample_prompts,
                "sample_tokens": sample_tokens,
            }
        )
        self.backbone = build_decoder(vocab_size=vocab_size, **vars(backbone))
        # A trial, so that what is wrong with the optimizer is said before a run starts.
        if muon is None:
            build_optimizer(nn.Linear(1, 1), optimizer, batch_size=1)
        else:
            build_muon(self.backbone, muon)
        self.val_loss, self.test_loss = SampleMean(), SampleMean()
        self.val_bits, self.test_bits = BitsPerByte(), BitsPerByte()
        # Sums over the optimizer step that is under way: losses in nats, predicted tokens. Not in checkpoints, which
        # are written after whole steps only.
        self.register_buffer("step_sums", torch.zeros(2, dtype=torch.float64), persistent=False)
        self.register_buffer("token_bytes", torch.zeros(vocab_size, dtype=torch.int64), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [B, T, V] of the tokens that follow ``tokens`` [B, T]."""
        logits: Tensor = self.backbone(tokens)
        return logits

    def setup(self, stage: str) -> None:
        """Checks the task against the data before anything is computed.

        Raises:
            UserError: Another vocabulary, or windows longer than the model's context.
        """
        data = getattr(self.trainer, "datamodule", None)
        if data is None:
            raise UserError("data: language modelling needs a DataModule, which says what its tokens are")
        name = type(data).__name__
        if data.vocab_size != self.backbone.vocab_size:
            raise UserError(
                f"model.vocab_size: the model has {self.backbone.vocab_size} tokens, the data set {name} has "
                f"{data.vocab_size}"
            )
        if data.context > self.backbone.context:
            raise UserError(
                f"data.context: expected at most {self.backbone.context} (the model's context), got {data.context}"
            )
        self.token_bytes.copy_(torch.as_tensor(data.token_bytes))
        self._prompts = [[data.tokenizer.bos, *data.tokenizer.encode(text)] for text in self.sample_prompts]
        for text, prompt in zip(self.sample_prompts, self._prompts, strict=True):
            if len(prompt) >= self.backbone.context:
                raise UserError(
                    f"sample_prompts: expected at most {self.backbone.context - 2} tokens, got {len(prompt) - 1} in "
                    f"{text!r:.60}"
                )

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Optimizer and per-step schedule."""
        trainer = self.trainer
        if self.muon_settings is not None:
            return with_schedule(trainer, build_muon(self.backbone, self.muon_settings), self.lr_schedule)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        batch = data.batch_size * trainer.world_size * trainer.accumulate_grad_batches
        return with_schedule(trainer, build_optimizer(self.backbone, self.optimizer_settings, batch), self.lr_schedule)

    def on_fit_start(self) -> None:
        """Takes over the weights of ``init_from``, unless the run goes on from a checkpoint of its own.

        Raises:
            UserError: No such run or checkpoint, or one of another model.
        """
        if self.init_from is not None and self.trainer.ckpt_path is None:
            load_decoder_weights(self.backbone, checkpoint_of(self.init_from))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The sum of the losses of a micro-batch; how many the whole step has is known only when it ends."""
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        self.step_sums += torch.stack((loss.detach(), (targets != IGNORED).sum()))
        # By a constant, that float16 can hold the gradients.
        return loss / self.backbone.context

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the gradient that of the mean over all tokens of the step, before it is clipped; logs the step.

        Raises:
            NonFiniteLossError: Before the optimizer could spread it to the weights.
        """
        trainer = self.trainer
        losses, tokens = trainer.strategy.reduce(self.step_sums.clone(), reduce_op="sum")
        self.step_sums.zero_()
        tokens = tokens.clamp(min=1)
        mean = losses / tokens
        check_finite(self, mean, trainer.fit_loop.batch_idx)
        self.log("train/loss", mean)
        # Undoes Lightning's mean over micro-batches, that over processes, and the division in training_step.
        factor = self.backbone.context * trainer.accumulate_grad_batches * trainer.world_size / tokens
        for parameter in self.backbone.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        log_step(self, self.backbone, optimizer)
        if self.muon_settings is not None:
            set_momentum(optimizer, self.muon_settings, trainer.global_step)

    def on_validation_epoch_start(self) -> None:
        """Forgets what an interrupted validation gathered."""
        self.val_loss.reset()
        self.val_bits.reset()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and bits per byte of a validation batch."""
        self._evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Loss and bits per byte of a test batch."""
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        """Writes the samples to TensorBoard; they draw from generators of their own, never from the training's."""
        trainer = self.trainer
        boards = [logger for logger in self.loggers if isinstance(logger, TensorBoardLogger)]
        if not (self.sample_prompts and boards and trainer.is_global_zero) or trainer.sanity_checking:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        with trainer.precision_plugin.forward_context():
            samples = generate(
                self.backbone,
                self._prompts,
                max_new_tokens=self.sample_tokens,
                top_k=min(SAMPLE_TOP_K, self.backbone.vocab_size),
                stop_tokens=(data.tokenizer.bos,),
                seeds=range(len(self._prompts)),
            )
        for i, (text, tokens) in enumerate(zip(self.sample_prompts, samples, strict=True)):
            for board in boards:
                board.experiment.add_text(
                    f"val/sample_{i}", f"**{text}**{data.tokenizer.decode(tokens)}", trainer.global_step
                )

    def _evaluate(self, batch: tuple[Tensor, Tensor], stage: Stage) -> None:
        inputs, targets = batch
        targets = targets.flatten()
        logits = self._evaluated(inputs).flatten(0, 1)
        losses = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")
        predicted = targets != IGNORED
        losses, targets = losses[predicted], targets[predicted]
        loss, bits = getattr(self, f"{stage}_loss"), getattr(self, f"{stage}_bits")
        loss.update(losses)
        bits.update(losses, self.token_bytes[targets])
        self.log(f"{stage}/loss", loss, on_step=False, on_epoch=True)
        self.log(f"{stage}/bits_per_byte", bits, on_step=False, on_epoch=True)

    def _evaluated(self, inputs: Tensor) -> Tensor:
        """Logits [B, T, V] of evaluation windows, in float32; batches all go through at one size, as for images."""
        full: int = self.trainer.datamodule.eval_batch_size  # type: ignore[attr-defined]
        padded = F.pad(inputs, (0, 0, 0, full - len(inputs)))
        logits: Tensor = self(padded)
        return logits[: len(inputs)].float()
