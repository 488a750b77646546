"""A checked sweep, and the runs that it becomes: their folders, arguments and order."""

import hashlib
import itertools
import json
import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lapbench.config_files import find_config, load_yaml
from lapbench.errors import UserError
from lapbench.results.plan import Plan, PlannedRun

LONGEST_LABEL = 24
LONGEST_FOLDER = 200


@dataclass(frozen=True)
class Setting:
    """What one value of an axis, or one stage, sets."""

    configs: tuple[str, ...] = ()
    keys: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Axis:
    """Settings by label, in order. ``role`` is the axis's place in a table, see `lapbench.results.plan.Plan`.

    ``references`` are the labels of those that are no values of the axis, but there to compare with.
    """

    name: str
    role: str
    settings: dict[str, Setting]
    references: tuple[str, ...] = ()

    def values(self) -> list[Setting]:
        """The settings that are no references."""
        return [setting for label, setting in self.settings.items() if label not in self.references]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep file."""

    name: str
    source: Path
    base: tuple[str, ...]
    axes: tuple[Axis, ...]
    overrides: dict[str, Any]
    baseline: str | None
    metrics: tuple[str, ...]
    stages: dict[str, Setting] = field(default_factory=dict)

    def plan(self) -> Plan:
        """All runs of the grid, those of a chain one after the other, so that a sweep finishes chains early.

        Raises:
            UserError: a config is missing or broken, or two runs would share a folder.
        """
        digests: dict[str, str] = {}
        runs: dict[str, PlannedRun] = {}
        for combination in itertools.product(*(axis.settings for axis in self.axes)):
            labels = dict(zip((axis.name for axis in self.axes), combination, strict=True))
            for run in self._chain(labels, digests):
                # Some file systems do not tell upper from lower case.
                other = runs.setdefault(run.folder.casefold(), run)
                if other is not run:
                    raise UserError(f"{self.source}: {other.labels} and {labels} would share the folder {run.folder}")
        axes = {axis.name: axis.role for axis in self.axes}
        return Plan(self.name, axes, tuple(runs.values()), self.baseline, self.metrics)

    def _chain(self, labels: dict[str, str], digests: dict[str, str]) -> list[PlannedRun]:
        """The runs of one cell: its stages, or the one run of a sweep without stages."""
        settings = [axis.settings[labels[axis.name]] for axis in self.axes]
        reference = next((labels[axis.name] for axis in self.axes if labels[axis.name] in axis.references), None)
        folder = "_".join(f"{safe(axis)}-{safe(label)}" for axis, label in labels.items())
        if len(folder) > LONGEST_FOLDER:
            raise UserError(
                f"{self.source}: folder name of {len(folder)} characters, expected at most {LONGEST_FOLDER}"
            )
        if not self.stages:
            return [PlannedRun(folder, labels, *self._arguments(settings, digests), reference=reference)]
        runs: list[PlannedRun] = []
        earlier: dict[str, str] = {}
        for name, stage in self.stages.items():
            run = PlannedRun(f"{folder}/{safe(name)}", labels, *self._arguments([stage, *settings], digests))
            runs.append(replace(run, stage=name, earlier=dict(earlier), reference=reference))
            earlier[name] = run.folder
        return runs

    def _arguments(self, settings: list[Setting], digests: dict[str, str]) -> tuple[tuple[str, ...], dict[str, str]]:
        """Arguments of a run, and the digests of its configs."""
        configs = [*self.base, *(name for setting in settings for name in setting.configs)]
        if not configs:
            raise UserError(f"{self.source}: key 'base': expected at least one config, got none")
        for name in configs:
            if name not in digests:
                digests[name] = digest(load_yaml(find_config(name)))
        keys = self.overrides | {key: value for setting in settings for key, value in setting.keys.items()}
        arguments = [part for name in configs for part in ("--config", name)]
        arguments += [f"--{key}={as_argument(value)}" for key, value in keys.items()]
        return tuple(arguments), {name: digests[name] for name in configs}


def as_argument(value: Any) -> str:
    """A YAML value as ``lapbench fit`` reads it after ``--key=``, and as tables call it."""
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def safe(label: str) -> str:
    """``label`` as part of a folder's name; a long or structured one is cut and gets a digest to stay distinct."""
    name = re.sub(r"[^A-Za-z0-9.+-]+", "-", label)
    if len(label) <= LONGEST_LABEL and not label.startswith(("[", "{")) and name.strip("-."):
        return name
    return f"{name[:LONGEST_LABEL].strip('-.')}-{digest(label)}".lstrip("-")


def digest(value: Any) -> str:
    """Tells the contents of two YAML files apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:8]
