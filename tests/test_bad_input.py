"""What users get wrong: one clear line, exit status 2, and what was there before is still there."""

import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

Arguments = Sequence[object]


class Place(NamedTuple):
    """What a case may use: a config and data to copy, and a folder to work in."""

    config: Path
    data: Path
    folder: Path

    @property
    def run(self) -> Path:
        """Where a run of this case goes."""
        return self.folder / "run"

    def fit(self, *arguments: object) -> Arguments:
        return ("fit", "--config", self.config, "--run.dir", self.run, *arguments)

    def edited(self, where: str, value: Any) -> Arguments:
        """``fit`` with a copy of the config that has another key."""
        config = yaml.safe_load(self.config.read_text())
        *parents, last = where.split(".")
        node = config
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = value
        file = self.folder / "edited.yaml"
        file.write_text(yaml.safe_dump(config))
        return ("fit", "--config", file, "--run.dir", self.run)

    def written(self, text: str, name: str = "written.yaml") -> Path:
        file = self.folder / name
        file.write_text(text)
        return file

    def copied(self, change: Callable[[Path], None]) -> Arguments:
        """``fit`` with a changed copy of the data."""
        folder = shutil.copytree(self.data, self.folder / "data")
        change(folder)
        return self.fit("--data.data_dir", folder)

    def sweep(self, **keys: Any) -> Arguments:
        axes = {"seed": {"key": "seed_everything", "values": [0, 1]}}
        return ("sweep", self.written(yaml.safe_dump({"base": str(self.config), "axes": axes, **keys}), "sweep.yaml"))


def first_shard(folder: Path) -> Path:
    return folder / "train-000000.tar"


def empty(folder: Path) -> None:
    first_shard(folder).write_bytes(b"")


