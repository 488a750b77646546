"""What a sweep shows while it runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lapbench.results import Record
from lapbench.sweeps import progress
from lapbench.sweeps.progress import Lines, describe, duration, open_display, score_of

RECORD = Record(
    "ImageClassification",
    "Digits",
    "vit",
    "0L",
    0,
    metrics={"val/top1": 0.912, "val/loss": 0.3},
    progress={"epoch": 12, "max_epochs": 60, "step": 1, "max_steps": None},
)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (41.4, "41 s"), (59.7, "1 min 0 s"), (725, "12 min 5 s"), (11_400, "3 h 10 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_run_is_described_by_epoch_and_validation_score() -> None:
    assert describe(RECORD, "test/top1") == "epoch 12/60, val/top1 91.20 %"
    assert describe(RECORD, "test/loss") == "epoch 12/60, val/loss 0.3000"
    assert describe(RECORD, None) == "epoch 12/60, val/top1 91.20 %"
    assert describe(None, "test/top1") == "starting"
    assert score_of(Record("T", "D", "v", "0L", 0), "test/top1") == ""


def test_a_heartbeat_every_half_minute(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    display = open_display(9, "test/top1")
    assert isinstance(display, Lines)
    display.tick(3, {"heads-0": RECORD})
    now += 29
    display.tick(3, {"heads-0": RECORD})
    assert capsys.readouterr().out == ""
    now += 1
    display.tick(3, {"heads-0": RECORD, "heads-2": None})
    assert capsys.readouterr().out == (
        "  heads-0: epoch 12/60, val/top1 91.20 % (3/9 runs done)\n  heads-2: starting (3/9 runs done)\n"
    )
    now += 20
    display.ended("heads-0", "heads-0 finished")
    display.ended("heads-2", "heads-2 finished")
    now += 10
    display.tick(5, {"heads-4": RECORD})  # 2 runs in 50 s: 4 more take 100 s, of which 10 s are over
    assert "(5/9 runs done, about 1 min 30 s left)" in capsys.readouterr().out
    now += 1000
    display.tick(5, {"heads-4": RECORD})
    assert "(5/9 runs done, about 0 s left)" not in (shown := capsys.readouterr().out)
    assert "(5/9 runs done)" in shown
    display.close()


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a pseudo-terminal")
def test_the_live_display_of_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("a: 1\n")
    axes = "{heads: {key: model.init_args.backbone.heads, values: [0, 2]}}"
    overrides = "{epochs: 3, epoch_seconds: 0.6, behavior: crash@heads-2}"
    (tmp_path / "s.yaml").write_text(f"base: base.yaml\naxes: {axes}\noverrides: {overrides}\n")
    fake = Path(__file__).with_name("fake_fit.py")
    code = (
        "import sys; from pathlib import Path; from lapbench.sweeps.grid import load_sweep;"
        "from lapbench.sweeps.launch import launch;"
        f"sys.exit(launch(load_sweep('s.yaml').plan(), Path('out'), 2, [sys.executable, {str(fake)!r}]))"
    )
    master, slave = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                chunk = os.read(master, 4096)
            except OSError:  # Linux reports the end of a pseudo-terminal as an error
                break
            if not chunk:
                break
            shown += chunk
    os.close(master)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert process.returncode == 1
    assert "0/2 runs" in text
    assert re.search(r"heads-0 \S+ [12]/3 epochs val/top1 90.00 %", text)
    assert "[1/2] heads-2 FAILED: exit status 3: RuntimeError: CUDA out of memory" in text
    assert "[2/2] heads-0 finished: test/top1 90.00 % in " in text
    assert "1 of 2 runs failed" in text
