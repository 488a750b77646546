"""``lapbench evaluate MODEL``: a timm model as it is, in a run of 0 epochs with the evaluations as its callbacks."""

import difflib
import json
from collections.abc import Iterator
from typing import Any

import timm

from lapbench.backbones import VisionSettings
from lapbench.backbones.vision import PIXELS
from lapbench.config_files import find_config, load_yaml
from lapbench.datamodules.images import ImageShards
from lapbench.errors import UserError
from lapbench.training.evaluate_arguments import Request


def fit_arguments(request: Request) -> list[str]:
    """The request as arguments of ``lapbench fit``.

    Raises:
        UserError: No such model, no config with data.
    """
    options = request.options
    _check_name(options.what)
    data = [argument for name in options.config for argument in _data_arguments(name)]
    if not data and not any(argument.startswith("--data.class_path") for argument in request.of("data")):
        raise UserError("--config: expected one with data for the evaluations, such as supervised/digits, got none")
    start = {"name": options.what, "pretrained": options.pretrained, "weights": options.weights}
    return [
        *("--trainer.accelerator", "auto", "--trainer.devices", "1", "--trainer.max_epochs", "0"),
        *("--trainer.callbacks", json.dumps(request.suite().callbacks())),
        *("--run.test", "none", *(("--run.dir", options.out) if options.out is not None else ())),
        *("--model", "lapbench.tasks.FrozenBackbone"),
        *("--model.backbone", json.dumps({key: value for key, value in start.items() if value})),
        *data,
        *request.of("trainer", "model", "data"),
    ]


def normalization_note(settings: VisionSettings, data: object) -> str | None:
    """What to know of scores of weights that saw other normalised images than ``data`` gives; None if they did not."""
    trained = timm.get_pretrained_cfg(settings.name) if settings.pretrained or settings.weights is not None else None
    if trained is None or not isinstance(data, ImageShards):
        return None
    theirs, ours = (trained.mean, trained.std), (data.mean, data.std)
    if theirs == ours:
        return None
    return (
        f"timm's weights of {settings.name} are for images normalised by mean and std {theirs}, {type(data).__name__} "
        f"normalises by {ours}"
    )


def _check_name(name: str) -> None:
    if name == PIXELS or timm.is_model(name.partition(".")[0]):
        return
    near = difflib.get_close_matches(name, timm.list_models(), n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(
        f"{name}: expected the folder of a run or the name of a timm model: there is no such folder, and timm "
        f"{timm.__version__} has no such model{hint}"
    )


def _data_arguments(config: str) -> Iterator[str]:
    """The data section of a config, each setting as an argument, so that those after it can change some of them."""
    file = find_config(config)
    content = load_yaml(file)
    section: Any = content.get("data") if isinstance(content, dict) else None
    if section is None:
        raise UserError(f"{file}: expected a config with a data section, it has none")
    if isinstance(section, str):
        section = {"class_path": section}
    if "class_path" in section:
        yield f"--data={section['class_path']}"
    for key, value in section.get("init_args", {}).items():
        yield f"--data.{key}={value if isinstance(value, str) else json.dumps(value)}"
