"""``lapbench fit``: what a run leaves behind, and that its folder is never mixed with another run's."""

import errno
import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tensorboard.summary.writer.record_writer import RecordWriter as RecordFile

import lapbench.training.run_folder as run_folder
from lapbench.process import lock_folder
from lapbench.results.record import read_record
from lapbench.tasks import ImageClassification

Command = Callable[..., Any]
LOGGED = {
    "train/loss",
    "train/loss_epoch",
    "train/top1",
    "train/lr",
    "train/grad_norm",
    "train/samples_per_second",
    "val/loss",
    "val/top1",
    "val/top5",
    "test/loss",
    "test/top1",
    "test/top5",
}


def files(folder: Path) -> dict[str, bytes]:
    """Content of every file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_run_leaves_record_config_checkpoint_and_events(
    finished: Path, lapbench: Command, scalars: Callable[[Path], dict[str, dict[int, float]]], tmp_path: Path
) -> None:
    record = read_record(finished)
    assert (record.status, record.task, record.data) == ("finished", "ImageClassification", "Digits")
    assert (record.backbone, record.schedule, record.seed) == ("vit_tiny_patch16_224", "1L", 0)
    assert record.checkpoint == "last"
    assert record.error is None
    assert set(record.metrics) == LOGGED
    assert record.progress == {"epoch": 2, "max_epochs": 2, "step": 20, "max_steps": 20}
    assert record.throughput is not None
    assert record.throughput > 0
    assert {"python", "torch", "lightning", "timm", "lapbench"} <= record.versions.keys()
    assert record.hardware["world_size"] == 1
    assert record.started is not None
    assert record.finished is not None
    assert datetime.fromisoformat(record.started) <= datetime.fromisoformat(record.finished)

    # Patches of 4 x 4 pixels, 4 positions, 2 blocks of attention (qkv, projection) and MLP, norms, 10 classes.
    d = 16
    block = 2 * 2 * d + (d * 3 * d + 3 * d) + (d * d + d) + (d * 4 * d + 4 * d) + (4 * d * d + d)
    assert record.parameters == (16 * d + d) + 4 * d + 2 * block + 2 * d + (d * 10 + 10)

    checkpoint = torch.load(finished / "checkpoints/last.ckpt", weights_only=True)
    assert (checkpoint["epoch"], checkpoint["global_step"]) == (1, 20)
    assert sum(value.numel() for key, value in checkpoint["state_dict"].items()) == record.parameters

    events = scalars(finished / "tensorboard")
    assert set(events) - {"epoch"} == LOGGED
    assert list(events["train/loss"]) == list(range(20))
    assert list(events["train/lr"]) == list(range(20))
    for name in ("val/top1", "train/loss_epoch", "test/top1"):
        assert events[name][max(events[name])] == pytest.approx(record.metrics[name])

    again = lapbench("fit", "--config", finished / "config.yaml", "--run.dir", tmp_path / "again")
    assert again.status == 0, again.err
    same = read_record(tmp_path / "again").metrics
    assert {k: v for k, v in same.items() if k != "train/samples_per_second"} == {
        k: v for k, v in record.metrics.items() if k != "train/samples_per_second"
    }


def test_a_finished_run_is_left_alone(finished: Path, fit: Command) -> None:
    before = files(finished)
    outcome = fit(finished)
    assert outcome.status == 0
    assert outcome.err == f"{finished}: this run has finished already; its results are in record.json\n"
    assert files(finished) == before


@pytest.mark.parametrize("state", ["finished", "running", "no record", "no config"])
def test_another_configuration_in_the_same_folder_is_refused(finished: Path, fit: Command, state: str) -> None:
    if state == "no record":  # its checkpoint alone must not be taken for this run's
        (finished / "record.json").unlink()
    elif state == "no config":
        (finished / "config.yaml").unlink()
    else:
        content = json.loads((finished / "record.json").read_text())
        (finished / "record.json").write_text(json.dumps({**content, "status": state}))
    before = files(finished)
    outcome = fit(finished, "--model.optimizer.lr", 0.02, "--trainer.max_epochs", 3)
    assert outcome.status == 2
    (line,) = outcome.err.splitlines()
    if state == "no config":
        assert "without its config.yaml" in line
    else:
        assert "model.init_args.optimizer.lr = 0.01" in line
        assert "0.02" in line
        assert "trainer.max_epochs" in line
    assert files(finished) == before


def test_a_folder_that_another_process_works_in_is_refused(tmp_path: Path, fit: Command) -> None:
    with lock_folder(tmp_path, "a test"):
        outcome = fit(tmp_path)
    assert outcome.status == 2
    assert outcome.err.startswith("lapbench: error: another `lapbench fit` is at work in")
    assert list(files(tmp_path)) == [".lock"]


def test_runs_started_in_the_same_second_get_two_folders(
    tmp_path: Path, lapbench: Command, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Frozen":
            return cls(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(run_folder, "datetime", Frozen)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        one_batch = (
            "--trainer.max_epochs",
            1,
            "--trainer.limit_train_batches",
            2,
            "--model.lr_schedule.warmup_epochs",
            0,
        )
        outcome = lapbench("fit", "--config", tiny, *one_batch)
        assert outcome.status == 0, outcome.err
    stem = "runs/tiny/1L-seed0-20260102-030405"
    assert sorted(str(path) for path in Path("runs/tiny").iterdir()) == [stem, f"{stem}-2"]
    first, second = read_record(stem), read_record(f"{stem}-2")
    # The second did not go on from the first: both trained from the start, to the same end.
    assert first.metrics["test/loss"] == second.metrics["test/loss"]
    assert second.progress["step"] == 2
    assert yaml.safe_load(Path(stem, "config.yaml").read_text())["run"]["dir"] is None


def test_other_ranks_use_the_folder_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = run_folder.RunSettings()
    monkeypatch.chdir(tmp_path)
    first = run_folder.RunFolder.take(settings, "a/1L-seed0", "a: 1\n")
    assert first.path is not None
    monkeypatch.setattr(run_folder.rank_zero_only, "rank", 1)
    assert run_folder.RunFolder.take(settings, "a/1L-seed0", "a: 1\n").path == first.path
    first.release()
    assert len(list((tmp_path / "runs/a").iterdir())) == 1
    assert os.environ["LAPBENCH_RUN_DIR"] == str(first.path)


def test_progress_goes_to_stderr_and_the_score_comes_last(tmp_path: Path, fit: Command) -> None:
    outcome = fit(tmp_path / "run", "--trainer.max_epochs", 1, "--trainer.enable_model_summary", "false")
    assert outcome.out == ""
    first, epoch, last = outcome.err.splitlines()
    assert first == f"training in {tmp_path / 'run'}"
    assert epoch.startswith("epoch 1/1  train/loss_epoch ")
    assert last.startswith(f"finished: {tmp_path / 'run'}  test/loss ")


def test_what_a_result_does_not_depend_on_may_change(finished: Path, fit: Command) -> None:
    assert fit(finished, "--trainer.enable_progress_bar", "false").status == 0
    moved = finished.with_name("moved")
    finished.rename(moved)
    assert fit(moved).status == 0


def test_test_none_scores_nothing(tmp_path: Path, fit: Command) -> None:
    assert fit(tmp_path / "run", "--run.test", "none", "--trainer.max_epochs", 1).status == 0
    record = read_record(tmp_path / "run")
    assert record.status == "finished"
    assert record.checkpoint is None
    assert not any(name.startswith("test/") for name in record.metrics)


def test_a_non_finite_loss_fails_the_run_and_keeps_the_state_before(
    tmp_path: Path, fit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    after: list[dict[str, torch.Tensor]] = []
    original = ImageClassification.training_step

    def step(self: ImageClassification, batch: Any, batch_idx: int) -> Any:
        after.append({name: value.detach().clone() for name, value in self.state_dict().items()})
        if len(after) == 13:
            batch[0][0] = float("nan")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(ImageClassification, "training_step", step)
    outcome = fit(tmp_path)
    assert outcome.status == 2
    lines = outcome.err.splitlines()
    assert lines[0] == f"training in {tmp_path}"
    file = tmp_path / "checkpoints/nonfinite.ckpt"
    reason = "train/loss is nan at optimizer step 12, epoch 1, batch 2: expected a finite number; "
    assert lines[-1].startswith(f"lapbench: error: {reason}")
    assert lines[-1].endswith(f"; the state before this step is in {file}")
    assert "Traceback" not in outcome.err
    checkpoint = torch.load(file, weights_only=True)
    assert checkpoint["global_step"] == 12
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())
    assert all(torch.equal(value, checkpoint["state_dict"][name]) for name, value in after[12].items())
    record = read_record(tmp_path)
    assert record.status == "failed"
    assert record.error is not None
    assert record.error.startswith(reason)
    assert record.progress["step"] == 12
    # The last good checkpoint is still the first epoch's.
    assert torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)["global_step"] == 10


@pytest.mark.parametrize("what", ["last.ckpt", "record.json", "events"])
def test_a_full_disk_is_one_line_and_loses_nothing(
    what: str, finished: Path, fit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full from the second epoch on; the first one's checkpoint and record stay what they were."""
    content = json.loads((finished / "record.json").read_text())
    (finished / "record.json").write_text(json.dumps({**content, "status": "interrupted"}))
    kept = {name: (finished / name).read_bytes() for name in ("checkpoints/last.ckpt", "record.json")}
    # A run of as many epochs, with a third to do.
    config = (finished / "config.yaml").read_text()
    (finished / "config.yaml").write_text(config.replace("max_epochs: 2", "max_epochs: 3"))
    if what == "events":

        def write(self: Any, data: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(RecordFile, "write", write)
    else:
        original_fsync = os.fsync

        def fsync(file: int) -> None:
            if what in os.readlink(f"/proc/self/fd/{file}"):
                raise OSError(errno.ENOSPC, "No space left on device")
            original_fsync(file)

        monkeypatch.setattr(os, "fsync", fsync)
    outcome = fit(finished, "--trainer.max_epochs", 3)
    assert outcome.status == 2, outcome.err
    lines = [line for line in outcome.err.splitlines() if line.startswith("lapbench: error:")]
    assert len(lines) == 1
    assert "No space left on device" in lines[0]
    assert "Traceback" not in outcome.err
    for name in ("checkpoints/last.ckpt", "record.json"):
        if what in name:
            assert (finished / name).read_bytes() == kept[name]
            assert f"cannot write {finished / name}: No space left on device" in lines[0]
            assert "intact" in lines[0]
    assert not list(finished.rglob("*.tmp"))
    monkeypatch.undo()
    assert fit(finished, "--trainer.max_epochs", 3).status == 0
    assert read_record(finished).progress["step"] == 30
