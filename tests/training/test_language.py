"""A real run of language modelling on the embedded documents: by epochs and by steps, stopped and gone on with."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lapbench.cli import main
from lapbench.results.record import read_record
from lapbench.tasks import LanguageModeling

Command = Callable[..., Any]
CONFIG: dict[str, Any] = {
    "seed_everything": 0,
    "trainer": {"accelerator": "cpu", "gradient_clip_val": 1.0, "log_every_n_steps": 3, "accumulate_grad_batches": 2},
    "model": {
        "class_path": "lapbench.tasks.LanguageModeling",
        "init_args": {
            "backbone": {"name": "tiny", "heads": "1L+1TS", "depth": 2, "width": 32, "num_heads": 2, "context": 64},
            "vocab_size": 320,
            "muon": {"momentum_warmup": 5},
            "lr_schedule": {"name": "trapezoid", "warmup_steps": 2, "warmdown": 0.5},
            "sample_prompts": ["The import statement"],
            "sample_tokens": 4,
        },
    },
    "data": {
        "class_path": "lapbench.datamodules.PyDocs",
        "init_args": {"vocab_size": 320, "context": 32, "batch_size": 4, "eval_batch_size": 64},
    },
    "run": {"monitor": "val/bits_per_byte", "monitor_mode": "min", "test": "best"},
}
# Lengths of training in optimizer steps, and where it is stopped: in micro-batches, two to a step.
LENGTHS = {
    "epochs": (("--trainer.max_epochs", "3", "--trainer.limit_train_batches", "8"), 12, (3, 11)),
    "steps over epochs": (("--trainer.max_steps", "11", "--trainer.limit_train_batches", "8"), 11, (13,)),
    # In the middle of an epoch, validation after every third step.
    "steps within an epoch": (("--trainer.max_steps", "9", "--trainer.val_check_interval", "6"), 9, (5, 13)),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config, its data made."""
    from lapbench.datamodules import PyDocs

    folder = tmp_path_factory.mktemp("language")
    PyDocs(str(folder / "data"), vocab_size=320).prepare_data()
    init = {**CONFIG["data"]["init_args"], "data_dir": str(folder / "data")}
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump({**CONFIG, "data": {**CONFIG["data"], "init_args": init}}))
    return file


@pytest.fixture(scope="module")
def whole(config: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The uninterrupted run of a length."""
    done: dict[str, Path] = {}

    def run(length: str) -> Path:
        if length not in done:
            done[length] = tmp_path_factory.mktemp("whole")
            command = ["fit", "--config", str(config), *LENGTHS[length][0], "--run.dir", str(done[length])]
            assert main(command) == 0
        return done[length]

    return run


def stop_at(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """A signal in the middle of the micro-batch of that number, counted from 1."""
    original, calls = LanguageModeling.training_step, 0

    def step(self: LanguageModeling, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == batch:
            os.kill(os.getpid(), signal.SIGUSR1)
        return original(self, *arguments)

    monkeypatch.setattr(LanguageModeling, "training_step", step)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_run_of_any_length_records_its_steps(
    length: str, whole: Callable[[str], Path], scalars: Callable[[Path], dict[str, dict[int, float]]]
) -> None:
    run = whole(length)
    steps = LENGTHS[length][1]
    record = read_record(run)
    assert (record.status, record.task, record.data) == ("finished", "LanguageModeling", "PyDocs")
    assert (record.backbone, record.schedule) == ("tiny", "1L+1TS")
    assert (record.progress["step"], record.progress["max_steps"]) == (steps, steps)
    assert {
        *("train/loss", "train/lr", "train/grad_norm", "train/samples_per_second", "train/tokens_per_second"),
        *("val/loss", "val/bits_per_byte", "test/loss", "test/bits_per_byte"),
    } == record.metrics.keys()
    assert record.metrics["train/tokens_per_second"] == pytest.approx(32 * record.metrics["train/samples_per_second"])
    # PyDocs tests on its validation split.
    assert record.metrics["test/bits_per_byte"] == pytest.approx(record.metrics["val/bits_per_byte"])
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    assert last["global_step"] == steps
    assert last["lr_schedulers"][0]["last_epoch"] == steps
    assert last["lr_schedulers"][0]["_last_lr"] == [0.0] * 4  # the warm-down ends with the run
    logged = scalars(run / "tensorboard")
    assert {2, 5, 8} <= logged["train/grad_norm"].keys() == logged["train/loss"].keys()
    assert logged["train/lr"][2] == pytest.approx(0.02)


@pytest.mark.parametrize(("length", "batch"), [(k, batch) for k, v in LENGTHS.items() for batch in v[2]])
def test_a_stopped_run_ends_as_one_that_was_not(
    length: str,
    batch: int,
    config: Path,
    tmp_path: Path,
    lapbench: Command,
    whole: Callable[[str], Path],
    assert_same_run: Callable[[Path, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = ("fit", "--config", config, *LENGTHS[length][0], "--run.dir", tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, batch)
        outcome = lapbench(*command)
    assert outcome.status == 75, outcome.err
    assert read_record(tmp_path).progress["step"] == (batch + 1) // 2
    outcome = lapbench(*command)
    assert outcome.status == 0, outcome.err
    assert_same_run(whole(length), tmp_path)
