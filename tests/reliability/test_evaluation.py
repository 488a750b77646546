"""Scores do not depend on the number of processes: every sample once, and sums that come out the same to the bit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lapbench.results.record import read_record


@pytest.fixture
def score(finished: Path, tmp_path: Path) -> Callable[..., dict[str, float]]:
    """The metrics that a command prints, run by a number of processes."""

    def run(command: str, processes: int, *arguments: str) -> dict[str, float]:
        script, log = Path(__file__).with_name("lives.py"), tmp_path / f"{command}-{processes}"
        devices = ("--trainer.devices", str(processes), *(("--trainer.strategy", "ddp") if processes > 1 else ()))
        config = ("--config", str(finished / "config.yaml"), "--run.dir", str(finished))
        done = subprocess.run(
            [sys.executable, script, "NONE", "0", str(processes), "0", log, command, *config, *devices, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        text = log.read_text()
        metrics: dict[str, float] = json.loads(text[text.index("{") :])
        log.unlink()
        return metrics

    return run


# 40 samples for validation and 37 for test: by 2 and 3 processes, in batches of 16, 5 and 1.
@pytest.mark.parametrize(("command", "split"), [("validate", "val"), ("test", "test")])
def test_any_number_of_processes_gives_the_same_scores(
    command: str, split: str, score: Callable[..., dict[str, float]], finished: Path
) -> None:
    alone = score(command, 1)
    assert set(alone) == {f"{split}/loss", f"{split}/top1", f"{split}/top5"}
    assert score(command, 2) == alone
    assert score(command, 3) == alone
    assert read_record(finished).evaluations[command]["metrics"] == alone
    for batch in ("5", "36"):
        batched = score(command, 1, "--data.eval_batch_size", batch)
        assert batched == pytest.approx(alone, rel=1e-6)  # another shape: other last bits
        assert score(command, 2, "--data.eval_batch_size", batch) == batched
