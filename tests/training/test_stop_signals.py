"""What the first and the second stop signal do, and which checkpoint a run goes on from."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy

from lapbench.results.record import read_record
from lapbench.tasks import ImageClassification
from lapbench.training import parser
from lapbench.training.stop_signals import Interrupted, StopSignals

Command = Callable[..., Any]
STOP = [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]


@pytest.mark.parametrize("number", STOP, ids=lambda number: number.name)
def test_outside_of_training_a_signal_acts_at_once(number: signal.Signals) -> None:
    StopSignals().install()
    with pytest.raises(Interrupted) as caught:
        os.kill(os.getpid(), number)
    assert caught.value.code == 75
    assert not caught.value.together


@pytest.mark.parametrize("number", STOP, ids=lambda number: number.name)
def test_while_training_the_first_is_noted_and_the_second_acts(number: signal.Signals) -> None:
    signals = StopSignals()
    signals.install()
    signals.deferring = True
    os.kill(os.getpid(), number)
    assert signals.noted
    with pytest.raises(Interrupted):
        os.kill(os.getpid(), number)


def at_batch(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Acts in the middle of the training batch of that number, counted from 1."""
    original, calls = ImageClassification.training_step, 0

    def step(self: ImageClassification, batch: Any, batch_idx: int) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            action()
        return original(self, batch, batch_idx)

    monkeypatch.setattr(ImageClassification, "training_step", step)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def batches_done(run: Path) -> int:
    loops = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["loops"]["fit_loop"]
    done: int = loops["epoch_loop.batch_progress"]["total"]["completed"]
    return done


@pytest.mark.parametrize(
    ("signal_at", "saved_after"),
    [(1, 3), (3, 3), (4, 6), (9, 9), (10, 10), (11, 13)],
    ids=str,
)
def test_a_signal_saves_at_the_end_of_the_step_or_epoch(
    signal_at: int, saved_after: int, tmp_path: Path, fit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 10 batches an epoch in windows of 3: steps end after 3, 6, 9 and 10, and the last of an epoch saves with it.
    accumulation = ("--trainer.accumulate_grad_batches", 3)
    with monkeypatch.context() as patch:
        at_batch(patch, signal_at, stop)
        assert fit(tmp_path, *accumulation).status == 75
    assert batches_done(tmp_path) == saved_after
    assert read_record(tmp_path).status == "interrupted"


def test_checkpoints_every_n_steps(tmp_path: Path, fit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(Exception):
        pass

    def die() -> None:
        raise Killed

    at_batch(monkeypatch, 18, die)
    with pytest.raises(Killed):
        fit(tmp_path, "--run.save_every_n_steps", 3)
    assert batches_done(tmp_path) == 15  # 17 steps were done


class SaveInValidation(pl.Callback):
    """Writes last.ckpt in the middle of a validation, and ends the run there."""

    def __init__(self, file: Path, epoch: int) -> None:
        self.file = file
        self.epoch = epoch

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.state.fn == "fit":
            trainer.save_checkpoint(self.file)
            raise Interrupted(together=False)


@pytest.mark.parametrize("every", [1.0, 0.5])
def test_a_checkpoint_of_the_middle_of_validation_is_exact(
    every: float,
    tmp_path: Path,
    fit: Command,
    monkeypatch: pytest.MonkeyPatch,
    assert_same_run: Callable[[Path, Path], None],
) -> None:
    settings = ("--model.ema_decay", 0.9, "--run.test", "best", "--trainer.val_check_interval", every)
    assert fit(tmp_path / "whole", *settings).status == 0
    original, cut = parser.fit_callbacks, SaveInValidation(tmp_path / "cut/checkpoints/last.ckpt", epoch=1)
    with monkeypatch.context() as patch:
        patch.setattr(parser, "fit_callbacks", lambda *arguments: [*original(*arguments), cut])
        assert fit(tmp_path / "cut", *settings).status == 75
    assert fit(tmp_path / "cut", *settings).status == 0
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def test_a_loss_that_is_not_finite_elsewhere_stops_this_process_too(
    tmp_path: Path, fit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SingleDeviceStrategy, "reduce_boolean_decision", lambda self, decision, all=True: False)
    outcome = fit(tmp_path)
    assert outcome.status == 2
    assert "train/loss is not finite on another process at optimizer step 0, epoch 0, batch 0" in outcome.err


def test_slurm_does_not_requeue_by_itself(tmp_path: Path, fit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NTASKS": "1", "JOB_ID": "1", "PROCID": "0", "LOCALID": "0", "NODEID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_NODELIST", "localhost")
    seen: list[tuple[str, bool]] = []

    def look(self: pl.Trainer, *arguments: Any, **settings: Any) -> None:
        environment = self._accelerator_connector.cluster_environment
        seen.append((type(environment).__name__, environment.auto_requeue))
        raise Interrupted(together=False)

    monkeypatch.setattr(pl.Trainer, "fit", look)
    assert fit(tmp_path).status == 75
    assert seen == [("SLURMEnvironment", False)]


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_that_would_run_code_is_refused(finished: Path, tmp_path: Path, lapbench: Command) -> None:
    canary, config = tmp_path / "canary", finished / "config.yaml"
    checkpoint = torch.load(finished / "checkpoints/last.ckpt", weights_only=True)
    torch.save({**checkpoint, "extra": Canary(canary)}, finished / "checkpoints/last.ckpt")
    (finished / "record.json").unlink()
    for arguments in (("fit",), ("test",), ("predict",), ("validate", "--ckpt_path", "last")):
        outcome = lapbench(*arguments, "--config", config, "--run.dir", finished)
        assert outcome.status == 2
        assert "last.ckpt: not one, or damaged (it holds more than plain tensors)" in outcome.err.splitlines()[-1]
    assert not canary.exists()
