"""``lapbench analyze``: runs of every task and timm models, what it leaves in the run's folder, what it refuses."""

import json
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image

from lapbench.datamodules import PyDocs
from lapbench.results.record import read_record
from lapbench.training.analyze_arguments import parse_request

Command = Callable[..., Any]
HERE = Path(__file__).parent
MODEL = "vit_tiny_patch16_224"
SMALL = ("--model.backbone.options", json.dumps({"embed_dim": 16, "depth": 2, "num_heads": 2}))
FITTING = (*SMALL, "--model.backbone.img_size", 8, "--model.backbone.patch_size", 4, "--model.backbone.in_chans", 1)
PLAIN = ("--geometry.pictures", "false")
FAST = ("--measures", "anova,similarity")
FRACTIONS = ("geometry/within_sequence", "geometry/within_class", "geometry/between_class")


def numbers(run: Path) -> dict[str, float]:
    """The geometry among the metrics of a run."""
    return {name: value for name, value in read_record(run).metrics.items() if name.startswith("geometry/")}


def section(run: Path, name: str = "geometry") -> dict[str, Any]:
    """What the record says of it, but for the time that it took."""
    return {key: value for key, value in read_record(run).evaluations[name].items() if key != "seconds"}


def drawn(run: Path, *suffixes: str) -> set[str]:
    """The names of the run's figures; each is whole files, with these suffixes and no others."""
    files = list((run / "figures").iterdir())
    for file in files:
        assert is_whole(file), file
    names = {file.stem for file in files}
    assert len(files) == len(names) * len(suffixes)
    assert {file.suffix.removeprefix(".") for file in files} == {*suffixes}
    return names


def is_whole(file: Path) -> bool:
    """Whether a file of a figure can be read to its end."""
    if file.suffix == ".svg":
        return file.read_text().rstrip().endswith("</svg>")
    if file.suffix == ".json":
        content = json.loads(file.read_text())
        return content["figure"] == file.stem and len(content["series"]) == 1
    with Image.open(file) as image:
        image.load()
    return image.format == "PNG"


def test_a_classifier_is_measured(finished: Path, lapbench: Command) -> None:
    before = read_record(finished)
    weights = (finished / "checkpoints/last.ckpt").read_bytes()
    outcome = lapbench("analyze", finished, *PLAIN)
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out) == numbers(finished)
    assert sum(numbers(finished)[name] for name in FRACTIONS) == pytest.approx(1)
    assert {"geometry/similarity", "geometry/k_alpha", "geometry/nc1", "geometry/nc4"} <= numbers(finished).keys()
    after = read_record(finished)
    assert {**after.metrics, **before.metrics} == after.metrics
    assert after.status == "finished"
    assert (finished / "checkpoints/last.ckpt").read_bytes() == weights
    every = {"anova", "similarity", "spectrum", "collapse", "pca", "feature_maps", "simplex", "sublayers"}
    assert drawn(finished, "json") == every


def test_it_is_what_evaluate_does(finished: Path, lapbench: Command) -> None:
    assert (
        lapbench("analyze", finished, *FAST, *PLAIN, "--layers", "0,1", "--max-samples", 20, "--split", "test").status
        == 0
    )
    short = section(finished)
    settings = ("--geometry.layers", "[0,1]", "--geometry.max_samples", 20, "--geometry.split", "test")
    measures = '--geometry.measures=["anova", "similarity"]'
    assert lapbench("evaluate", finished, "--suite", "geometry", *settings, *PLAIN, measures).status == 0
    assert section(finished) == short


def test_another_checkpoint_and_another_name(finished: Path, lapbench: Command) -> None:
    shutil.copy(finished / "checkpoints/last.ckpt", finished / "first.ckpt")
    assert lapbench("analyze", finished, *FAST, *PLAIN, "--ckpt", finished / "first.ckpt").status == 0
    assert lapbench("analyze", finished, *FAST, *PLAIN, "--layers", "last", "--name", "final").status == 0
    record = read_record(finished)
    assert {"geometry-first", "final"} <= record.evaluations.keys()
    assert record.metrics["geometry-first/within_class"] == record.metrics["final/within_class"]
    assert {path.name for path in (finished / "figures").iterdir()} == {"geometry-first", "final"}


