"""One line, with the nearest right key, from jsonargparse's pages of explanation."""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, get_args

from lapbench.training.settings import RunSettings

# What jsonargparse says around the reason: the members of `Module | None`, and the whole value that it was given.
_NOISE = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes: |Errors:|- Expected a <class 'NoneType'>|"
    r"Given value type: |Given value: Namespace|Given value: NestedArg|Given value: \{"
)
_UNKNOWN = (
    r"unrecognized arguments: --(?P<key>[\w.]+)",
    r"ambiguous option: --(?P<key>[\w.]+)",
    r"Group '(?P<group>[\w.]+)' does not accept option '(?P<key>[\w.]+)'",
    r"Option '(?P<key>[\w.]+)' is not accepted",
)


def one_line(message: str, known: Iterable[str] = ()) -> str:
    """Shortens a message of the parser.

    Args:
        message: What jsonargparse says, on many lines.
        known: Keys that the command accepts, to suggest the nearest one.
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if not _NOISE.search(line)]
    text = " ".join(line for line in lines if line)
    text = re.sub(r'Parser key "([\w.]+)":\s*', r"\1: ", text)
    text = re.sub(r"<class '(\w+)'>", r"\1", text).replace("typing.", "")
    if match := re.search(r"the following arguments are required: (\w+)", text):
        return f"{match[1]}: expected a class_path, got none; give --config, for example supervised/digits"
    for pattern in _UNKNOWN:
        if match := re.search(pattern, text):
            groups = match.groupdict()
            key = ".".join(filter(None, (groups.get("group"), groups["key"])))
            return f"unknown key {key!r}{_nearest(key, known)}"
    return text


def _nearest(key: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    last = key.rsplit(".", 1)[-1]
    begun = sorted((n for n in names if n.startswith(key)), key=len)
    near = begun[:1] or difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    # A key typed without its parents, or with other ones: compare the last parts.
    near = (
        near
        or [n for n in names if n.rsplit(".", 1)[-1] in difflib.get_close_matches(last, _last_parts(names), n=1)][:1]
    )
    return f"; did you mean {near[0]!r}?" if near else ""


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.rsplit(".", 1)[-1] for name in names})


def known_keys(classes: Iterable[Callable[..., Any]]) -> set[str]:
    """Keys of the given models' and data modules' settings, of ``run`` and of the trainer, as a config writes them."""
    from lightning.pytorch import Trainer

    keys = {"seed_everything", "trainer", "model", "data", "run", "ckpt_path", "model.class_path", "model.init_args"}
    keys |= {f"trainer.{name}" for name in _parameters(Trainer)} | {f"run.{name}" for name in _parameters(RunSettings)}
    for cls in classes:
        keys.update(_parameters(cls))
    return keys


def _parameters(cls: Callable[..., Any]) -> Iterator[str]:
    for name, parameter in inspect.signature(cls).parameters.items():
        yield name
        for kind in (parameter.annotation, *get_args(parameter.annotation)):  # `Settings | None` among them
            if dataclasses.is_dataclass(kind) and isinstance(kind, type):
                yield from (f"{name}.{inner}" for inner in _parameters(kind))
