"""Throughput with validations within an epoch, of images and of tokens, and the share of a device's peak."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lapbench.backbones import build_decoder
from lapbench.results.record import read_record
from lapbench.tasks import ImageClassification
from lapbench.training.throughput import Throughput, bf16_peak, samples_of

Command = Callable[..., Any]


def test_time_counts_before_and_after_a_validation_in_an_epoch(
    tmp_path: Path, fit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def taking(seconds: float, name: str) -> None:
        original = getattr(ImageClassification, name)

        def step(*arguments: Any) -> Any:
            nonlocal now
            now += seconds
            return original(*arguments)

        monkeypatch.setattr(ImageClassification, name, step)

    taking(0.25, "training_step")
    taking(100.0, "validation_step")
    monkeypatch.setattr("lapbench.training.throughput.time", SimpleNamespace(perf_counter=lambda: now))
    outcome = fit(tmp_path, "--trainer.max_epochs", 1, "--trainer.val_check_interval", 2, "--run.test", "none")
    assert outcome.status == 0, outcome.err
    assert read_record(tmp_path).metrics["train/samples_per_second"] == 12 / 0.25
    assert [line.split()[0] for line in outcome.err.splitlines()] == ["training", "step", "epoch", "finished:"]


class Log(SimpleNamespace):
    """A task on some device that notes what is logged."""

    def log(self, name: str, value: float, **_: Any) -> None:
        self.logged[name] = value


def test_tokens_and_the_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = build_decoder("tiny", depth=1, width=8, num_heads=1, vocab_size=5)
    task: Any = Log(backbone=decoder, device=torch.device("cuda", 0), logged={})
    trainer: Any = SimpleNamespace(world_size=2, is_last_batch=False)
    clock = iter([10.0, 12.0])
    monkeypatch.setattr("lapbench.training.throughput.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    throughput = Throughput()
    throughput.on_train_epoch_start(trainer, task)
    for length in (6, 4):
        batch = torch.zeros(3, length, dtype=torch.int64)
        throughput.on_train_batch_end(trainer, task, None, (batch, batch), 0)
    throughput.on_train_epoch_end(trainer, task)
    weights = 4 * 8 * 8 + 2 * 4 * 8 * 8 + 5 * 8  # attention, MLP, head
    flops = sum(2 * 3 * length * (6 * weights + 12 * 8 * length) for length in (6, 4))
    assert task.logged == {
        "train/samples_per_second": 12 / 2,
        "train/tokens_per_second": 60 / 2,
        "train/mfu": pytest.approx(flops / 2 / (2 * 989e12)),
    }


def test_a_device_without_a_known_peak_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X1")
    assert bf16_peak(torch.device("cuda", 0)) is None
    assert bf16_peak(torch.device("cpu")) is None


def test_samples_of_each_kind_of_batch() -> None:
    images = torch.zeros(3, 1, 8, 8)
    assert samples_of((images, torch.zeros(3))) == 3
    assert samples_of(([torch.zeros(3, 2, 1, 8, 8), torch.zeros(3, 6, 1, 4, 4)], torch.zeros(3))) == 3
    assert samples_of({"inputs": [*images], "data_samples": [None] * 3}) == 3
