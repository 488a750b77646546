"""Rows of local parquet and JSONL files, one dictionary each, with the place that an error names."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lapbench.datamodules.convert import text_files
from lapbench.datamodules.convert.formats import shorten
from lapbench.datamodules.convert.parquet import read_columns, read_footer
from lapbench.errors import UserError

SUFFIXES = (".parquet", ".jsonl")


class Row(NamedTuple):
    """A row, and where it is: file and row (parquet, from 0) or line (JSONL, from 1)."""

    place: str
    values: dict[str, Any]


def find_files(sources: Sequence[str], split: str | None, default_split: str) -> list[Path]:
    """The files to read: those named, or the files of a split in one folder of the Hugging Face layout.

    Args:
        sources: Parquet and JSONL files, or globs of them; or one folder with ``SPLIT.parquet``, ``SPLIT-*.parquet`` or
            the same as ``.jsonl``, also in its ``data``.
        split: The split of a folder; None takes ``default_split``.
        default_split: See ``split``.

    Raises:
        UserError: nothing there, a file of another kind, a split asked of files.
    """
    if len(sources) == 1 and Path(sources[0]).is_dir():
        return _of_split(Path(sources[0]), split or default_split)
    files = text_files.find(sources)
    for path in files:
        if path.suffix not in SUFFIXES:
            raise UserError(f"--source {path}: expected a file of {' or '.join(SUFFIXES)}")
    if split is not None:
        raise UserError(f"--split {split} chooses among the files of a folder, but --source names files")
    return files


def count_rows(path: Path, columns: Sequence[str], wrapper: str | None = None) -> int:
    """The number of rows of a file: of parquet as its footer says, of JSONL the lines that are not blank.

    Raises:
        UserError: the file cannot be read, or it is parquet without ``columns`` (see `read_rows`).
    """
    if path.suffix == ".parquet":
        metadata, schema = read_footer(path)
        _columns(path, schema, columns, wrapper)
        return int(metadata.num_rows)
    try:
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def read_rows(path: Path, columns: Sequence[str], wrapper: str | None = None) -> Iterator[Row]:
    """The rows of a parquet or JSONL file.

    Args:
        path: The file.
        columns: What of parquet is read; a row of JSONL may have other keys, or lack some.
        wrapper: A struct that may hold the columns instead, in parquet and JSONL alike.

    Raises:
        UserError: the file cannot be read, lacks a column, or holds a line that is no JSON object.
    """
    rows = _parquet(path, columns, wrapper) if path.suffix == ".parquet" else _jsonl(path)
    for place, values in rows:
        inner = values.get(wrapper) if wrapper is not None else None
        yield Row(place, inner if isinstance(inner, dict) else values)


def _of_split(folder: Path, split: str) -> list[Path]:
    rule = re.compile(rf"{re.escape(split)}(-.*)?\.(parquet|jsonl)")
    for place in (folder, folder / "data"):
        if found := sorted(path for path in place.glob("*") if rule.fullmatch(path.name)):
            return found
    there = sorted(path.name for path in folder.iterdir())
    raise UserError(
        f"--source {folder} has no files of the split {split!r}: expected {split}-*.parquet or {split}.jsonl, "
        f"got {shorten(there)}"
    )


def _columns(path: Path, schema: Any, columns: Sequence[str], wrapper: str | None) -> list[str]:
    """The columns to read: ``columns``, or the wrapper if they are in there."""
    import pyarrow.types as types

    missing = [name for name in columns if name not in schema.names]
    if not missing:
        return list(columns)
    if wrapper is not None and wrapper in schema.names and types.is_struct(schema.field(wrapper).type):
        inner = schema.field(wrapper).type
        missing = [f"{wrapper}.{name}" for name in columns if inner.get_field_index(name) < 0]
        if not missing:
            return [wrapper]
    raise UserError(f"{path}: expected a column {missing[0]!r}, got {shorten(', '.join(schema.names))}")


def _parquet(path: Path, columns: Sequence[str], wrapper: str | None) -> Iterator[Row]:
    metadata, schema = read_footer(path)
    names = _columns(path, schema, columns, wrapper)
    number = 0
    for group in range(metadata.num_row_groups):
        try:
            values = [column.to_pylist() for column in read_columns(path, group, names)]
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, row group {group}: a text is not UTF-8") from error
        for row in zip(*values, strict=True):
            yield Row(f"{path}, row {number}", dict(zip(names, row, strict=True)))
            number += 1


def _jsonl(path: Path) -> Iterator[Row]:
    number = 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    values = json.loads(line)
                    if not isinstance(values, dict):
                        raise UserError(f"{path}, line {number}: expected an object, got {shorten(values)}")
                    yield Row(f"{path}, line {number}", values)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {number}: not JSON: {' '.join(str(error).split())}") from error
