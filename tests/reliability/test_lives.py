"""A run that is ended at many random moments and started again each time is, to the bit, the one never disturbed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LIVES = int(os.environ.get("LAPBENCH_LIVES", "8"))
MODELS = {"layer norm": "vit_tiny_patch16_224", "batch norm": "vit_with_batch_norm"}
# Everything that draws random numbers or keeps a state of its own. A life is ended after 6 batches at most, unless it
# is ended by the clock; an epoch has 12 batches, 6 steps and 2 validations of 3 batches.
SETTINGS = (
    *("--trainer.max_epochs", str(2 + LIVES * 7 // 10)),
    *("--trainer.limit_train_batches", "12"),
    *("--trainer.val_check_interval", "0.5"),
    *("--trainer.accumulate_grad_batches", "2"),
    *("--trainer.gradient_clip_val", "1.0"),
    *("--model.mixing", "{mixup: 0.8, cutmix: 1.0}"),
    *("--model.ema_decay", "0.9"),
    *("--model.backbone.drop_path", "0.3"),
    *("--data.train_transform", "{crop: src, padding: 1, hflip: 0.5, color_jitter: 0.3, erase_prob: 0.5}"),
    *("--data.num_workers", "2"),
    *("--run.test", "best"),
    *("--run.save_every_n_steps", "1"),
)
# The same global batch on any number of processes.
PROCESSES = {
    1: ("--data.batch_size", "8"),
    2: ("--data.batch_size", "4", "--trainer.devices", "2", "--trainer.strategy", "ddp"),
}


@pytest.fixture(scope="module")
def live(tiny: Path, tmp_path_factory: pytest.TempPathFactory, forked: Callable[..., Any]) -> Callable[..., Path]:
    """Trains a run in lives that are ended by a signal; returns its folder."""

    def run(signals: str, processes: int, model: str) -> Path:
        folder = tmp_path_factory.mktemp("lives")
        script = Path(__file__).with_name("lives.py")
        lives = [signals, str(LIVES), str(processes), "0", str(folder / "log")]
        fit = ["fit", "--config", str(tiny), *SETTINGS, *PROCESSES[processes], "--run.dir", str(folder / "run")]
        name = ("--model.backbone.name", MODELS[model])
        done = forked(script, *lives, *fit, *name, timeout=60 + 30 * LIVES)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) == (0 if signals == "NONE" else LIVES)
        return folder / "run"

    return run


@pytest.fixture(scope="module")
def whole(live: Callable[..., Path]) -> Callable[[int, str], Path]:
    """The uninterrupted run."""
    done: dict[tuple[int, str], Path] = {}

    def run(processes: int, model: str) -> Path:
        key = processes, model
        if key not in done:
            done[key] = live("NONE", processes, model)
        return done[key]

    return run


@pytest.mark.parametrize(
    ("model", "processes", "signals"),
    [
        ("layer norm", 1, "SIGKILL"),
        ("layer norm", 1, "SIGTERM,SIGUSR1"),
        ("batch norm", 1, "SIGKILL"),
        ("batch norm", 2, "SIGKILL"),
        ("batch norm", 2, "SIGTERM,SIGUSR1"),
    ],
)
def test_a_run_of_many_lives_is_the_one_never_disturbed(
    model: str,
    processes: int,
    signals: str,
    live: Callable[..., Path],
    whole: Callable[[int, str], Path],
    assert_same_run: Callable[[Path, Path], None],
) -> None:
    assert_same_run(whole(processes, model), live(signals, processes, model))
