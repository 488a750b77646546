"""Scores do not depend on the number of processes: every sample once, and sums that come out the same to the bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lapbench.results.record import read_record


@pytest.fixture
def score(finished: Path, tmp_path: Path, forked: Callable[..., Any]) -> Callable[..., dict[str, float]]:
    """The metrics that a command prints, run by a number of processes."""

    def run(command: str, processes: int, *arguments: str) -> dict[str, float]:
        script, log = Path(__file__).with_name("lives.py"), tmp_path / f"{command}-{processes}"
        devices = ("--trainer.devices", str(processes), *(("--trainer.strategy", "ddp") if processes > 1 else ()))
        config = ("--config", str(finished / "config.yaml"), "--run.dir", str(finished))
        done = forked(script, "NONE", "0", processes, "0", log, command, *config, *devices, *arguments)
        assert done.returncode == 0, done.stderr
        text = log.read_text()
        metrics: dict[str, float] = json.loads(text[text.index("{") :])
        log.unlink()
        return metrics

    return run


# 37 samples for test and 40 for validation, which neither the processes nor the batches divide.
@pytest.mark.parametrize(
    ("command", "split", "batch", "processes"), [("test", "test", "16", (2, 3)), ("validate", "val", "6", (3,))]
)
def test_any_number_of_processes_gives_the_same_scores(
    command: str,
    split: str,
    batch: str,
    processes: tuple[int, ...],
    score: Callable[..., dict[str, float]],
    finished: Path,
) -> None:
    size = ("--data.eval_batch_size", batch)
    alone = score(command, 1, *size)
    assert set(alone) == {f"{split}/loss", f"{split}/top1", f"{split}/top5"}
    for number in processes:
        assert score(command, number, *size) == alone
    assert read_record(finished).evaluations[command]["metrics"] == alone
    assert read_record(finished).metrics == pytest.approx({**read_record(finished).metrics, **alone}, rel=1e-6)
