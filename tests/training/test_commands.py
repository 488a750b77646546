"""``lapbench validate``, ``test`` and ``predict`` on a run, and the checkpoint that they and the table use."""

import csv
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lapbench.results.record import read_record
from lapbench.tasks import ImageClassification

Command = Callable[..., Any]


def run_of(folder: Path) -> tuple[object, ...]:
    """The arguments that a user gives to score a run."""
    return ("--config", folder / "config.yaml", "--run.dir", folder)


def by_hand(folder: Path, checkpoint: str = "last") -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Keys, labels and logits of the test split, computed without a trainer."""
    import yaml

    from lapbench.backbones import VisionSettings
    from lapbench.datamodules import Digits

    config = yaml.safe_load((folder / "config.yaml").read_text())
    model = ImageClassification(VisionSettings(**config["model"]["init_args"]["backbone"]), num_classes=10)
    state = torch.load(folder / f"checkpoints/{checkpoint}.ckpt", weights_only=True)["state_dict"]
    model.load_state_dict(state)
    data = Digits(data_dir=config["data"]["init_args"]["data_dir"], eval_batch_size=100)
    data.setup("predict")
    ((images, labels, keys),) = list(data.predict_dataloader())
    with torch.no_grad():
        return keys, labels, model.eval()(data.normalize(images))


def test_test_prints_what_fit_recorded_and_adds_a_section(finished: Path, lapbench: Command) -> None:
    before = read_record(finished)
    outcome = lapbench("test", *run_of(finished))
    assert (outcome.status, outcome.err) == (0, "")
    metrics = json.loads(outcome.out)
    assert metrics == {name: value for name, value in before.metrics.items() if name.startswith("test/")}
    after = read_record(finished)
    assert after.metrics == before.metrics
    assert after.evaluations == {
        "test": {"checkpoint": str(finished / "checkpoints/last.ckpt"), "metrics": metrics},
    }
    _, labels, logits = by_hand(finished)
    assert len(labels) == 37
    assert metrics["test/top1"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    hits = (logits.topk(5).indices == labels[:, None]).any(1).float().mean().item()
    assert metrics["test/top5"] == pytest.approx(hits)
    # Over samples, not over batches: the last batch has 5 of 16.
    loss = -logits.log_softmax(1).gather(1, labels[:, None]).mean().item()
    assert metrics["test/loss"] == pytest.approx(loss, rel=1e-5)


def test_validate_prints_what_fit_recorded(finished: Path, lapbench: Command) -> None:
    outcome = lapbench("validate", *run_of(finished))
    assert (outcome.status, outcome.err) == (0, "")
    before = read_record(finished).metrics
    assert json.loads(outcome.out) == {name: value for name, value in before.items() if name.startswith("val/")}
    assert set(read_record(finished).evaluations) == {"validate"}


def test_predictions_are_the_test_split_once_each(finished: Path, lapbench: Command) -> None:
    outcome = lapbench("predict", *run_of(finished))
    assert outcome.status == 0
    assert outcome.err == f"37 predictions: {finished / 'predictions.csv'}\n"
    with (finished / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    keys, labels, logits = by_hand(finished)
    assert len(set(keys)) == 37
    assert [row["key"] for row in rows] == keys
    assert [int(row["label"]) for row in rows] == labels.tolist()
    assert [int(row["prediction"]) for row in rows] == logits.argmax(1).tolist()
    expected = logits.softmax(1).max(1).values.tolist()
    assert [float(row["probability"]) for row in rows] == pytest.approx(expected, abs=1e-6)
    accuracy = sum(row["label"] == row["prediction"] for row in rows) / 37
    assert read_record(finished).metrics["test/top1"] == pytest.approx(accuracy)
    assert not list(finished.glob("*.tmp"))


def test_the_declared_best_checkpoint_is_tested(
    tmp_path: Path, fit: Command, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second of three epochs is made the best by the accuracy that validation reports.
    original = ImageClassification.on_validation_epoch_end

    def report(self: ImageClassification) -> None:
        original(self)
        self.log("val/chosen", {0: 0.5, 1: 0.9, 2: 0.7}[self.current_epoch])

    monkeypatch.setattr(ImageClassification, "on_validation_epoch_end", report)
    run = tmp_path / "run"
    best = ("--run.test", "best", "--run.monitor", "val/chosen")
    outcome = fit(run, "--trainer.max_epochs", 3, *best)
    assert outcome.status == 0, outcome.err
    monkeypatch.undo()
    # A "/" in the metric's name makes no sub-folder.
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    epochs = [torch.load(run / f"checkpoints/{n}.ckpt", weights_only=True)["epoch"] for n in ("best", "last")]
    assert epochs == [1, 2]
    record = read_record(run)
    assert record.checkpoint == "best"
    _, labels, logits = by_hand(run, "best")
    assert record.metrics["test/loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item())
    last = json.loads(lapbench("test", *run_of(run), "--ckpt_path", "last").out)
    assert last["test/loss"] != record.metrics["test/loss"]
    # What is asked for by name or file, and what the run declares.
    for choice in (("--ckpt_path", "best"), ("--ckpt_path", run / "checkpoints/best.ckpt"), ()):
        assert json.loads(lapbench("test", *run_of(run), *choice).out)["test/loss"] == record.metrics["test/loss"]


def test_the_best_score_so_far_survives_an_interruption_and_a_move(
    tmp_path: Path, fit: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def report(self: ImageClassification) -> None:
        self.log("val/chosen", {0: 0.5, 1: 0.9, 2: 0.7}[self.current_epoch])

    monkeypatch.setattr(ImageClassification, "on_validation_epoch_end", report)
    arguments = ("--trainer.max_epochs", 3, "--run.test", "best", "--run.monitor", "val/chosen")
    with monkeypatch.context() as patch:
        original = ImageClassification.training_step

        def stop(self: ImageClassification, batch: Any, batch_idx: int) -> Any:
            if self.current_epoch == 2:
                raise RuntimeError("stopped")
            return original(self, batch, batch_idx)

        patch.setattr(ImageClassification, "training_step", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            fit(tmp_path / "run", *arguments)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert fit(tmp_path / "moved", *arguments).status == 0
    assert torch.load(tmp_path / "moved/checkpoints/best.ckpt", weights_only=True)["epoch"] == 1


def test_without_a_run_the_model_is_scored_as_it_is_built(lapbench: Command, tiny: Path, tmp_path: Path) -> None:
    outcome = lapbench("test", "--config", tiny)
    assert (outcome.status, outcome.err) == (0, "")
    metrics = json.loads(outcome.out)
    assert metrics["test/loss"] == pytest.approx(math.log(10), rel=0.1)
    assert outcome == lapbench("test", "--config", tiny)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    ("choice", "expected"),
    [("best", "checkpoints/best.ckpt: no such file"), ("/nowhere/x.ckpt", "checkpoint /nowhere/x.ckpt: no such file")],
)
def test_a_missing_checkpoint_is_one_line(
    command: str, choice: str, expected: str, finished: Path, lapbench: Command
) -> None:
    outcome = lapbench(command, *run_of(finished), "--ckpt_path", choice)
    assert (outcome.status, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert line.startswith("lapbench: error: checkpoint ")
    assert expected in line
    assert not (finished / "predictions.csv").exists()


def test_best_without_a_run_is_one_line(lapbench: Command, tiny: Path) -> None:
    outcome = lapbench("test", "--config", tiny, "--ckpt_path", "best")
    assert (outcome.status, outcome.err) == (
        2,
        "lapbench: error: --ckpt_path best: needs the run's folder, --run.dir\n",
    )


def test_predictions_that_fail_leave_no_file(
    finished: Path, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ImageClassification.predict_step

    def fail(self: ImageClassification, batch: Any, batch_idx: int) -> dict[str, Any]:
        if batch_idx == 1:
            raise RuntimeError("out of memory")
        return original(self, batch, batch_idx)

    monkeypatch.setattr(ImageClassification, "predict_step", fail)
    before = sorted(finished.rglob("*"))
    with pytest.raises(RuntimeError, match="out of memory"):
        lapbench("predict", *run_of(finished))
    assert sorted(finished.rglob("*")) == before


def test_a_run_with_ema_is_scored_with_the_averaged_weights(tmp_path: Path, fit: Command, lapbench: Command) -> None:
    run = tmp_path / "run"
    assert fit(run, "--model.ema_decay", "0.9").status == 0
    checkpoint = torch.load(run / "checkpoints/last.ckpt", weights_only=True)
    averaged, raw = checkpoint["state_dict"], checkpoint["current_model_state"]
    assert not any(torch.equal(averaged[name], raw[name]) for name in averaged if name.endswith("weight"))
    _, labels, logits = by_hand(run)  # of state_dict
    expected = torch.nn.functional.cross_entropy(logits, labels).item()
    record = read_record(run)
    assert record.metrics["test/loss"] == pytest.approx(expected, rel=1e-5)
    assert json.loads(lapbench("test", *run_of(run)).out)["test/loss"] == record.metrics["test/loss"]
    assert json.loads(lapbench("validate", *run_of(run)).out)["val/loss"] == record.metrics["val/loss"]
