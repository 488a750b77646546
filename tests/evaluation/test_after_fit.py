"""Evaluations after training: in order, isolated from each other, resumed after any death, on one or two processes."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

from lapbench.evaluation import linear_probe
from lapbench.results.record import Record, read_record
from lapbench.tasks import ImageClassification

Command = Callable[..., Any]
HERE = Path(__file__).parent
# 2 steps an epoch, of 90 images; 30 choose between the two heads.
TWO_HEADS = {"lrs": [0.5, 0.05], "lr_batch_size": None, "select_fraction": 0.25}
PROBE: tuple[str, dict[str, Any]] = ("lapbench.evaluation.LinearProbe", {"epochs": 3, "batch_size": 45, **TWO_HEADS})
DRAWS: tuple[str, dict[str, Any]] = ("fakes.Draws", {})
FAILS: tuple[str, dict[str, Any]] = ("fakes.Fails", {})


def results(record: Record) -> dict[str, Any]:
    """What two records of the same run have in common: no times."""
    names = ("status", "metrics", "progress", "checkpoint", "error", "schedule", "seed")
    sections = {k: {**section, "seconds": None} for k, section in record.evaluations.items()}
    metrics = {k: v for k, v in record.metrics.items() if k != "train/samples_per_second"}
    return {**{name: getattr(record, name) for name in names}, "metrics": metrics, "evaluations": sections}


def assert_not_trained_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("training_step", "test_step"):
        monkeypatch.setattr(ImageClassification, name, lambda *arguments: pytest.fail("trained or tested again"))


def test_fit_ends_with_its_evaluations(
    tmp_path: Path, fit: Command, finished: Path, again: Command, lapbench: Command
) -> None:
    callbacks = ("--trainer.callbacks+=LinearProbe", "--trainer.callbacks.epochs=1", "--trainer.callbacks+=fakes.Draws")
    leftover = tmp_path / "run/evaluations/linear/last.ckpt"  # of a run whose record somebody has deleted
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    outcome = fit(tmp_path / "run", *callbacks)
    assert outcome.status == 0, outcome.err
    lines = outcome.err.splitlines()
    assert [line.split(":")[0] for line in lines[-3:]] == ["evaluation linear", "evaluation draws", "finished"]
    record, without = read_record(tmp_path / "run"), read_record(finished)
    assert list(record.evaluations) == ["linear", "draws"]
    assert record.evaluations["linear"]["checkpoint"] == "last"
    # Training and test were not disturbed, and what they logged is all that TensorBoard has.
    metrics = {k: v for k, v in results(record)["metrics"].items() if k.split("/")[0] not in ("linear", "draws")}
    assert metrics == results(without)["metrics"]
    state = torch.load(tmp_path / "run/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    assert record.metrics["draws/weights"] == pytest.approx(sum(float(v.double().sum()) for v in state.values()))
    assert record.metrics["draws/training"] == 0
    torch.manual_seed(0)
    assert record.metrics["draws/drawn"] == float(torch.rand(()))
    events = [len(list((run / "tensorboard").glob("events*"))) for run in (tmp_path / "run", finished)]
    assert events[0] == events[1]
    assert [str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*.ckpt")] == [
        "checkpoints/last.ckpt",
        "evaluations/linear/last.ckpt",
    ]
    assert again(tmp_path / "run").err == (
        f"{tmp_path / 'run'}: this run has finished already; its results are in record.json\n"
    )
    table = lapbench("table", tmp_path / "run", "--metric", "linear/top1")
    assert f"{100 * record.metrics['linear/top1']:.2f}" in table.out
    assert "linear/top1: linear-probe top-1 accuracy in % of Digits, by evaluation linear (a linear" in table.out


def test_averaged_weights_and_the_best_checkpoint_are_what_is_evaluated(tmp_path: Path, fit: Command) -> None:
    settings = ("--model.ema_decay", 0.9, "--run.test", "best", "--run.monitor_mode", "min")
    assert fit(tmp_path, *settings, "--trainer.callbacks+=fakes.Draws").status == 0
    record = read_record(tmp_path)
    best, last = (torch.load(tmp_path / f"checkpoints/{name}.ckpt", weights_only=True) for name in ("best", "last"))
    totals = [
        sum(float(v.double().sum()) for v in state.values())
        for state in (best["state_dict"], best["current_model_state"], last["state_dict"])
    ]
    assert record.evaluations["draws"]["checkpoint"] == record.checkpoint == "best"
    assert record.metrics["draws/weights"] == pytest.approx(totals[0], rel=1e-12)
    assert len(set(totals)) == 3


def test_without_a_test_the_last_checkpoint_is_evaluated(tmp_path: Path, fit: Command) -> None:
    assert fit(tmp_path, "--run.test", "none", "--trainer.callbacks+=fakes.Draws").status == 0
    record = read_record(tmp_path)
    assert (record.status, record.checkpoint, record.evaluations["draws"]["checkpoint"]) == ("finished", "last", "last")
    assert not any(name.startswith("test/") for name in record.metrics)


def test_a_failure_leaves_the_rest_alone_and_is_tried_again(
    finished: Path, with_evaluations: Command, again: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_not_trained_again(monkeypatch)
    before = read_record(finished).metrics
    draws = [("fakes.Draws", {"name": name}) for name in "ab"]
    run = with_evaluations(finished, draws[0], FAILS, ("fakes.Returns", {}), draws[1])
    outcome = again(run)
    assert outcome.status == 1
    assert f"evaluating in {run} from its last checkpoint on" in outcome.err
    assert "evaluation fails failed: RuntimeError: out of memory\n" in outcome.err
    assert "Traceback" not in outcome.err
    record = read_record(run)
    assert (record.status, record.error, record.checkpoint) == ("finished", None, "last")
    assert record.evaluations["fails"] == {"error": "RuntimeError: out of memory"}
    assert record.evaluations["returns"] == {"error": "TypeError: Object of type Tensor is not JSON serializable"}
    assert "fakes.py" in (run / "evaluations/fails/error-0.txt").read_text()  # the traceback
    a, b = record.evaluations["a"], record.evaluations["b"]
    # The same for both, though the first one spoils its weights.
    assert list(a["metrics"].values()) == list(b["metrics"].values())
    assert record.metrics == {**before, **a["metrics"], **b["metrics"]}

    (run / "mended").touch()
    monkeypatch.setattr("fakes.Returns.evaluate", lambda self, run: {"metrics": {"returns/top1": 1.0}})
    outcome = again(run)
    assert outcome.status == 0
    assert [line.split(":")[0] for line in outcome.err.splitlines()[1:-1]] == ["evaluation fails", "evaluation returns"]
    after = read_record(run)
    assert after.evaluations["a"] == a
    assert after.metrics == {**record.metrics, "fails/top1": 0.5, "returns/top1": 1.0}
    assert after.status == "finished"
    assert again(run).err.endswith("has finished already; its results are in record.json\n")


def test_a_signal_in_an_evaluation_interrupts_the_run(
    finished: Path, with_evaluations: Command, again: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = with_evaluations(finished, DRAWS, PROBE)
    original, calls = linear_probe._Probe.training_step, []

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        if len(calls) == 3:
            os.kill(os.getpid(), 15)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(linear_probe._Probe, "training_step", step)
    outcome = again(run)
    assert outcome.status == 75
    assert outcome.err.splitlines()[-1] == f"interrupted; the same command with --run.dir {run} goes on"
    record = read_record(run)
    assert (record.status, record.error, record.finished) == ("interrupted", None, None)
    assert list(record.evaluations) == ["draws"]
    assert again(run).status == 0
    # 3 epochs: one whole one was kept.
    assert len(calls) == 3 + 4
    assert list(read_record(run).evaluations) == ["draws", "linear"]


def test_two_of_a_name_are_refused(finished: Path, with_evaluations: Command, again: Command) -> None:
    outcome = again(with_evaluations(finished, DRAWS, DRAWS))
    assert outcome.status == 2
    assert outcome.err.splitlines()[-1] == (
        "lapbench: error: trainer.callbacks: two evaluations are named 'draws'; give one of them another name"
    )


@pytest.fixture(scope="module")
def killed(tiny: Path, tmp_path_factory: pytest.TempPathFactory, forked: Command) -> Path:
    """Runs killed by SIGKILL at each moment, and ``whole``, which was not."""
    folder = tmp_path_factory.mktemp("killed")
    config = yaml.safe_load(tiny.read_text())
    config["trainer"]["callbacks"] = [{"class_path": name, "init_args": settings} for name, settings in (PROBE, DRAWS)]
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    script = HERE / "killed_evaluations.py"
    done = forked(script, ",".join(MOMENTS), folder, "fit", "--config", file)
    assert done.returncode == 0, done.stderr
    return folder


# Between fit and probe, in its first and second epoch, while it saves, while it is scored, before the next evaluation,
# and when all are done.
MOMENTS = ("probe-1", "step-2", "step-4", "save-2", "score-2", "draws-1", "finish-1")


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_run_goes_on_with_what_is_missing(
    moment: str, killed: Path, again: Command, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restart(run: Path) -> Any:
        return lapbench("fit", "--config", killed / "config.yaml", "--run.dir", run)

    if read_record(killed / "whole").status == "running":
        assert restart(killed / "whole").status == 0
    run = killed / moment
    record = read_record(run)
    assert (record.status, record.checkpoint) == ("running", "last")
    done = {"draws-1": ["linear"], "finish-1": ["linear", "draws"]}.get(moment, [])
    assert list(record.evaluations) == done
    kept = (run / "evaluations/linear/last.ckpt").exists()
    assert kept == (moment not in ("probe-1", "step-2"))
    assert_not_trained_again(monkeypatch)
    steps = []
    original = linear_probe._Probe.training_step
    monkeypatch.setattr(
        linear_probe._Probe, "training_step", lambda *arguments: steps.append(1) or original(*arguments)
    )
    checkpoint = run / "checkpoints/last.ckpt"
    before = checkpoint.stat().st_mtime_ns, checkpoint.read_bytes()
    outcome = restart(run)
    assert outcome.status == 0, outcome.err
    assert len(steps) == {"probe-1": 6, "step-2": 6, "step-4": 4, "save-2": 4}.get(moment, 0)
    assert (checkpoint.stat().st_mtime_ns, checkpoint.read_bytes()) == before
    assert results(read_record(run)) == results(read_record(killed / "whole"))
    assert {name: read_record(run).evaluations[name] for name in done} == record.evaluations


def test_two_processes_give_the_result_of_one(
    finished: Path, with_evaluations: Command, again: Command, tmp_path: Path, forked: Command
) -> None:
    """Both see the same global batches: 3 in an epoch of 90 images."""
    settings = {"epochs": 4, "batch_size": 30, **TWO_HEADS}
    probe: tuple[str, dict[str, Any]] = ("lapbench.evaluation.LinearProbe", settings)
    cached = (probe[0], {**settings, "cache_features": True, "batch_norm": True, "name": "cached"})
    one, two = (shutil.copytree(finished, tmp_path / name) for name in ("one", "two"))
    assert again(with_evaluations(one, probe, cached)).status == 0
    alone = ("fakes.Fails", {"rank": 1})
    group, after = (("fakes.Group", {"name": name}) for name in ("group", "after"))
    with_evaluations(two, probe, cached, group, alone, after, devices=2, strategy="ddp")
    # Lightning starts the second process, as ``python -m lapbench``.
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    command = ("-m", "lapbench", "fit", "--config", two / "config.yaml", "--run.dir", two)
    done = forked(*command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    expected, record = read_record(one), read_record(two)
    assert record.status == "finished"
    assert list(record.evaluations) == ["linear", "cached", "group", "fails", "after"]
    for name in ("linear", "cached"):
        found, wanted = (r.evaluations[name] for r in (record, expected))
        assert found["metrics"] == pytest.approx(wanted["metrics"], rel=1e-9)
        assert found["chosen"] == wanted["chosen"]
        for key in ("top1", "loss"):
            ours, theirs = ([head[key] for head in section["heads"]] for section in (found, wanted))
            assert ours == pytest.approx(theirs, rel=1e-9)
        assert wanted["metrics"][f"{name}/loss"] < 2.3
    # The process group is still there, the same for all, also after one process alone has failed.
    assert record.evaluations["fails"] == {"error": "process 1 of 2: RuntimeError: out of memory"}
    assert record.metrics["group/sum"] == record.metrics["after/sum"] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["finished", "one", "two"]


def test_the_second_trainer_shares_device_and_nothing_else(tmp_path: Path) -> None:
    from lapbench.evaluation.second_trainer import second_trainer

    outer = Trainer(accelerator="cpu", devices=1, logger=False, barebones=True)
    inner = second_trainer(outer, tmp_path / "linear", max_epochs=3)
    assert inner.strategy is not outer.strategy
    assert inner.strategy.root_device == outer.strategy.root_device
    assert (inner.world_size, inner.num_devices, inner.loggers, inner.max_epochs) == (1, 1, [], 3)
    assert inner.default_root_dir == str(tmp_path / "linear")
