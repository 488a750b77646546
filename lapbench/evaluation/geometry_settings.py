"""The settings of token geometry, and what they mean for a task and its data."""

import difflib
from dataclasses import dataclass
from typing import Any, Literal

import lightning.pytorch as pl

from lapbench.backbones import Decoder, VisionBackbone
from lapbench.errors import UserError
from lapbench.evaluation.features import has_class_token
from lapbench.evaluation.geometry_data import check_data
from lapbench.evaluation.geometry_measures import MEASURES, Chosen, Tokens, Unit, left_out


@dataclass(frozen=True)
class GeometrySettings:
    """The settings of ``TokenGeometry``, as its section in the record shows them."""

    measures: tuple[str, ...] | None
    layers: Literal["all", "last"] | tuple[int, ...]
    max_samples: int | None
    split: Literal["auto", "val", "test"]
    tokens: Tokens
    unit: Unit
    alpha: float
    every_n_epochs: int | None
    pictures: bool

    def check(self, where: str) -> None:
        """UserError if one of them is out of range."""
        for measure in self.measures or ():
            if measure not in MEASURES:
                near = difflib.get_close_matches(measure, MEASURES, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                raise UserError(f"{where}.measures: expected some of {', '.join(MEASURES)}, got {measure!r}{hint}")
        layers_are_good = self.layers in ("all", "last") or _numbers(self.layers)
        for setting, good, expected in (
            ("measures", self.measures is None or _distinct(self.measures), "different ones or null"),
            (
                "layers",
                self.layers in ("all", "last") or _numbers(self.layers),
                "all, last or different numbers from 0",
            ),
            ("max_samples", self.max_samples is None or self.max_samples >= 1, "at least 1 or null"),
            ("alpha", 0 < self.alpha < 1, "0 < value < 1"),
            ("every_n_epochs", self.every_n_epochs is None or self.every_n_epochs >= 1, "at least 1 or null"),
        ):
            if not good:
                raise UserError(f"{where}.{setting}: expected {expected}, got {getattr(self, setting)}")


def choose(s: GeometrySettings, task: pl.LightningModule, data: Any, where: str) -> tuple[Chosen, dict[str, str]]:
    """What is measured of a task.

    Args:
        s: The settings.
        task: Its backbone is measured.
        data: What its tokens come from; set up already.
        where: The evaluation's class.

    Returns:
        The choice; and where measures were not named, why those that are missing do not apply.

    Raises:
        UserError: What was asked for is not there.
    """
    backbone: Any = getattr(task, "backbone", None)
    if not isinstance(backbone, VisionBackbone | Decoder):
        raise UserError(f"{where}: expected a task with a backbone, got {type(task).__name__}")
    check_data(data, backbone, where)
    depth = backbone.num_layers
    layers = {"all": tuple(range(depth)), "last": (depth - 1,)}[s.layers] if isinstance(s.layers, str) else s.layers
    if layers[-1] >= depth:
        raise UserError(f"{where}.layers: expected blocks of the backbone, 0..{depth - 1}, got {layers[-1]}")
    classes = data.vocab_size if isinstance(backbone, Decoder) else data.num_classes
    reasons = left_out(task, classes, layers)
    for measure in s.measures or ():
        if measure in reasons:
            raise UserError(f"{where}.measures: {measure} does not apply: {reasons[measure]}")
    if s.unit == "class token" and isinstance(backbone, VisionBackbone) and not has_class_token(backbone):
        raise UserError(f"{where}.unit: expected sequence mean, as the backbone has no class token, got {s.unit}")
    if s.measures is not None:
        return Chosen(tuple(m for m in MEASURES if m in s.measures), layers, s.tokens, s.unit, s.alpha), {}
    return Chosen(tuple(m for m in MEASURES if m not in reasons), layers, s.tokens, s.unit, s.alpha), reasons


def _distinct(values: tuple[Any, ...]) -> bool:
    return len(values) > 0 and len(set(values)) == len(values)


def _numbers(values: Any) -> bool:
    return not isinstance(values, str) and _distinct(values) and min(values) >= 0
