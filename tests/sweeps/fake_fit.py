"""Stands in for ``lapbench fit`` in the tests of the launcher: a run of a few fast epochs that resumes.

Its score depends on heads, seed and ``--bonus`` only. With ``init_from`` it insists on a finished run there and adds
that run's score. ``--behavior=NAME[@FOLDER-PART]`` makes it misbehave: fail, crash, bad-input,
killed, again-once (stops with 75 after its first epoch), again-always, unfinished (exits 0 early), slow-stop,
evaluation (trains, but an evaluation fails in its first process), again-evaluating (stops with 75 in the first, second,
third, ... evaluation of five).
Each process leaves a line in ``starts`` of its folder, each epoch one in ``epochs``.
"""

import argparse
import fcntl
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType

from lapbench.process import die_with_parent
from lapbench.results.record import Record, read_record, write_record

die_with_parent()
parser = argparse.ArgumentParser()
parser.add_argument("--config", action="append")
parser.add_argument("--run.dir", dest="folder", type=Path)
parser.add_argument("--model.init_args.backbone.heads", dest="heads", type=int, default=0)
parser.add_argument("--seed_everything", dest="seed", type=int, default=0)
parser.add_argument("--model.init_args.init_from", dest="init_from", type=Path)
parser.add_argument("--bonus", type=float, default=0.9)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--epoch_seconds", type=float, default=0.01)
parser.add_argument("--behavior", default="")
options = parser.parse_args()
folder: Path = options.folder
behavior, _, where = options.behavior.partition("@")
if where not in f"{folder.parent.name}/{folder.name}":
    behavior = ""
lock = (folder / ".lock").open("a")
fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # two processes in one folder: the test must notice
stopping = False


def stop(number: int, frame: FrameType | None) -> None:
    global stopping
    stopping = True


signal.signal(signal.SIGTERM, stop)
with (folder / "starts").open("a") as file:
    environment = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "LAPBENCH_PARENT_PID")}
    file.write(json.dumps({"pid": os.getpid(), **environment}) + "\n")
record = Record("FakeTask", "Digits", "vit", f"{options.heads}L", options.seed, checkpoint="last")
first, start = 0, 0.0
if options.init_from:
    source = read_record(options.init_from)
    assert source.status == "finished", f"started from a run that is {source.status}"
    start = source.metrics["test/top1"]
if (folder / "record.json").exists():
    record = replace(read_record(folder), status="running", error=None)
    first = record.progress["epoch"] or 0
if behavior == "fail":
    write_record(folder, replace(record, status="failed", error="train/loss is nan at step 7"))
    sys.exit(1)
if behavior == "crash":
    sys.stderr.write("10 %\r100 %\n\x1b[31mRuntimeError: CUDA out of\tmemory\x1b[0m\n\n")
    sys.exit(3)
if behavior == "bad-input":
    sys.stderr.write("lapbench: error: lr: expected a number, got 'x'\n")
    sys.exit(2)
if behavior == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if behavior == "again-always":
    sys.exit(75)
if behavior == "unfinished":
    write_record(folder, record)
    sys.exit(0)
for epoch in range(first, options.epochs):
    time.sleep(options.epoch_seconds)
    score = start + options.bonus + 0.01 * options.heads + 0.001 * options.seed * (1 + epoch)
    progress = {"epoch": epoch + 1, "max_epochs": options.epochs, "step": 10 * (epoch + 1), "max_steps": None}
    record = replace(record, progress=progress, metrics={"val/top1": score})
    with (folder / "epochs").open("a") as file:
        file.write(f"{epoch}\n")
    write_record(folder, record)
    if stopping or (behavior == "again-once" and epoch == 0):
        write_record(folder, replace(record, status="interrupted"))
        sys.exit(75)
# From the record: a run killed after its last epoch trains no more when it is started again.
metrics = {**record.metrics, "test/top1": record.metrics["val/top1"]}
record = replace(record, metrics=metrics)
if behavior == "again-evaluating" and len(record.evaluations) < 5:
    sections = {**record.evaluations, f"e{len(record.evaluations)}": {"metrics": {}}}
    write_record(folder, replace(record, status="interrupted", evaluations=sections))
    sys.exit(75)
failing = behavior == "evaluation" and not record.evaluations
evaluations = {"linear": {"error": "out of memory"} if failing else {"metrics": {"linear/top1": 0.5}}}
write_record(folder, replace(record, status="finished", evaluations=evaluations))
sys.exit(1 if failing else 0)
