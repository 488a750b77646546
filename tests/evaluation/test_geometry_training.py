"""Token geometry while training, and of a run that was stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lapbench.evaluation.geometry_measures import GeometryMeasures
from lapbench.results.record import read_record

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # Lightning's own use of torch
CALLBACK = "--trainer.callbacks+=TokenGeometry"


def test_measuring_while_training_does_not_disturb_it(
    fit: Callable[..., Any], finished: Path, tmp_path: Path, scalars: Callable[..., Any]
) -> None:
    chosen = ("--trainer.callbacks.every_n_epochs=1", "--trainer.callbacks.pictures=false")
    assert fit(tmp_path / "run", CALLBACK, *chosen).status == 0
    metrics, before = read_record(tmp_path / "run").metrics, read_record(finished).metrics
    for key in ("train/loss_epoch", "val/loss", "test/loss"):
        assert metrics[key] == before[key]
    logged = scalars(tmp_path / "run/tensorboard")
    assert len(metrics.keys() - before.keys()) == 12
    for key in metrics.keys() - before.keys():
        assert list(logged[key]) == [10, 20]
        assert logged[key][20] == pytest.approx(metrics[key], rel=1e-6)


def test_a_run_that_does_not_validate_is_measured_while_training(
    fit: Callable[..., Any], tmp_path: Path, scalars: Callable[..., Any]
) -> None:
    chosen = ("--trainer.callbacks.every_n_epochs=1", "--trainer.callbacks.pictures=false")
    dropping = ("--data.val_fraction=0", "--model.backbone.drop_path=0.5", "--trainer.max_epochs=1")
    outcome = fit(tmp_path / "run", CALLBACK, *chosen, *dropping)
    assert outcome.status == 0, outcome.err
    record = read_record(tmp_path / "run")
    assert record.evaluations["geometry"]["split"] == "test"
    logged = {k: v for k, v in scalars(tmp_path / "run/tensorboard").items() if k.startswith("geometry/")}
    assert len(logged) == 12
    for key, values in logged.items():
        assert values == {record.progress["step"]: pytest.approx(record.metrics[key], rel=1e-6)}


def test_averaged_weights_are_measured_where_there_are_some(
    fit: Callable[..., Any], tmp_path: Path, scalars: Callable[..., Any]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    chosen = ("--trainer.callbacks.every_n_epochs=2", '--trainer.callbacks.measures=["similarity"]')
    outcome = fit(tmp_path / "run", CALLBACK, *chosen, "--model.ema_decay=0.9")
    assert outcome.status == 0, outcome.err
    logged = scalars(tmp_path / "run/tensorboard")["geometry/similarity"]
    expected = read_record(tmp_path / "run").metrics["geometry/similarity"]
    assert logged == {20: pytest.approx(expected, rel=1e-6)}
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    assert [image.step for image in events.Images("geometry/similarity")] == [20]
    pictures = sorted(file.name for file in (tmp_path / "run/figures").iterdir())
    assert pictures == ["similarity.json", "similarity.png", "similarity.svg"]


def test_it_is_repeated_when_it_was_stopped(
    finished: Path, with_evaluations: Callable[..., Path], again: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"measures": ["anova"], "pictures": False}
    run = with_evaluations(finished, ("lapbench.evaluation.TokenGeometry", chosen))
    with monkeypatch.context() as patch:
        patch.setattr(GeometryMeasures, "update", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert again(run).status != 0
    assert read_record(run).evaluations == {}
    assert not (run / "figures").exists()
    assert again(run).status == 0
    section = read_record(run).evaluations["geometry"]
    assert (section["split"], section["samples"], section["figures"]) == ("val", 40, ["anova"])
    assert (run / "figures/anova.json").is_file()
