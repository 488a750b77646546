"""Runs of 0 epochs: the initial weights are kept, tested and evaluated, as reference rows of tables are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lapbench.evaluation import LinearProbe
from lapbench.results.record import read_record
from lapbench.tasks import ImageClassification

Command = Callable[..., Any]
NONE = ("--trainer.max_epochs", 0)


@pytest.fixture
def dino(tiny: Path, tmp_path: Path) -> Path:
    """A config of DINO on the few digits, with a linear probe and k-NN."""
    config = yaml.safe_load(tiny.read_text())
    config["run"] = {"test": "none"}
    config["model"]["class_path"] = "lapbench.tasks.DINO"
    head = {"hidden_dim": 16, "bottleneck_dim": 8, "out_dim": 32}
    config["model"]["init_args"] |= {"head": head, "lr_schedule": {"warmup_epochs": 5}}
    crops = {"global_crops": 2, "local_crops": 2, "local_size": 4}
    config["data"]["init_args"] |= {"multicrop": crops}
    config["trainer"]["callbacks"] = [
        {"class_path": "lapbench.evaluation.LinearProbe", "init_args": {"epochs": 1}},
        {"class_path": "lapbench.evaluation.NearestNeighbors", "init_args": {"k": [3], "report_k": 3}},
    ]
    file = tmp_path / "dino.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    return found


def test_the_initial_weights_are_kept_and_tested(tmp_path: Path, fit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    # A warm-up that is longer than the training is no mistake if there is none.
    outcome = fit(tmp_path / "run", *NONE, "--model.lr_schedule.warmup_epochs", 5)
    assert outcome.status == 0, outcome.err
    assert outcome.err.splitlines()[0] == f"evaluating in {tmp_path / 'run'}"
    record = read_record(tmp_path / "run")
    assert (record.status, record.checkpoint) == ("finished", "last")
    assert record.progress == {"epoch": 0, "max_epochs": 0, "step": 0, "max_steps": 0}
    assert set(record.metrics) == {"test/loss", "test/top1", "test/top5"}
    before: list[dict[str, torch.Tensor]] = []

    def start(self: ImageClassification) -> None:
        before.append({name: value.clone() for name, value in self.state_dict().items()})

    monkeypatch.setattr(ImageClassification, "on_train_start", start)
    assert fit(tmp_path / "trained", "--trainer.max_epochs", 1).status == 0
    kept = weights(tmp_path / "run")
    assert kept.keys() == before[0].keys()
    assert all(torch.equal(kept[name], value) for name, value in before[0].items())


def test_with_moving_averages_they_are_the_same(tmp_path: Path, fit: Command) -> None:
    assert fit(tmp_path / "plain", *NONE).status == 0
    outcome = fit(tmp_path / "averaged", *NONE, "--model.ema_decay", 0.9)
    assert outcome.status == 0, outcome.err
    one, other = (read_record(tmp_path / name).metrics for name in ("plain", "averaged"))
    assert one == other


def test_stopped_in_an_evaluation_it_goes_on_with_the_same_weights(
    tmp_path: Path, dino: Path, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: LinearProbe, run: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    arguments = ("fit", "--config", dino, *NONE, "--run.dir")
    with monkeypatch.context() as patch:
        patch.setattr(LinearProbe, "evaluate", stop)
        with pytest.raises(KeyboardInterrupt):
            lapbench(*arguments, tmp_path / "run")
    kept = weights(tmp_path / "run")
    outcome = lapbench(*arguments, tmp_path / "run")
    assert outcome.status == 0, outcome.err
    assert all(torch.equal(value, kept[name]) for name, value in weights(tmp_path / "run").items())
    record = read_record(tmp_path / "run")
    assert (record.task, record.status, record.checkpoint) == ("DINO", "finished", "last")
    assert {"linear/top1", "knn/top1"} <= record.metrics.keys()
    assert lapbench(*arguments, tmp_path / "again").status == 0
    assert read_record(tmp_path / "again").metrics == record.metrics


def test_raw_pixels_take_the_place_of_a_model(tmp_path: Path, dino: Path, lapbench: Command) -> None:
    run = tmp_path / "run"
    outcome = lapbench("fit", "--config", dino, "--config", "ssl/presets/pixels", "--run.dir", run)
    assert outcome.status == 0, outcome.err
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == [
        f"evaluating in {run}",
        "linear",  # the best learning rate is the largest
        "evaluation linear",
        "evaluation knn",
        "finished",
    ]
    record = read_record(run)
    assert (record.task, record.backbone, record.schedule, record.parameters) == ("FrozenBackbone", "pixels", "0L", 0)
    assert record.metrics["knn/top1"] > 0.6  # of the few digits


def test_there_is_no_best_checkpoint(tmp_path: Path, fit: Command) -> None:
    outcome = fit(tmp_path / "run", *NONE, "--run.test", "best")
    assert outcome.status == 2
    message = "run.test: expected last or none, as trainer.max_epochs 0 validates nothing, got best"
    assert outcome.err == f"lapbench: error: {message}\n"
    assert not (tmp_path / "run").exists()


def test_a_task_without_a_test_is_told_before_it_trains(tmp_path: Path, dino: Path, lapbench: Command) -> None:
    outcome = lapbench("fit", "--config", dino, "--run.dir", tmp_path / "run", "--run.test", "last")
    assert outcome.status == 2
    assert "run.test: expected none, as DINO has no score to test, got last" in outcome.err
    assert not (tmp_path / "run").exists()