def test_two_processes_measure_what_one_does(finished: Path, lapbench: Command, start_forked: Command) -> None:
    command = ("analyze", finished, *FAST, *PLAIN, "--max-samples", 21)
    assert lapbench(*command).status == 0
    one = numbers(finished)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "two"}
    environment = {**os.environ, **shared, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        start_forked(
            *("-m", "lapbench", *command, "--trainer.accelerator", "cpu", "--trainer.devices", 2),
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]
    printed = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    assert json.loads(printed[0][0]) == numbers(finished)
    assert read_record(finished).evaluations["geometry"]["samples"] == 21
    assert numbers(finished) == pytest.approx(one, rel=1e-6)


def test_a_timm_model_is_measured_in_a_run_of_its_own(tiny: Path, tmp_path: Path, lapbench: Command) -> None:
    outcome = lapbench("analyze", MODEL, *FAST, *PLAIN, "--config", tiny, "--out", tmp_path / "out", *FITTING)
    assert outcome.status == 0, outcome.err
    record = read_record(tmp_path / "out")
    assert (record.task, record.backbone, record.status) == ("FrozenBackbone", MODEL, "finished")
    assert json.loads(outcome.out) == record.metrics == numbers(tmp_path / "out")
    assert drawn(tmp_path / "out", "json") == {"anova", "similarity"}


def test_a_teacher_of_dino_is_measured(tiny: Path, tmp_path: Path, lapbench: Command) -> None:
    config = yaml.safe_load(tiny.read_text())
    config["model"]["class_path"] = "lapbench.tasks.DINO"
    config["model"]["init_args"] |= {"head": {"hidden_dim": 16, "bottleneck_dim": 8, "out_dim": 32}}
    config["data"]["init_args"] |= {"multicrop": {"global_crops": 2, "local_crops": 2, "local_size": 4}}
    config["run"] = {"test": "none"}
    (tmp_path / "dino.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "run"
    begun = lapbench("fit", "--config", tmp_path / "dino.yaml", "--run.dir", run, "--trainer.max_epochs", 0)
    assert begun.status == 0, begun.err
    outcome = lapbench("analyze", run, *PLAIN, "--measures", "anova,collapse", "--layers", "last")
    assert outcome.status == 0, outcome.err
    assert sum(numbers(run)[name] for name in FRACTIONS) == pytest.approx(1)
    assert "geometry/nc1" in numbers(run)
    assert "geometry/nc3" not in numbers(run)  # it has no classifier
    assert drawn(run, "json") == {"anova", "collapse"}


def test_a_language_model_is_measured(tmp_path: Path, lapbench: Command) -> None:
    PyDocs(str(tmp_path / "data"), vocab_size=320).prepare_data()
    backbone = {"name": "tiny", "heads": 1, "depth": 2, "width": 32, "num_heads": 2, "context": 64}
    data = {"data_dir": str(tmp_path / "data"), "vocab_size": 320, "context": 32, "batch_size": 4}
    config = {
        "trainer": {"accelerator": "cpu", "max_epochs": 0},
        "model": {
            "class_path": "lapbench.tasks.LanguageModeling",
            "init_args": {"backbone": backbone, "vocab_size": 320, "muon": {"momentum_warmup": 5}},
        },
        "data": {"class_path": "lapbench.datamodules.PyDocs", "init_args": data},
        "run": {"monitor": "val/bits_per_byte", "monitor_mode": "min", "test": "none"},
    }
    (tmp_path / "language.yaml").write_text(yaml.safe_dump(config))
    run = tmp_path / "run"
    begun = lapbench("fit", "--config", tmp_path / "language.yaml", "--run.dir", run)
    assert begun.status == 0, begun.err
    outcome = lapbench("analyze", run, *FAST, *PLAIN, "--max-samples", 9)
    assert outcome.status == 0, outcome.err
    assert sum(numbers(run)[name] for name in FRACTIONS[1:]) == pytest.approx(1)
    assert "geometry/within_sequence" not in numbers(run)
    assert drawn(run, "json") == {"anova", "similarity"}


@pytest.mark.parametrize("number", [2, 5])
def test_a_killed_analysis_leaves_whole_figures_and_starts_over(
    number: int, finished: Path, lapbench: Command, forked: Command
) -> None:
    figures = finished / "figures"
    killed = forked(HERE / "killed_analysis.py", figures, number, "analyze", finished, *FAST)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    files = [file for file in figures.iterdir() if not file.name.endswith(".tmp")]
    assert len(files) == number - 1
    assert all(map(is_whole, files))
    assert "geometry" not in read_record(finished).evaluations
    assert lapbench("analyze", finished, *FAST).status == 0
    assert drawn(finished, "json", "png", "svg") == {"anova", "similarity"}


def test_arguments_become_settings() -> None:
    own = ("--layers", "0,5,11", "--max-samples", "64", "--measures", "anova,pca", "--split=val")
    request = parse_request([MODEL, *own, "--geometry.name", "a", "--trainer.devices", "2", "--config", "c"])
    assert request.of("geometry") == [
        *("--geometry.layers=[0, 5, 11]", "--geometry.max_samples=64", '--geometry.measures=["anova", "pca"]'),
        *("--geometry.split=val", "--geometry.name", "a"),
    ]
    assert request.of("trainer") == ["--trainer.devices", "2"]
    assert (request.options.config, request.options.suite, request.run) == (["c"], ["geometry"], None)


RUN = "RUN"  # stands for the finished run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: RUN"),
        ((RUN, "--layers", "first"), "--layers: expected all, last or numbers such as 0,5,11, got 'first'"),
        ((RUN, "--layers", "0,7"), "layers"),
        ((RUN, "--max-samples", 0), "--max-samples: expected a whole number of at least 1, got '0'"),
        ((RUN, "--measures", "anovva"), "anova"),
        ((RUN, "--split", "train"), "--split: invalid choice: 'train'"),
        ((RUN, "--geometry.layer", "last"), "unknown key 'geometry.layer'; did you mean 'geometry.layers'?"),
        ((RUN, "--knn.k", "[1]"), "--knn.k is for `lapbench evaluate --suite knn`"),
        ((RUN, "--data.val_fraction", 0.1), "expected one below trainer, geometry"),
        ((RUN, "--pretrained"), "--pretrained is for a timm model"),
        ((RUN, "--ckpt", "first"), "no such file"),
        ((MODEL,), "--config: expected one with data"),
        ((MODEL, "--ckpt", "last"), f"--ckpt: expected the folder of a run, {MODEL} is none"),
        (("vit_tinny_patch16_224",), "no such model; did you mean"),
    ],
)
def test_mistakes_are_one_line(finished: Path, lapbench: Command, arguments: tuple[Any, ...], message: str) -> None:
    outcome = lapbench("analyze", *(finished if argument == RUN else argument for argument in arguments))
    assert outcome.status == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (finished / "figures").exists()


def test_help_has_the_settings(lapbench: Command) -> None:
    outcome = lapbench("analyze", "--help")
    assert outcome.status == 0
    assert "usage: lapbench analyze" in outcome.out
    assert "--max-samples N" in outcome.out
    assert "--geometry.layers" in outcome.out


def test_a_table_shows_geometry_only_if_asked(finished: Path, lapbench: Command) -> None:
    plain = lapbench("table", finished).out
    analyzed = lapbench("analyze", finished, *FAST, *PLAIN, "--layers", "last")
    assert analyzed.status == 0
    assert f"geometry: data of figures in {finished / 'figures'}" in analyzed.err
    assert lapbench("table", finished).out == plain
    asked = lapbench("table", finished, "--metric", "geometry/within_sequence")
    assert asked.status == 0, asked.err
    assert f"{numbers(finished)['geometry/within_sequence']:.3f}" in asked.out
    assert "within-sequence share of the tokens' variance" in asked.out
    assert "not ranked" in asked.out
    assert f"tokens on the {section(finished)['split']} split" in " ".join(asked.out.split())
