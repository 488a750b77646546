"""Sweep files: a grid of axes that becomes a list of runs.

A sweep file is YAML::

    name: quickstart                     # default: the file's name
    base: [supervised/digits]            # --config arguments of each run: names or paths, applied in order
    axes:
      # an axis with a key sets that key to each of its values in turn
      heads: {key: model.init_args.backbone.heads, values: [0, 2, 4]}
      seed: {key: seed_everything, values: [0, 1, 2]}
      # a mapping gives the values names of their own: useful for lists, and for values that set several keys;
      # `config` adds --config arguments for that value
      order: {key: data.init_args.order, values: {forward: [0, 1], backward: [1, 0]}}
      data:
        values:
          cifar10: {config: supervised/cifar10}
          imagenet: {config: [supervised/imagenet, supervised/presets/deit3], trainer.max_epochs: 300}
    overrides: {trainer.max_epochs: 60}  # keys that are set for every run
    baseline: 0L                         # schedule that the table compares with
    metric: test/top1                    # metric that the table shows, or a list of several

The axis of heads may have references: runs to compare the schedules with, such as the same backbone untrained. Each is
written like a labelled value; what it sets goes before the keys of ``overrides``::

    heads:
      key: model.init_args.backbone.heads
      values: [0, 2, 4]
      references:
        untrained: {trainer.max_epochs: 0}
        raw pixels: {config: ssl/presets/pixels}

They are combined with the other axes as the values are. In the table they stand below the schedules, in rows named by
their labels; they are neither ranked nor compared, and a metric that one does not have is left blank.

With ``stages``, each cell of the grid is a chain of runs instead of one::

    stages:                              # in this order; each is written like a value of an axis
      pretrain: {config: language/d20_pretrain}
      midtrain: {config: language/d20_midtrain, model.init_args.init_from: "{pretrain}"}
      sft: {config: language/d20_sft, model.init_args.init_from: "{midtrain}"}

``{pretrain}`` in a string stands for the run folder of that earlier stage of the same cell. Configs are applied in the
order base, stage, axes; axes and overrides hold for every stage. A stage starts when the stage before it has finished,
in the folder ``heads-2_seed-0/midtrain``. The table shows the last stage, ``lapbench table --stage`` an earlier one.

Keys are those of ``lapbench fit``, written with dots. The runs are all combinations, the first axis varying slowest.
A run's folder is named after its values: ``heads-2_seed-0``. In the table the axis of ``....heads`` makes the rows,
that of ``seed_everything`` is averaged over, and any other makes columns.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lapbench.config_files import find_config, load_yaml
from lapbench.errors import UserError
from lapbench.sweeps.stages import check_references
from lapbench.sweeps.sweep import Axis, Setting, Sweep, as_argument, safe

TOP_LEVEL = ("name", "base", "axes", "stages", "overrides", "baseline", "metric")
RESERVED = {"config": "use `base` for configs", "run.dir": "each run gets its own folder"}
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*\+?")


def load_sweep(path_or_name: str | Path) -> Sweep:
    """Read a sweep file, by path or by name ("quickstart" or "sweeps/quickstart").

    Raises:
        UserError: not found, bad YAML, or a key that is wrong: names file, key, what was expected and what was got.
    """
    path = find_config(str(path_or_name), below="sweeps")
    values = load_yaml(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a mapping with the keys {', '.join(TOP_LEVEL)}, got {_kind(values)}")
    for key in values:
        if key not in TOP_LEVEL:
            near = difflib.get_close_matches(str(key), TOP_LEVEL, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(TOP_LEVEL)}"
            raise UserError(f"{path}: unknown key {key!r}: {hint}")
    name = values.get("name", path.stem)
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise UserError(f"{path}: key 'name': expected letters, digits, '.', '_' and '-', got {name!r}")
    overrides = _keys(values.get("overrides") or {}, f"{path}: key 'overrides'")
    sweep = Sweep(
        name=name,
        source=path,
        base=_configs(values.get("base") or [], f"{path}: key 'base'"),
        axes=_axes(values.get("axes"), f"{path}: key 'axes'"),
        stages=_stages(values["stages"], f"{path}: key 'stages'") if "stages" in values else {},
        overrides=overrides,
        baseline=_baseline(values.get("baseline"), f"{path}: key 'baseline'"),
        metrics=_metrics(values.get("metric"), f"{path}: key 'metric'"),
    )
    _refuse_conflicts(sweep)
    check_references(sweep)
    return sweep


def _axes(values: Any, where: str) -> tuple[Axis, ...]:
    if not isinstance(values, dict) or not values:
        raise UserError(f"{where}: expected a mapping of at least one axis, got {_kind(values)}")
    axes: list[Axis] = []
    for name, value in values.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{where}: axis {name!r}: expected a name of letters, digits, '.', '_' and '-'")
        axis = _axis(name, value, f"{where}: axis {name!r}")
        if axis.role == "schedule" and any(other.role == "schedule" for other in axes):
            axis = replace(axis, role="column")  # a table has one axis of rows
        if axis.references and axis.role != "schedule":
            raise UserError(f"{where}: axis {name!r}: key 'references': expected on the axis of heads only")
        axes.append(axis)
    return tuple(axes)


def _axis(name: str, value: Any, where: str) -> Axis:
    if not isinstance(value, dict) or "values" not in value or not value.keys() <= {"key", "values", "references"}:
        raise UserError(
            f"{where}: expected {{key: ..., values: ...}} or {{values: ...}} (and references), got {_shorten(value)}"
        )
    key, values = value.get("key"), value["values"]
    if not isinstance(values, (list, dict)) or not values:
        raise UserError(f"{where}: key 'values': expected a list or mapping of at least one value, got {_kind(values)}")
    pairs = [(as_argument(v), v) for v in values] if isinstance(values, list) else list(values.items())
    settings: list[tuple[str, Setting]] = []
    for label, item in ((as_argument(label), item) for label, item in pairs):
        if "key" in value:
            settings.append((label, Setting(keys=_keys({key: item}, where))))
        elif isinstance(values, dict):
            settings.append((label, _setting(item, f"{where}: value {label!r}")))
        else:
            raise UserError(f"{where}: a list of values needs a `key` (without one: a mapping of label to settings)")
    references = _labelled(value["references"], f"{where}: key 'references'") if "references" in value else {}
    settings += references.items()
    labels = [label for label, _ in settings]
    if len(set(labels)) < len(labels):
        repeated = next(label for label in labels if labels.count(label) > 1)
        raise UserError(f"{where}: key 'values': expected each value once, got {repeated} twice")
    return Axis(name, _role(key), dict(settings), tuple(references))


def _labelled(values: Any, where: str) -> dict[str, Setting]:
    if not isinstance(values, dict) or not values:
        raise UserError(f"{where}: expected a mapping of label to settings, got {_kind(values)}")
    return {
        as_argument(label): _setting(item, f"{where}: value {as_argument(label)!r}") for label, item in values.items()
    }


def _stages(values: Any, where: str) -> dict[str, Setting]:
    if not isinstance(values, dict) or not values:
        raise UserError(f"{where}: expected a mapping of at least one stage, got {_kind(values)}")
    folders: dict[str, str] = {}
    for name in values:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UserError(f"{where}: stage {name!r}: expected a name of letters, digits, '.', '_' and '-'")
        if (other := folders.setdefault(safe(name).casefold(), name)) != name:
            raise UserError(f"{where}: stages {other!r} and {name!r} would share the folder {safe(name)}")
    return {name: _setting(value, f"{where}: stage {name!r}") for name, value in values.items()}


def _role(key: str | None) -> str:
    if key == "seed_everything":
        return "seed"
    return "schedule" if key is not None and key.rpartition(".")[2] == "heads" else "column"


def _setting(value: Any, where: str) -> Setting:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a mapping of keys (and `config`), got {_kind(value)}")
    configs = _configs(value.get("config") or [], f"{where}: key 'config'")
    return Setting(configs, _keys({key: v for key, v in value.items() if key != "config"}, where))


def _configs(value: Any, where: str) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{where}: expected a config or a list of configs, got {_shorten(value)}")
    return tuple(names)


def _keys(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a mapping of keys to values, got {_kind(value)}")
    for key in value:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise UserError(f"{where}: expected a key of `lapbench fit` such as trainer.max_epochs, got {key!r}")
        if key in RESERVED:
            raise UserError(f"{where}: key {key!r} cannot be set here: {RESERVED[key]}")
        if "\0" in as_argument(value[key]):
            raise UserError(f"{where}: value {value[key]!r}: a NUL character cannot be passed to a program")
    return dict(value)


def _baseline(value: Any, where: str) -> str | None:
    if value is not None and not (isinstance(value, str) and value):
        raise UserError(f"{where}: expected a name, got {value!r}")
    return value


def _metrics(value: Any, where: str) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [] if value is None else [value]
    if value == [] or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"{where}: expected a name or a list of names, got {_shorten(value)}")
    if len({*names}) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise UserError(f"{where}: expected each metric once, got {repeated} twice")
    return tuple(names)


def _refuse_conflicts(sweep: Sweep) -> None:
    """A key may be set in one place only: elsewhere one of the two values would be lost without a word."""
    groups = [(f"axis {axis.name!r}", axis.values()) for axis in sweep.axes]
    groups += [("stages", list(sweep.stages.values()))] if sweep.stages else []
    owners = dict.fromkeys(sweep.overrides, "overrides")
    for name, settings in groups:
        keys = dict.fromkeys(key for setting in settings for key in setting.keys)
        _refuse_overlap(sweep, name, keys, owners)
        owners |= dict.fromkeys(keys, name)
    for axis in sweep.axes:  # a reference is there to differ: from the values of its axis, and from overrides
        elsewhere = {key: name for key, name in owners.items() if name not in (f"axis {axis.name!r}", "overrides")}
        for label in axis.references:
            _refuse_overlap(sweep, f"reference {label!r}", axis.settings[label].keys, elsewhere)


def _refuse_overlap(sweep: Sweep, name: str, keys: Iterable[str], owners: Mapping[str, str]) -> None:
    for key in keys:
        for other, owner in owners.items():
            if _overlap(key, other):
                what = f"key {key!r}" if key == other else f"keys {key!r} and {other!r}"
                raise UserError(f"{sweep.source}: {what}: expected in one place, got {name} and {owner}")


def _overlap(a: str, b: str) -> bool:
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return f"{'a mapping' if isinstance(value, dict) else 'a list'}{' without entries' if not value else ''}"
    return _shorten(value)


def _shorten(value: Any, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else f"{text[: width - 3]}..."
