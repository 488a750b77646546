"""``record.json``: what is known about one run. Tables read nothing else."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lapbench.errors import UserError
from lapbench.results.files import read_json, unplain, write_json

FILE_NAME = "record.json"
FORMAT = 1
STATUSES = ("running", "finished", "failed", "interrupted")


@dataclass(frozen=True)
class Record:
    """One run. ``dataclasses.replace(record, status="finished", ...)`` makes the next version of it.

    Metrics are named ``split/name`` ("test/top1"); accuracies are fractions in [0, 1]. ``schedule`` is
    ``HeadSchedule.name`` ("0L" has attention heads only). ``throughput`` is in samples/s, ``wall_time`` in seconds,
    ``started`` and ``finished`` are ISO 8601. ``error`` is one line. ``checkpoint`` says which one the test metrics
    are from ("last", "best val/top1", ...). ``progress`` holds epoch, max_epochs, step and max_steps. ``notes`` are
    facts on how the run went that a reader of its metrics should know, such as damaged images.
    """

    task: str
    data: str
    backbone: str
    schedule: str
    seed: int | None
    status: str = "running"
    metrics: dict[str, float] = field(default_factory=dict)
    progress: dict[str, int | None] = field(default_factory=dict)
    parameters: int | None = None
    throughput: float | None = None
    wall_time: float | None = None
    started: str | None = None
    finished: str | None = None
    error: str | None = None
    git_revision: str | None = None
    versions: dict[str, Any] = field(default_factory=dict)
    hardware: dict[str, Any] = field(default_factory=dict)
    evaluations: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = field(default=None, compare=False)
    """Where it was read from; not part of the file."""

    @property
    def failed_evaluations(self) -> dict[str, str]:
        """Why, by the name of the evaluation. The run itself has finished all the same."""
        return {name: section["error"] for name, section in self.evaluations.items() if "error" in section}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_null(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _maps_to(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(check(item) for item in value.values())


_TEXT = ("a string", _is_text)
_TEXT_OR_NULL = ("a string or null", _or_null(_is_text))
_NUMBER_OR_NULL = ("a number or null", _or_null(_is_number))
_INT_OR_NULL = ("an integer or null", _or_null(_is_int))
_OBJECT = ("an object", lambda value: isinstance(value, dict))

_SCHEMA: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "status": (f"one of {', '.join(STATUSES)}", lambda value: value in STATUSES),
    "task": _TEXT,
    "data": _TEXT,
    "backbone": _TEXT,
    "schedule": _TEXT,
    "seed": _INT_OR_NULL,
    "metrics": ("an object of numbers", _maps_to(_is_number)),
    "progress": ("an object of integers or nulls", _maps_to(_or_null(_is_int))),
    "parameters": _INT_OR_NULL,
    "throughput": _NUMBER_OR_NULL,
    "wall_time": _NUMBER_OR_NULL,
    "started": _TEXT_OR_NULL,
    "finished": _TEXT_OR_NULL,
    "error": _TEXT_OR_NULL,
    "git_revision": _TEXT_OR_NULL,
    "versions": _OBJECT,
    "hardware": _OBJECT,
    "evaluations": _OBJECT,
    "checkpoint": _TEXT_OR_NULL,
    "notes": _OBJECT,
}
_MAY_BE_NON_FINITE = ("metrics", "throughput", "wall_time", "evaluations", "notes")


def _check(values: dict[str, Any], where: str) -> None:
    for key, (expected, accepts) in _SCHEMA.items():
        if key not in values:
            raise UserError(f"{where}: key {key!r} is missing, expected {expected}")
        if not accepts(values[key]):
            raise UserError(f"{where}: key {key!r} must be {expected}, got {_shorten(values[key])}")
    if unknown := sorted(values.keys() - _SCHEMA.keys()):
        raise UserError(f"{where}: unknown key {unknown[0]!r} (written by a newer lapbench?)")


def _shorten(value: Any, width: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."


def write_record(folder: Path | str, record: Record) -> None:
    """Write ``folder/record.json`` atomically: a reader, also after a crash, sees the previous one or this one.

    Raises:
        UserError: it cannot be written (disk full, read-only, ...; the previous one is intact) or a value has the
            wrong type.
    """
    path = Path(folder) / FILE_NAME
    values = {key: getattr(record, key) for key in _SCHEMA}
    _check(values, f"record for {path}")
    write_json(path, {"format": FORMAT, **values})


def read_record(folder: Path | str) -> Record:
    """The record in ``folder``. UserError: none there, invalid JSON, unknown format, missing key, wrong type."""
    folder = Path(folder)
    path = folder / FILE_NAME
    values = read_json(path)
    if "format" not in values:
        raise UserError(f"{path}: key 'format' is missing, expected {FORMAT}")
    if (found := values.pop("format")) != FORMAT or not _is_int(found):
        raise UserError(f"{path}: unknown format {_shorten(found)}, expected {FORMAT}")
    values.setdefault("notes", {})  # the first records had none
    for key in _MAY_BE_NON_FINITE:
        if key in values:
            values[key] = unplain(values[key])
    _check(values, str(path))
    return Record(**values, folder=folder)


def load_records(directory: Path | str) -> list[Record]:
    """All records in ``directory`` and the folders below it, sorted by folder.

    Raises:
        UserError: no such directory, no record in it, or a record that cannot be read (the message names the file).
    """
    if not (folders := folders_with(FILE_NAME, directory)):
        raise UserError(f"no {FILE_NAME} in {directory} or below: expected the folder of a run or of a sweep")
    return [read_record(folder) for folder in folders]


def folders_with(file_name: str, directory: Path | str) -> list[Path]:
    """The folders at or below ``directory`` that hold ``file_name``, sorted. UserError: not a readable directory."""

    def fail(error: OSError) -> None:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from error

    if not Path(directory).is_dir():
        problem = "is not a directory" if Path(directory).exists() else "does not exist"
        raise UserError(f"{directory} {problem}: expected the folder of a run or of a sweep")
    return sorted(Path(folder) for folder, _, files in os.walk(directory, onerror=fail) if file_name in files)
