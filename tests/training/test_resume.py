"""A run that was stopped, however, and started again by the same command ends exactly as one that was not."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lapbench.results.record import read_record
from lapbench.tasks import ImageClassification

Command = Callable[..., Any]
# Everything that draws random numbers or keeps a state of its own.
SETTINGS = (
    *("--trainer.max_epochs", "3"),
    *("--trainer.accumulate_grad_batches", "2"),
    *("--trainer.gradient_clip_val", "1.0"),
    *("--model.mixing", "{mixup: 0.8, cutmix: 1.0}"),
    *("--model.ema_decay", "0.9"),
    *("--model.backbone.drop_path", "0.3"),
    *("--model.backbone.options.proj_drop_rate", "0.1"),
    *(
        "--data.train_transform",
        "{crop: src, padding: 1, hflip: 0.5, color_jitter: 0.3, erase_prob: 0.5, erase_mode: pixel}",
    ),
    *("--data.repeats", "2"),
    *("--run.test", "best"),
)
MOMENTS = ("batch-4", "batch-17", "checkpoint-2", "test-1")


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The uninterrupted run, by number of workers."""
    from lapbench.cli import main

    done: dict[int, Path] = {}

    def run(workers: int) -> Path:
        if workers not in done:
            done[workers] = tmp_path_factory.mktemp("whole") / str(workers)
            command = ["fit", "--config", str(tiny), *SETTINGS, "--data.num_workers", str(workers)]
            assert main([*command, "--run.dir", str(done[workers])]) == 0
        return done[workers]

    return run


def stop_at(monkeypatch: pytest.MonkeyPatch, number: int, action: Callable[[], None]) -> None:
    """Does something in the middle of the batch of that number, counted from 1 over all epochs."""
    original, calls = ImageClassification.training_step, 0

    def step(self: ImageClassification, batch: Any, batch_idx: int) -> Any:
        nonlocal calls
        calls += 1
        loss = original(self, batch, batch_idx)
        if calls == number:
            action()
        return loss

    monkeypatch.setattr(ImageClassification, "training_step", step)


@pytest.mark.parametrize(
    ("number", "workers"), [(signal.SIGTERM, 0), (signal.SIGTERM, 2), (signal.SIGINT, 0)], ids=lambda v: str(int(v))
)
def test_a_signal_ends_a_run_with_75_and_the_same_command_finishes_it(
    number: signal.Signals,
    workers: int,
    tmp_path: Path,
    fit: Command,
    whole: Callable[[int], Path],
    assert_same_run: Callable[[Path, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = whole(workers)
    with monkeypatch.context() as patch:
        stop_at(patch, 17, lambda: os.kill(os.getpid(), number))
        outcome = fit(tmp_path, *SETTINGS, "--data.num_workers", workers)
    assert outcome.status == 75
    assert outcome.err.splitlines()[-1] == f"interrupted; the same command with --run.dir {tmp_path} goes on"
    record = read_record(tmp_path)
    assert (record.status, record.error, record.finished) == ("interrupted", None, None)
    assert record.progress == {"epoch": 1, "max_epochs": 3, "step": 9, "max_steps": 15}
    outcome = fit(tmp_path, *SETTINGS, "--data.num_workers", workers)
    assert outcome.status == 0, outcome.err
    assert outcome.err.splitlines()[0] == f"training in {tmp_path} from its last checkpoint on"
    assert_same_run(reference, tmp_path)
    assert read_record(tmp_path).started == record.started


def test_a_failure_is_recorded_and_the_same_command_goes_on(
    tmp_path: Path,
    fit: Command,
    whole: Callable[[int], Path],
    assert_same_run: Callable[[Path, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA out of\nmemory")

    with monkeypatch.context() as patch:
        stop_at(patch, 24, fail)
        with pytest.raises(RuntimeError, match="CUDA out of"):
            fit(tmp_path, *SETTINGS)
    record = read_record(tmp_path)
    assert (record.status, record.error) == ("failed", "CUDA out of memory")
    assert fit(tmp_path, *SETTINGS).status == 0
    assert_same_run(whole(0), tmp_path)


@pytest.fixture(scope="module")
def killed(tiny: Path, tmp_path_factory: pytest.TempPathFactory, forked: Command) -> Path:
    """Runs killed by SIGKILL at each moment."""
    folder = tmp_path_factory.mktemp("killed")
    script = Path(__file__).with_name("killed_fit.py")
    done = forked(script, ",".join(MOMENTS), folder, "fit", "--config", tiny, *SETTINGS)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_is_finished_by_the_same_command(
    moment: str,
    killed: Path,
    fit: Command,
    whole: Callable[[int], Path],
    assert_same_run: Callable[[Path, Path], None],
) -> None:
    run = killed / moment
    assert read_record(run).status == "running"
    assert (run / "checkpoints/last.ckpt").exists() == (moment != "batch-4")
    assert fit(run, *SETTINGS).status == 0
    assert_same_run(whole(0), run)
