"""Every shipped config can be used: alone, under each preset, and in the sweeps."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lapbench.backbones import Decoder, VisionBackbone
from lapbench.config_files import CONFIGS, config_names, find_config, load_yaml
from lapbench.datamodules import ImageShards
from lapbench.datamodules.segmentation import SegmentationFolder
from lapbench.datamodules.sharded import ShardedData
from lapbench.sweeps.grid import load_sweep
from lapbench.tasks import DINO
from lapbench.tasks.dino_head import check_crops
from lapbench.tasks.segmentation import check_data
from lapbench.training.parser import CLI

SWEEPS = config_names("sweeps")
PRESETS = [name for name in config_names() if "/presets/" in name]
COMPLETE = [name for name in config_names() if name not in PRESETS + SWEEPS]
IMAGES = [name for name in COMPLETE if name.startswith("supervised/")]
LANGUAGE = [name for name in COMPLETE if name.startswith("language/")]
SSL = [name for name in COMPLETE if name.startswith("ssl/")]
SEGMENTATION = [name for name in COMPLETE if name.startswith("segmentation/")]
TASKS = (
    "lapbench.tasks.DINO",
    "lapbench.tasks.FrozenBackbone",
    "lapbench.tasks.ImageClassification",
    "lapbench.tasks.LanguageModeling",
    "lapbench.tasks.SemanticSegmentation",
)
PAIRS = [
    (config, preset)
    for config in COMPLETE
    for preset in PRESETS
    if config.partition("/")[0] == preset.partition("/")[0]
    # It is for the two configs of small images whose model has patches of another size by itself.
    and (not preset.endswith("upscaled224") or "cifar" in config)
    # nanochat's are for its own models.
    and (config not in LANGUAGE or "/d20_" in config)
]


class Parsed(CLI):
    """Stops before anything is built."""

    def instantiate_classes(self) -> None:
        """Builds nothing."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "lightning.pytorch")


def parse(*configs: str | Path, arguments: tuple[str, ...] = ()) -> CLI:
    return Parsed("fit", [part for config in configs for part in ("--config", str(config))] + list(arguments))


def resolved(*configs: str) -> dict[str, Any]:
    """All settings of a run of these configs."""
    settings: dict[str, Any] = yaml.safe_load(parse(*configs)._dump())
    return settings


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}".lstrip("."))
    else:
        yield prefix, value


def test_the_names_are_those_that_the_documentation_promises() -> None:
    assert {f"supervised/{n}" for n in ("digits", "cifar10", "cifar100", "imagenet", "imagenet_finetune")} <= set(
        COMPLETE
    )
    assert {f"supervised/presets/{n}" for n in ("deit3", "authors")} <= set(PRESETS)
    assert {f"language/{n}" for n in ("pydocs", "d20_pretrain", "d20_midtrain", "d20_sft", "postnorm")} <= set(COMPLETE)
    assert {f"language/presets/{n}" for n in ("oct2025", "jan2026")} <= set(PRESETS)
    assert {f"ssl/{n}" for n in ("digits", "shapes", "imagenet_vits")} <= set(SSL)
    assert {f"segmentation/{n}" for n in ("shapes", "ade20k_linear", "ade20k_upernet")} <= set(SEGMENTATION)
    assert {f"sweeps/{n}" for n in ("quickstart", "table1", "language_tiny", "table2")} <= set(SWEEPS)
    assert {f"sweeps/{n}" for n in ("ssl_tiny", "table3")} <= set(SWEEPS)
    assert sorted(IMAGES + LANGUAGE + SSL + SEGMENTATION) == sorted(COMPLETE)


def of(family: list[str]) -> list[tuple[str, ...]]:
    """The configs of a family, alone and under each preset."""
    return [(name,) for name in family] + [pair for pair in PAIRS if pair[0] in family]


