"""References between the stages of a sweep: ``{pretrain}`` in a value stands for the folder of that stage's run.

Plans keep the references, so that the folder of a sweep can be moved; commands get the folders.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lapbench.errors import UserError
from lapbench.sweeps.sweep import Setting, Sweep

_REFERENCE = re.compile(r"\{([A-Za-z][A-Za-z0-9._-]*)\}")


def with_folders(argument: str, earlier: Mapping[str, str], out: Path) -> str:
    """``argument`` with each reference as an absolute path.

    Args:
        argument: one of a run's arguments.
        earlier: the folders of the run's earlier stages in ``out``, by the stage's name.
        out: folder of the sweep.
    """
    return _REFERENCE.sub(
        lambda match: str((out / earlier[match[1]]).absolute()) if match[1] in earlier else match[0], argument
    )


def check_references(sweep: Sweep) -> None:
    """UserError: a reference to something else than an earlier stage, in a place where it is not replaced, or none."""
    stages = list(sweep.stages)
    for index, (name, stage) in enumerate(sweep.stages.items()):
        where = f"{sweep.source}: key 'stages': stage {name!r}"
        _check_stage(stage, stages[:index], stages, where)
    for key, value in sweep.overrides.items():
        _refuse(key, value, stages, f"{sweep.source}: key 'overrides'", "write it in the stages that need it")
    for axis in sweep.axes:
        for label, setting in axis.settings.items():
            where = f"{sweep.source}: key 'axes': axis {axis.name!r}: value {label!r}"
            for key, value in setting.keys.items():
                _refuse(key, value, stages, where, "write it in the stages that need it")


def _check_stage(stage: Setting, earlier: Sequence[str], stages: Sequence[str], where: str) -> None:
    found = False
    for key, value in stage.keys.items():
        if not isinstance(value, str):
            _refuse(key, value, stages, where, "expected a string, in quotes, under a key of its own")
            continue
        for name in _REFERENCE.findall(value):
            if name not in earlier:
                raise UserError(f"{where}: key {key!r}: {{{name}}}: {_expected(name, earlier)}")
            found = True
    if earlier and not found:
        raise UserError(
            f"{where}: expected a key that refers to an earlier stage, such as "
            f"model.init_args.init_from: '{{{earlier[-1]}}}', got none"
        )


def _expected(name: str, earlier: Sequence[str]) -> str:
    if not earlier:
        return "expected no reference, as no stage comes before the first"
    near = difflib.get_close_matches(name, earlier, n=1)
    hint = f"did you mean {{{near[0]}}}?" if near else f"expected one of {', '.join(earlier)}"
    return f"no earlier stage: {hint}"


def _refuse(key: str, value: Any, stages: Sequence[str], where: str, advice: str) -> None:
    for name in _names(value):
        if name in stages:
            raise UserError(f"{where}: key {key!r}: {{{name}}} is not replaced by a folder here: {advice}")


def _names(value: Any) -> Iterator[str]:
    """What looks like a reference in ``value``: also ``{pretrain}`` without quotes, which is a mapping in YAML."""
    if isinstance(value, str):
        yield from _REFERENCE.findall(value)
    elif isinstance(value, dict):
        if list(value.values()) == [None]:
            yield from (key for key in value if isinstance(key, str))
        for item in value.values():
            yield from _names(item)
    elif isinstance(value, list):
        for item in value:
            yield from _names(item)
