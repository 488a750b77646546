"""A sweep of real runs, killed with SIGKILL, ends with the table of an uninterrupted one."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

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


def start(sweep: Path, out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lapbench", "sweep", str(sweep), "--out", str(out), "--jobs", "2"]
    return subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(sweep: Path, out: Path) -> str:
    """Runs the sweep to its end; its table."""
    process = start(sweep, out)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return (out / "table.txt").read_text()


def wait_until(process: subprocess.Popen[str], happened: object, seconds: float = 300) -> None:
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


def test_killed_sweep_ends_with_the_same_table(sweep_file: Path, tmp_path: Path) -> None:
    whole = finish(sweep_file, tmp_path / "whole")
    out = tmp_path / "killed"

    process = start(sweep_file, out)  # killed in the middle of the first runs, after some epochs
    wait_until(process, lambda: len(list(out.glob("*/checkpoints/last.ckpt"))) > 0)
    process.send_signal(signal.SIGKILL)
    process.communicate()

    process = start(sweep_file, out)  # killed when one run has finished
    finished = lambda: [f.parent for f in out.glob("*/record.json") if read_record(f.parent).status == "finished"]  # noqa: E731
    wait_until(process, finished)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    first = {folder: (folder / "record.json").read_bytes() for folder in finished()}

    assert finish(sweep_file, out).replace(str(out), "") == whole.replace(str(tmp_path / "whole"), "")
    assert {folder: (folder / "record.json").read_bytes() for folder in first} == first  # not run again
    for folder in (tmp_path / "whole").glob("*/"):
        metrics, again = read_record(folder).metrics, read_record(out / folder.name).metrics
        assert {k: v for k, v in metrics.items() if "per_second" not in k} == {
            k: v for k, v in again.items() if "per_second" not in k
        }