@pytest.mark.parametrize("configs", of(LANGUAGE), ids=" ".join)
def test_a_language_config_builds_its_model_and_data(configs: tuple[str, ...]) -> None:
    cli = parse(*configs)
    with torch.device("meta"):
        built = cli.parser.instantiate(cli.config)
    data, task = built["data"], built["model"]
    assert isinstance(data, ShardedData)
    assert isinstance(task.backbone, Decoder)
    assert task.backbone.schedule.name == "0L"
    assert data.context == task.backbone.context
    trainer, run = cli.config.trainer, cli.config.run
    assert (trainer.max_epochs or 0) > 0 or trainer.max_steps > 0
    assert (run.monitor, run.monitor_mode, run.test) == ("val/bits_per_byte", "min", "none")
    if trainer.max_steps > 0:  # the last step is validated
        assert trainer.max_steps % trainer.val_check_interval == 0
    if "/d20_" in configs[0]:
        assert sum(p.numel() for p in task.backbone.parameters()) == 560_988_160
        january = configs[-1].endswith("jan2026")
        assert task.muon_settings.embedding_lr == (0.3 if january else 0.2)
        assert task.backbone.architecture.head_std == (0.001 if january else 0.0)


@pytest.mark.parametrize("configs", of(IMAGES), ids=" ".join)
def test_a_config_builds_its_model_and_data(configs: tuple[str, ...]) -> None:
    cli = parse(*configs)
    with torch.device("meta"):  # shapes and settings without the work of first weights
        built = cli.parser.instantiate(cli.config)
    data, backbone = built["data"], built["model"].backbone
    assert isinstance(data, ImageShards)
    assert isinstance(backbone, VisionBackbone)
    assert built["model"].num_classes == data.num_classes
    assert backbone.schedule.name == "0L"
    # The images have the size and channels that the model takes.
    assert backbone.patch_embed.img_size == (data.image_size, data.image_size)
    assert backbone.patch_embed.proj.in_channels == data.channels
    assert cli.config.trainer.max_epochs > 0
    if built["model"].mixup is not None:
        assert data.batch_size % 2 == 0


@pytest.mark.parametrize("config", SSL)
def test_a_self_supervised_config_builds_its_model_and_data(config: str) -> None:
    cli = parse(config)
    with torch.device("meta"):
        built = cli.parser.instantiate(cli.config)
    data, task = built["data"], built["model"]
    assert isinstance(data, ImageShards)
    assert isinstance(task, DINO)
    check_crops(task.settings.name, task.student.backbone, data.image_size, data.multicrop)
    assert task.backbone.patch_embed.proj.in_channels == data.channels
    assert task.backbone.schedule.name == "0L"
    assert (cli.config.run.test, cli.config.trainer.gradient_clip_val) == ("none", None)
    assert [evaluation.name for evaluation in built["trainer"]["callbacks"]] == [
        *("linear", "knn", "segmentation", "geometry")
    ]


@pytest.mark.parametrize("config", SEGMENTATION)
def test_a_segmentation_config_builds_its_model_and_data(config: str) -> None:
    cli = parse(config)
    with torch.device("meta"):
        built = cli.parser.instantiate(cli.config)
    data, task = built["data"], built["model"]
    assert isinstance(data, SegmentationFolder)
    assert (task.num_classes, task.backbone.schedule.name) == (data.num_classes, "0L")
    check_data(task, data, world_size=8)
    assert (cli.config.run.monitor, cli.config.run.monitor_mode) == ("val/miou", "max")
    if config.startswith("segmentation/ade20k"):  # 16 images in a step of 8 devices
        assert data.batch_size == 2
        assert task.hparams["inference"] == {"mode": "slide", "crop_size": 512, "stride": 341}


@pytest.mark.parametrize(("config", "preset"), PAIRS)
def test_a_preset_changes_what_it_names_and_nothing_else(config: str, preset: str) -> None:
    before, after = dict(flat(resolved(config))), dict(flat(resolved(config, preset)))
    named = dict(flat(load_yaml(find_config(preset))))
    assert {key: after.get(key) for key in named} == named
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    # `options: {}` of another optimizer also takes away what was below it, and another task the settings of this one.
    if "model.class_path" in changed:
        changed &= after.keys()
    assert all(key in named or key.rpartition(".")[0] in named for key in changed)


def test_the_imagenet_config_is_deit3() -> None:
    alone, with_preset = resolved("supervised/imagenet"), resolved("supervised/imagenet", "supervised/presets/deit3")
    assert alone == with_preset
    init = alone["model"]["init_args"]
    assert init["optimizer"]["name"] == "lamb"
    assert (init["loss"], init["label_smoothing"]) == ("bce_binarized", 0.0)
    assert alone["data"]["init_args"]["repeats"] == 3


