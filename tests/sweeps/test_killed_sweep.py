"""A sweep of real runs, killed with SIGKILL, ends with the table of an uninterrupted one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lapbench.results.record import read_record

SWEEP = """
name: killed
base: [supervised/digits]
axes:
  heads: {{key: model.init_args.backbone.heads, values: [0, 2]}}
  seed: {{key: seed_everything, values: [0]}}
overrides:
  data.init_args.data_dir: {data}
  data.init_args.batch_size: 128
  model.init_args.backbone.drop_path: 0.1
  model.init_args.backbone.options: {{embed_dim: 16, depth: 2, num_heads: 2, class_token: false}}
  model.init_args.lr_schedule.warmup_epochs: 1
  trainer.max_epochs: 12
  trainer.enable_model_summary: false
metric: test/top1
"""


def wait_until(process: Any, happened: object, seconds: float = 300) -> None:
    """Polls ``happened()`` while the sweep runs."""
    assert callable(happened)
    end = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "the sweep did not get there"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def sweep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("killed")
    file = root / "killed.yaml"
    file.write_text(SWEEP.format(data=root / "digits"))
    return file


def test_killed_sweep_ends_with_the_same_table(
    sweep_file: Path, tmp_path: Path, start_forked: Callable[..., Any]
) -> None:
    whole = tmp_path / "whole"
    command = [sys.executable, "-m", "lapbench", "sweep", sweep_file, "--out", whole, "--jobs", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr

    out = tmp_path / "killed"
    start = partial(start_forked, Path(__file__).with_name("forked_sweep.py"), sweep_file, "--out", out, "--jobs", "2")

    process = start()  # killed in the middle of the first runs, after some epochs
    wait_until(process, lambda: len(list(out.glob("*/checkpoints/last.ckpt"))) > 0)
    process.send_signal(signal.SIGKILL)
    process.communicate()

    process = start()  # killed when one run has finished
    finished = lambda: [f.parent for f in out.glob("*/record.json") if read_record(f.parent).status == "finished"]  # noqa: E731
    wait_until(process, finished)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    first = {folder: (folder / "record.json").read_bytes() for folder in finished()}

    process = start()
    printed = process.communicate(timeout=600)
    assert process.returncode == 0, printed
    tables = [(folder / "table.txt").read_text().replace(str(folder), "") for folder in (whole, out)]
    assert tables[0] == tables[1]
    assert {folder: (folder / "record.json").read_bytes() for folder in first} == first  # not run again
    for folder in whole.glob("*/"):
        metrics, again = read_record(folder).metrics, read_record(out / folder.name).metrics
        assert {k: v for k, v in metrics.items() if "per_second" not in k} == {
            k: v for k, v in again.items() if "per_second" not in k
        }
