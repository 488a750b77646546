"""Going on under another layout of the data: refused by name, or accepted and recorded."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lapbench.results.record import read_record
from lapbench.tasks import ImageClassification

Command = Callable[..., Any]
SETTINGS = ("--trainer.max_epochs", "3", "--trainer.accumulate_grad_batches", "2")


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the training batches, in order."""
    sizes: list[int] = []
    original = ImageClassification.training_step

    def step(self: ImageClassification, batch: Any, batch_idx: int) -> Any:
        sizes.append(len(batch[0]))
        return original(self, batch, batch_idx)

    monkeypatch.setattr(ImageClassification, "training_step", step)
    return sizes


@pytest.fixture
def interrupted(fit: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[int]) -> Path:
    """A run that was stopped after 18 of its 30 batches of 12: the 8th of 10 in the second epoch."""
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        original = ImageClassification.training_step

        def step(self: ImageClassification, batch: Any, batch_idx: int) -> Any:
            if len(batches) == 16:
                os.kill(os.getpid(), signal.SIGUSR1)
            return original(self, batch, batch_idx)

        patch.setattr(ImageClassification, "training_step", step)
        assert fit(run, *SETTINGS).status == 75
    assert batches == [12] * 18
    batches.clear()
    return run


def test_another_layout_is_refused_by_name(interrupted: Path, fit: Command) -> None:
    outcome = fit(interrupted, *SETTINGS, "--data.batch_size", 24)
    assert outcome.status == 2
    assert outcome.err == (
        f"lapbench: error: run.dir {interrupted} holds a run with data.init_args.batch_size = 12, this one has 24; "
        "give another --run.dir; --allow_layout_change accepts it, at the cost of exactness\n"
    )


def test_what_is_no_layout_is_refused_all_the_same(interrupted: Path, fit: Command) -> None:
    outcome = fit(interrupted, *SETTINGS, "--model.loss", "bce", "--data.batch_size", 24, "--allow_layout_change")
    assert outcome.status == 2
    assert "holds a run with model.init_args.loss = 'ce', this one has 'bce'; give another --run.dir\n" in outcome.err


def test_an_accepted_change_goes_on_from_the_same_share_of_the_epoch(
    interrupted: Path, fit: Command, batches: list[int]
) -> None:
    change = ("--data.batch_size", 24)
    outcome = fit(interrupted, *SETTINGS, *change, "--allow_layout_change")
    assert outcome.status == 0, outcome.err
    # An epoch has 5 batches now: 8 of 10 are 4 of 5.
    assert batches == [24] * (1 + 5)
    record = read_record(interrupted)
    assert record.status == "finished"
    assert record.progress["epoch"] == 3
    (note,) = record.notes["inexact_resumes"]
    assert note == "at step 9: data.init_args.batch_size was 12 and is 24, global_batch_size was 12 and is 24"
    assert yaml.safe_load((interrupted / "config.yaml").read_text())["data"]["init_args"]["batch_size"] == 24
    # The schedule ends where it should: 3 epochs of 3 steps.
    checkpoint = torch.load(interrupted / "checkpoints/last.ckpt", weights_only=True)
    assert checkpoint["lr_schedulers"][0]["last_epoch"] == 9
    assert checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(1e-6)


def test_the_changed_run_is_the_run_from_then_on(
    interrupted: Path, fit: Command, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    change = ("--data.batch_size", 24)
    with monkeypatch.context() as patch:
        patch.setattr(ImageClassification, "test_step", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        assert fit(interrupted, *SETTINGS, *change, "--allow_layout_change").status == 75
    batches.clear()
    assert fit(interrupted, *SETTINGS).status == 2
    assert fit(interrupted, *SETTINGS, *change).status == 0
    assert batches == []
    assert len(read_record(interrupted).notes["inexact_resumes"]) == 1


def test_the_option_alone_changes_nothing(interrupted: Path, fit: Command, batches: list[int]) -> None:
    assert fit(interrupted, *SETTINGS, "--allow_layout_change").status == 0
    assert batches == [12] * 12
    assert read_record(interrupted).notes == {}