def test_a_run_goes_by_the_last_config_that_names_a_key(tmp_path: Path) -> None:
    for name, rate in (("a", "1e-4"), ("b", "2e-4")):
        (tmp_path / f"{name}.yaml").write_text(f"model: {{init_args: {{optimizer: {{lr: {rate}}}}}}}\n")
    one, two = tmp_path / "a.yaml", tmp_path / "b.yaml"

    def rate(*configs: str | Path, arguments: tuple[str, ...] = ()) -> float:
        value: float = parse("supervised/cifar10", *configs, arguments=arguments).config.model.init_args.optimizer.lr
        return value

    assert (rate(), rate(one), rate(two, one), rate(one, two)) == (5e-4, 1e-4, 1e-4, 2e-4)
    assert rate(one, arguments=("--model.optimizer.lr", "3e-4")) == 3e-4


def test_numbers_are_numbers(tmp_path: Path) -> None:
    """Also where YAML 1.1 sees text, as in 1e-4, and where a setting has no declared type."""
    file = tmp_path / "numbers.yaml"
    file.write_text(
        "model: {init_args: {optimizer: {lr: 1e-4, options: {eps: 1e-7}}, backbone: {layer_scale: 1e-5}}}\n"
    )
    arguments = ("--model.optimizer.weight_decay", "1e-2", "--model.optimizer.options.betas", "[9e-1, 0.99]")
    init = parse("supervised/cifar10", file, arguments=arguments).config.model.init_args
    assert (init.optimizer.lr, init.optimizer.weight_decay, init.backbone.layer_scale) == (1e-4, 1e-2, 1e-5)
    assert init.optimizer.options == {"eps": 1e-7, "betas": [0.9, 0.99]}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_sweep_plans_runs_that_parse(name: str) -> None:
    plan = load_sweep(name).plan()
    assert len({run.folder for run in plan.runs}) == len(plan.runs) > 1
    for run in (plan.runs[0], plan.runs[-1]):
        cli = Parsed("fit", list(run.arguments))
        with torch.device("meta"):
            built = cli.parser.instantiate(cli.config)
        assert built["model"].backbone.schedule.name == ("0L" if run.reference else f"{run.labels['heads']}L")
        assert str(cli.config.seed_everything) == run.labels.get("seed", "0")
        assert "geometry" in [evaluation.name for evaluation in built["trainer"]["callbacks"]]


def test_the_quickstart_is_three_schedules_by_three_seeds() -> None:
    plan = load_sweep("quickstart").plan()
    assert [(run.labels["heads"], run.labels["seed"]) for run in plan.runs] == [
        (heads, seed) for heads in "024" for seed in "012"
    ]
    assert (plan.baseline, plan.metrics) == ("0L", ("test/top1",))


@pytest.fixture(params=COMPLETE + PRESETS + SWEEPS)
def header(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Name and leading comment of a config, without the marks."""
    lines = (CONFIGS / f"{request.param}.yaml").read_text(encoding="utf-8").splitlines()
    count = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return request.param, "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[:count])


def test_a_header_tells_what_the_config_is_for(header: tuple[str, str]) -> None:
    name, text = header
    assert len(text.splitlines()[0]) > 20
    expected = ("Command", "Sources") if name in PRESETS else ("Command", "Cost", "Expected", "Sources")
    for key in expected:
        assert re.search(rf"^{key}: +\S", text, re.MULTILINE), f"{name} has no {key}"


def test_the_commands_of_a_header_name_configs_and_keys_that_exist(header: tuple[str, str]) -> None:
    name, text = header
    joined = text.replace("\\\n", " ")
    named = re.findall(r"(?:--config|lapbench sweep) ([\w./]+)", joined)
    below = "sweeps" if name in SWEEPS else ""
    assert name in {find_config(found, below).relative_to(CONFIGS).with_suffix("").as_posix() for found in named}
    for command in re.findall(r"lapbench fit ([^\n]*)", joined):
        words = command.partition("(")[0].split()
        assert parse(arguments=tuple(words)).config.model.class_path in TASKS


def test_every_config_is_a_file_that_a_wheel_takes() -> None:
    """Package data are *.yaml; a config under another name would be left out."""
    files = [path for path in CONFIGS.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".yaml"}
    assert sorted(COMPLETE + PRESETS + SWEEPS) == config_names()