def cut(folder: Path) -> None:
    content = first_shard(folder).read_bytes()
    first_shard(folder).write_bytes(content[: len(content) // 2])


def manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    values = json.loads((folder / "manifest.json").read_text())
    change(values)
    (folder / "manifest.json").write_text(json.dumps(values))


def cut_and_listed_so(folder: Path) -> None:
    """The size in the manifest is right, the tar file ends too early all the same."""
    cut(folder)
    size = first_shard(folder).stat().st_size
    manifest(folder, lambda values: values["splits"]["train"][0].update(bytes=size))


def label_99(folder: Path) -> None:
    """Another label in the last sample of the first shard, the file's size unchanged."""
    with tarfile.open(first_shard(folder)) as tar:
        offset = next(m.offset_data for m in reversed(tar.getmembers()) if m.name.endswith(".cls"))
        header = offset - 512
    content = bytearray(first_shard(folder).read_bytes())
    content[offset : offset + 2] = b"99"
    content[header + 124 : header + 136] = b"%011o\0" % 2
    content[header + 148 : header + 156] = b" " * 8
    content[header + 148 : header + 156] = b"%06o\0 " % sum(content[header : header + 512])
    first_shard(folder).write_bytes(content)


def records(folder: Path, text: str) -> Path:
    (folder / "runs/a").mkdir(parents=True)
    (folder / "runs/a/record.json").write_text(text)
    return folder / "runs"


def weights(folder: Path) -> Path:
    torch.save({"cls_token": torch.zeros(1)}, folder / "x.pth")
    return folder / "x.pth"


BACKBONE = "--model.backbone"
SWIN = """
model:
  init_args:
    backbone: {name: swin_tiny_patch4_window7_224, img_size: 224, patch_size: null, global_pool: null, options: {}}
"""
NO_DATA = """
model:
  class_path: lapbench.tasks.ImageClassification
  init_args: {backbone: {name: vit_tiny_patch16_224}}
"""
CASES: dict[str, tuple[Callable[[Place], Arguments], tuple[str, ...]]] = {
    # head schedules
    "more heads than there are": (lambda p: p.fit(f"{BACKBONE}.heads", 3), ("expected 0..2", "got 3")),
    "a schedule of another length": (lambda p: p.fit(f"{BACKBONE}.heads", "[0, 1, 2]"), ("expected 2", "got 3")),
    "an unknown kind of head": (lambda p: p.fit(f"{BACKBONE}.heads", "{lapacian: 1}"), ("lapacian", "laplacian")),
    "half a head": (lambda p: p.fit(f"{BACKBONE}.heads", 1.5), ("1.5", "expected")),
    "heads that are true": (lambda p: p.fit(f"{BACKBONE}.heads", "true"), ("True", "expected")),
    "a schedule's name that is none": (lambda p: p.fit(f"{BACKBONE}.heads", "6Z"), ("'6Z'", "expected", "6L")),
    # models
    "a model that timm has not": (
        lambda p: p.fit(f"{BACKBONE}.name", "vit_tinny_patch16_224"),
        ("'vit_tinny_patch16_224'", "did you mean vit_tiny"),
    ),
    "a model without attention": (
        lambda p: p.fit(f"{BACKBONE}.name", "resnet18", f"{BACKBONE}.options", "{}"),
        ("resnet18",),
    ),
    "a model of another attention": (
        lambda p: p.fit("--config", p.written(SWIN)),
        ("expected a model of class VisionTransformer", "got SwinTransformer"),
    ),
    "an option that timm has not": (lambda p: p.fit(f"{BACKBONE}.options.dept", 3), ("dept",)),
    "weights that are not there": (lambda p: p.fit(f"{BACKBONE}.weights", "/nowhere/x.pth"), ("/nowhere/x.pth",)),
    "no model": (lambda p: ("fit", "--data", "Digits", "--run.dir", p.run), ("model: expected a class_path",)),
    "no data": (
        lambda p: ("fit", "--config", p.written(NO_DATA), "--run.dir", p.run),
        ("data: expected a class_path",),
    ),
    "a class that is none": (
        lambda p: p.edited("model.class_path", "lapbench.tasks.ImageClasification"),
        ("lapbench.tasks.ImageClasification",),
    ),
    # keys
    "a misspelt key on the command line": (
        lambda p: p.fit("--trainer.max_epoch", 3),
        ("unknown key 'trainer.max_epoch'", "did you mean 'trainer.max_epochs'"),
    ),
    "a misspelt key of the backbone": (
        lambda p: p.fit(f"{BACKBONE}.drop_pth", 0.1),
        ("drop_pth", "did you mean", "drop_path"),
    ),
    "a misspelt key at the top of the YAML": (
        lambda p: p.edited("modell", {"class_path": 1}),
        ("'modell'", "did you mean 'model'"),
    ),
    "a misspelt key of the trainer in YAML": (
        lambda p: p.edited("trainer.max_epoks", 3),
        ("max_epoks", "did you mean", "max_epochs"),
    ),
    "a misspelt key of the backbone in YAML": (
        lambda p: p.edited("model.init_args.backbone.head", 1),
        ("model", "'backbone.head'", "did you mean 'backbone.heads'"),
    ),
    "a misspelt key of the model in YAML": (
        lambda p: p.edited("model.init_args.los", "ce"),
        ("los", "did you mean", "loss"),
    ),
    "a misspelt key of the data in YAML": (
        lambda p: p.edited("data.init_args.batchsize", 8),
        ("batchsize", "did you mean", "batch_size"),
    ),
    "a misspelt key of the augmentation in YAML": (
        lambda p: p.edited("data.init_args.train_transform", {"hflipp": 0.5}),
        ("hflipp", "did you mean", "hflip"),
    ),
    "a misspelt key of the run": (lambda p: p.edited("run.dirr", "x"), ("dirr", "did you mean", "run.dir")),
    "a prefix of a right key": (
        lambda p: p.fit("--trainer.max_ep", 3),
        ("unknown key 'trainer.max_ep'", "did you mean 'trainer.max_epochs'"),
    ),
    "a prefix of a right key in YAML": (
        lambda p: p.edited("model.init_args.optim", {"lr": 1.0}),
        ("optim", "did you mean", "optimizer"),
    ),
    # values
    "a number that is none": (lambda p: p.fit("--model.optimizer.lr", "fast"), ("optimizer.lr", "float", "fast")),
    "epochs that are a word": (lambda p: p.fit("--trainer.max_epochs", "many"), ("trainer.max_epochs", "int", "many")),
    "a choice that is none": (lambda p: p.fit("--model.loss", "mse"), ("loss", "'ce'", "'bce'", "mse")),
    "an optimizer that timm has not": (
        lambda p: p.fit("--model.optimizer.name", "adamm"),
        ("optimizer.name", "'adamm'", "did you mean adam"),
    ),
    "an option that the optimizer has not": (
        lambda p: p.fit("--model.optimizer.options", "{betta: 1}"),
        ("betta", "expected", "betas"),
    ),
    "a warm-up longer than the training": (
        lambda p: p.fit("--model.lr_schedule.warmup_epochs", 5),
        ("lr_schedule.warmup_epochs", "50 of the 20"),
    ),
    "contradicting losses": (
        lambda p: p.fit("--model.loss", "bce_binarized", "--model.label_smoothing", 0.1),
        ("label_smoothing", "expected 0", "got 0.1"),
    ),
    "an odd batch that is mixed": (
        lambda p: p.fit("--model.mixing.mixup", 0.8, "--data.batch_size", 7),
        ("data.batch_size", "even number", "got 7"),
    ),
    "an augmentation that timm has not": (
        lambda p: p.fit("--data.train_transform.auto_augment", "rund-m9"),
        ("auto_augment", "'rund'", "rand"),
    ),
    "an empty batch": (lambda p: p.fit("--data.batch_size", 0), ("batch_size must be at least 1, got 0",)),
    "a batch larger than the data": (lambda p: p.fit("--data.batch_size", 500), ("500", "120")),
    "a plain number for a learning rate": (lambda p: p.fit("--model.optimizer", 1e-3), ("optimizer", "'0.001'")),
    "training without end": (lambda p: p.fit("--trainer.max_epochs", -1), ("trainer.max_epochs: expected a number",)),
    "an accelerator that is not there": (lambda p: p.fit("--trainer.accelerator", "abacus"), ("abacus",)),
    "no model class": (lambda p: p.fit("--model", "null"), ("model",)),
    "a run without a seed": (
        lambda p: p.fit("--seed_everything", "false"),
        ("seed_everything", "whole number", "False"),
    ),
    "a metric that is not logged": (lambda p: p.fit("--run.test", "best", "--run.monitor", "val/top2"), ("val/top2",)),
    "a checkpoint choice that is none": (lambda p: p.fit("--run.test", "worst"), ("run.test", "worst", "'best'")),
    # files
    "a config that is not there": (
        lambda p: ("fit", "--config", "supervised/digts"),
        ("'supervised/digts'", "supervised/digits"),
    ),
    "a config's syntax": (
        lambda p: ("fit", "--config", p.written("trainer:\n  max_epochs: [3\nmodel: 1\n")),
        ("written.yaml", "line 3"),
    ),
    "a key that stands twice": (
        lambda p: ("fit", "--config", p.written("trainer:\n  max_epochs: 3\n  max_epochs: 4\n")),
        ("line 3", "'max_epochs' stands twice"),
    ),
    "a config that is no mapping": (lambda p: ("fit", "--config", p.written("- 1\n")), ("written.yaml",)),
    "no data folder": (
        lambda p: ("fit", "--config", p.config, "--data", "CIFAR10", "--data.data_dir", "/nope", "--run.dir", p.run),
        ("/nope", "lapbench data"),
    ),
    "a data folder without a manifest": (
        lambda p: p.fit("--data", "CIFAR10", "--data.data_dir", p.folder),
        ("manifest.json", "lapbench data"),
    ),
    "an empty shard": (lambda p: p.copied(empty), ("train-000000.tar", "got 0")),
    "a cut shard": (lambda p: p.copied(cut), ("train-000000.tar", "expected", "bytes", "got")),
    "a cut shard that the manifest calls whole": (lambda p: p.copied(cut_and_listed_so), ("train-000000.tar",)),
    "a missing shard": (lambda p: p.copied(lambda d: first_shard(d).unlink()), ("train-000000.tar is missing",)),
    "another number of classes": (
        lambda p: p.copied(lambda d: manifest(d, lambda m: m["classes"].pop())),
        ("manifest.json", "Digits has 10 classes", "lists 9"),
    ),
    "a label out of range": (
        lambda p: (*p.copied(label_99), "--data.reader", "stream"),
        ("train-000000.tar, sample 0000", "expected a label in 0..9, got b'99'"),
    ),
    "data without an index": (
        lambda p: p.copied(lambda d: manifest(d, lambda m: m.pop("offsets"))),
        ("data has no index of its samples", "`lapbench data index", "`reader` to stream"),
    ),
    "an index of other data": (
        lambda p: p.copied(lambda d: (d / "test.index.npy").replace(d / "train.index.npy")),
        ("train.index.npy is stale or damaged", "`lapbench data index"),
    ),
    "a reader that there is not": (lambda p: p.fit("--data.reader", "random"), ("reader", "random", "index")),
    "a manifest that is no JSON": (
        lambda p: p.copied(lambda d: manifest(d, dict.clear) or (d / "manifest.json").write_text("{")),
        ("manifest.json", "JSON"),
    ),
    "a run folder below a file": (
        lambda p: ("fit", "--config", p.config, "--run.dir", p.written("") / "run"),
        ("written.yaml/run", "cannot make"),
    ),
    "a run folder that is a file": (
        lambda p: ("fit", "--config", p.config, "--run.dir", p.written("")),
        ("written.yaml", "cannot make"),
    ),
    # other commands
    "no such command": (lambda p: ("fti",), ("unknown command 'fti'", "did you mean fit?")),
    "no run to score": (
        lambda p: ("test", "--config", p.config, "--run.dir", p.folder / "none"),
        ("run.dir: expected the folder of a run",),
    ),
    "no checkpoint to score": (
        lambda p: ("predict", "--config", p.config, "--ckpt_path", "/nope.ckpt"),
        ("/nope.ckpt: no such file",),
    ),
    "a checkpoint that is none": (lambda p: ("test", "--config", p.config, "--ckpt_path", p.config), ("tiny.yaml",)),
    "weights as a checkpoint": (
        lambda p: ("test", "--config", p.config, "--ckpt_path", weights(p.folder)),
        ("x.pth", "state_dict", "model.backbone.weights"),
    ),
    "a data set that is none": (lambda p: ("data", "cifar11", "--out", p.folder), ("cifar11", "cifar10")),
    "a source that is not there": (
        lambda p: ("data", "cifar10", "--source", "/nope", "--out", p.folder / "out"),
        ("/nope",),
    ),
    "an empty table folder": (lambda p: ("table", p.folder), ("no record.json in",)),
    "no table folder": (lambda p: ("table", p.folder / "none"), ("does not exist",)),
    "a corrupt record": (
        lambda p: ("table", records(p.folder, '{"format": 1,')),
        ("record.json", "not valid JSON", "line 1"),
    ),
    "a record of another kind": (
        lambda p: ("table", records(p.folder, '{"format": 7}')),
        ("record.json", "format 7", "expected 1"),
    ),
    "a sweep with an unknown key": (
        lambda p: p.sweep(axis={}),
        ("sweep.yaml", "unknown key 'axis'", "did you mean 'axes'"),
    ),
    "a sweep of a config that is not there": (
        lambda p: p.sweep(base="supervised/digts"),
        ("supervised/digts", "supervised/digits"),
    ),
    "a sweep that is not there": (lambda p: ("sweep", "quikstart"), ("quikstart", "quickstart")),
    "jobs that are none": (lambda p: (*p.sweep(), "--jobs", 0), ("--jobs", "at least 1", "'0'")),
}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_one_line_and_exit_status_2(
    case: str,
    lapbench: Callable[..., Any],
    tiny: Path,
    few_digits: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make, expected = CASES[case]
    arguments = make(Place(tiny, few_digits, tmp_path))
    before = content(tmp_path)
    outcome = lapbench(*arguments)
    lines = outcome.err.splitlines()
    assert outcome.status == 2, lines
    assert outcome.out == ""
    # Only a run that has begun says so first.
    assert all(line.startswith(("training in ", "epoch 1/2  ")) for line in lines[:-1]), lines
    assert lines[-1].startswith("lapbench: error: ")
    for part in expected:
        assert part in lines[-1], lines[-1]
    assert len(lines[-1]) < 400, lines[-1]
    assert "Traceback" not in outcome.err
    after = content(tmp_path)
    assert {name: after.get(name) for name in before} == before
    assert not list(tmp_path.rglob("*.ckpt"))


def test_an_unknown_baseline_names_those_there_are(finished: Path, lapbench: Callable[..., Any]) -> None:
    outcome = lapbench("table", finished, "--baseline", "7L")
    (line,) = outcome.err.splitlines()
    assert outcome.status == 2
    assert "7L" in line
    assert "1L" in line


def test_the_checkpoint_of_another_model_is_one_line(finished: Path, lapbench: Callable[..., Any]) -> None:
    config, file = finished / "config.yaml", finished / "checkpoints/last.ckpt"
    outcome = lapbench("test", "--config", config, "--model.backbone.options.embed_dim", 32, "--ckpt_path", file)
    (line,) = outcome.err.splitlines()
    assert outcome.status == 2
    assert "size mismatch" in line
    assert len(line) < 400


def test_a_damaged_checkpoint_is_one_line_and_is_kept(
    finished: Path, fit: Callable[..., Any], lapbench: Callable[..., Any]
) -> None:
    file = finished / "checkpoints/last.ckpt"
    file.write_bytes(file.read_bytes()[:5000])
    record = json.loads((finished / "record.json").read_text())
    (finished / "record.json").write_text(json.dumps({**record, "status": "running"}))
    for outcome in (fit(finished), lapbench("test", "--config", finished / "config.yaml", "--run.dir", finished)):
        line = outcome.err.splitlines()[-1]
        assert outcome.status == 2
        assert line.startswith(f"lapbench: error: checkpoint {file}: not one, or damaged")
    assert file.stat().st_size == 5000
