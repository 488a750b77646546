"""``lapbench evaluate --suite``: runs and timm models, what is kept, what goes on, what is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import yaml

from lapbench.backbones import VisionSettings
from lapbench.evaluation import LinearProbe
from lapbench.evaluation.features import last_tokens
from lapbench.results.record import read_record
from lapbench.tasks import FrozenBackbone
from lapbench.training.suite import SUITE

Command = Callable[..., Any]
MODEL = "vit_tiny_patch16_224"
SMALL = ("--model.backbone.options", json.dumps({"embed_dim": 16, "depth": 2, "num_heads": 2}))
FITTING = (*SMALL, "--model.backbone.img_size", 8, "--model.backbone.patch_size", 4, "--model.backbone.in_chans", 1)
PROBE = ("--suite", "linear", "--linear.epochs", 1)


@pytest.fixture
def stock(tiny: Path, tmp_path: Path, lapbench: Command) -> Command:
    """Evaluates a small timm model on the few digits, in the folder ``tmp_path / "out"``."""
    return lambda *arguments: lapbench(
        "evaluate", MODEL, "--config", tiny, "--out", tmp_path / "out", *PROBE, *FITTING, *arguments
    )


def test_a_run_is_evaluated_and_the_section_replaces_an_earlier_one(finished: Path, lapbench: Command) -> None:
    config = (finished / "config.yaml").read_bytes()
    first = lapbench("evaluate", finished, *PROBE)
    assert first.status == 0, first.err
    record = read_record(finished)
    assert json.loads(first.out) == {name: v for name, v in record.metrics.items() if name.startswith("linear/")}
    assert record.evaluations["linear"]["settings"]["epochs"] == 1
    second = lapbench("evaluate", finished, "--linear.epochs=2", "--suite", "linear")
    assert second.status == 0, second.err
    after = read_record(finished)
    assert after.evaluations["linear"]["settings"]["epochs"] == 2
    assert after.metrics["linear/loss"] < record.metrics["linear/loss"]  # trained anew, not taken from the first
    assert {**after.metrics, **record.metrics} == record.metrics
    assert (finished / "config.yaml").read_bytes() == config


def test_several_at_once(finished: Path, lapbench: Command) -> None:
    suite = ("--suite", "linear,knn", "--linear.epochs", 1, "--linear.name", "probe", "--knn.k", "[3,20]")
    outcome = lapbench("evaluate", finished, *suite, "--knn.split", "test")
    assert outcome.status == 0, outcome.err
    record = read_record(finished)
    assert {"probe", "knn"} <= record.evaluations.keys()
    assert {"probe/top1", "knn/top1", "knn/top1_k3"} <= json.loads(outcome.out).keys() <= record.metrics.keys()
    table = lapbench("table", finished, "--metric", "knn/top1")
    assert "k-NN top-1 accuracy in % of Digits, by evaluation knn (weighted nearest neighbours" in table.out


def test_what_was_stopped_goes_on_if_it_is_asked_for_in_the_same_way(
    finished: Path, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    def stop(self: LinearProbe, run: Any) -> dict[str, Any]:
        seen.append((run.folder / "begun").exists())
        (run.folder / "begun").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(LinearProbe, "evaluate", stop)
    for epochs in (1, 1, 2, 2):
        with pytest.raises(KeyboardInterrupt):
            lapbench("evaluate", finished, "--suite", "linear", "--linear.epochs", epochs)
    assert seen == [False, True, False, True]


def test_another_checkpoint_gets_a_name_of_its_own(finished: Path, lapbench: Command) -> None:
    shutil.copy(finished / "checkpoints/last.ckpt", finished / "Epoch 3.ckpt")
    outcome = lapbench("evaluate", finished, *PROBE, "--ckpt", finished / "Epoch 3.ckpt")
    assert outcome.status == 0, outcome.err
    assert set(json.loads(outcome.out)) == {f"linear-epoch-3/{name}" for name in ("loss", "top1", "top5")}
    assert "linear-epoch-3" in read_record(finished).evaluations


def test_a_run_that_scored_nothing_itself_gets_its_scores(tmp_path: Path, fit: Command, lapbench: Command) -> None:
    assert fit(tmp_path / "run", "--run.test", "none", "--trainer.max_epochs", 0).status == 0
    assert read_record(tmp_path / "run").checkpoint is None
    assert lapbench("evaluate", tmp_path / "run", *PROBE).status == 0
    record = read_record(tmp_path / "run")
    assert record.checkpoint == "last"
    assert "linear/top1" in record.metrics


def test_a_timm_model_is_evaluated_in_a_run_of_its_own(
    stock: Command, tmp_path: Path, lapbench: Command, few_digits: Path
) -> None:
    outcome = stock("--data.val_fraction", 0.5)
    assert outcome.status == 0, outcome.err
    record = read_record(tmp_path / "out")
    assert (record.task, record.data, record.backbone, record.schedule) == ("FrozenBackbone", "Digits", MODEL, "0L")
    assert (record.status, record.checkpoint) == ("finished", "last")
    assert record.progress == {"epoch": 0, "max_epochs": 0, "step": 0, "max_steps": 0}
    assert json.loads(outcome.out) == record.metrics
    assert set(record.metrics) == {"linear/loss", "linear/top1", "linear/top5"}
    config = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert config["data"]["init_args"]["val_fraction"] == 0.5
    assert config["data"]["init_args"]["data_dir"] == str(few_digits)
    assert "finished already" in stock("--data.val_fraction", 0.5).err
    # It is a run like any other.
    assert lapbench("evaluate", tmp_path / "out", *PROBE).status == 0
    assert read_record(tmp_path / "out").metrics == record.metrics


def test_an_evaluation_that_was_stopped_is_all_that_is_left_to_do(
    stock: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(self: LinearProbe, run: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LinearProbe, "evaluate", stop)
        with pytest.raises(KeyboardInterrupt):
            stock()
    weights = (tmp_path / "out/checkpoints/last.ckpt").read_bytes()
    assert read_record(tmp_path / "out").status == "interrupted"
    assert stock().status == 0
    assert (tmp_path / "out/checkpoints/last.ckpt").read_bytes() == weights


def test_without_a_folder_it_makes_one(
    tiny: Path, tmp_path: Path, lapbench: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = lapbench("evaluate", MODEL, "--config", tiny, *PROBE, *FITTING)
    assert outcome.status == 0, outcome.err
    (folder,) = (tmp_path / "runs").glob(f"{MODEL}/0L-seed0-*")
    assert read_record(folder).status == "finished"


def test_local_weights_give_the_features_that_timm_gives(tmp_path: Path) -> None:
    torch.manual_seed(3)
    settings = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2}
    model = timm.create_model(MODEL, num_classes=5, **settings).eval()
    for parameter in model.parameters():  # zeros at the start would hide what is not loaded
        torch.nn.init.normal_(parameter, std=0.3)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "stock.safetensors")
    sizes = {key: settings.pop(key) for key in ("img_size", "patch_size")}
    weights = str(tmp_path / "stock.safetensors")
    task = FrozenBackbone(VisionSettings(MODEL, weights=weights, options=settings, **sizes)).eval()
    images = torch.randn(32, 3, 16, 16)
    (tokens,) = last_tokens(task.backbone, images)
    with torch.no_grad():
        assert torch.equal(tokens, model.forward_features(images))
    assert not any(parameter.requires_grad for parameter in task.backbone.parameters())


def test_weights_for_images_normalised_in_another_way_are_noted(stock: Command, tmp_path: Path) -> None:
    options = {"embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 8, "patch_size": 4, "in_chans": 1}
    torch.save(timm.create_model(MODEL, **options).state_dict(), tmp_path / "stock.pth")
    outcome = stock("--weights", tmp_path / "stock.pth")
    assert outcome.status == 0, outcome.err
    note = "are for images normalised by mean and std ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)), Digits normalises by"
    assert note in outcome.err.splitlines()[0]
    assert note in read_record(tmp_path / "out").notes["normalization"]


RUN = "RUN"  # stands for the finished run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((RUN,), "one of the arguments --suite --tasks is required"),
        ((RUN, "--suite", "linear", "--tasks", "mmlu"), "not allowed with argument"),
        ((RUN, "--suite", "lineer"), "--suite: unknown evaluation 'lineer': did you mean 'linear'?"),
        ((RUN, "--suite", "linear,linear"), "--suite: linear stands twice"),
        ((RUN, *PROBE, "--linear.epoch", 3), "unknown key 'linear.epoch'; did you mean 'linear.epochs'?"),
        ((RUN, *PROBE, "--linear.epochs", "many"), "linear.epochs: Expected a int. Got value: many"),
        ((RUN, *PROBE, "--linear.epochs", 0), "LinearProbe.epochs: expected at least 1, got 0"),
        ((RUN, *PROBE, "--lineer.epochs", 3), "unknown key 'lineer.epochs'; did you mean 'linear.'?"),
        ((RUN, *PROBE, "--knn.k", "[1]"), "unknown key 'knn.k': knn is not in --suite"),
        (
            (RUN, *PROBE, "--data.val_fraction", 0.1),
            "unknown key 'data.val_fraction'; expected one below trainer, linear",
        ),
        ((RUN, *PROBE, "--limit", 3), "--limit is for --tasks"),
        ((RUN, *PROBE, "--pretrained"), "--pretrained is for a timm model"),
        ((RUN, *PROBE, "--name", "Big"), "name of an evaluation"),
        (
            (RUN, "--suite", "linear,knn", "--name", "a"),
            "--name: expected one evaluation in --suite, got 2; --linear.name",
        ),
        ((RUN, "--suite", "linear,knn", "--knn.name", "linear"), "two evaluations are named 'linear'"),
        ((RUN, *PROBE, "--trainer.max_epoch", 1), "unknown key"),
        ((RUN, *PROBE, "--ckpt", "best"), "best.ckpt: no such file"),
        (("vit_tinny_patch16_224", *PROBE), "such folder, and timm"),
        ((MODEL, "--tasks", "mmlu"), f"--tasks: expected the folder of a run, {MODEL} is none"),
        ((MODEL, *PROBE, "--ckpt", "last"), f"--ckpt: expected the folder of a run, {MODEL} is none"),
        ((MODEL, *PROBE), "--config: expected one with data"),
        ((MODEL, *PROBE, "--config", "supervised/digit"), "no config 'supervised/digit'"),
        ((MODEL, *PROBE, "--config", "supervised/presets/authors", "--config", "sweeps/quickstart"), "has none"),
    ],
)
def test_mistakes_are_one_line(finished: Path, lapbench: Command, arguments: tuple[Any, ...], message: str) -> None:
    outcome = lapbench("evaluate", *(finished if argument == RUN else argument for argument in arguments))
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model.backbone.in_chans", 3), "Digits has 1: set model.backbone.in_chans 1"),
        (
            ("--model.backbone.img_size", 16),
            "takes images of 16 x 16 pixels, Digits gives 8 x 8: set data.image_size 16",
        ),
        (("--trainer.max_epochs", 1), "trainer.max_epochs: expected 0, as a FrozenBackbone is not trained, got 1"),
        (("--weights", "nowhere.pth"), "weights: expected a file, nowhere.pth is none"),
        (("--data.valfraction", 1), "data: unknown key 'valfraction'; did you mean 'val_fraction'?"),
    ],
)
def test_a_model_that_does_not_fit_is_one_line(stock: Command, arguments: tuple[Any, ...], message: str) -> None:
    outcome = stock(*arguments)
    assert outcome.status == 2
    assert message in outcome.err.splitlines()[-1]
    assert "Traceback" not in outcome.err


def test_help_lists_the_settings_of_the_suite(lapbench: Command) -> None:
    outcome = lapbench("evaluate", "--help")
    assert outcome.status == 0
    assert "--suite NAME,..." in outcome.out
    for name in SUITE:
        assert f"--{name}.name" in outcome.out
