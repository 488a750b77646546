"""Documents from files: a ``text`` column of parquet, a ``text`` entry in each line of JSONL, or a whole ``.txt``."""

import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from lapbench.datamodules.convert.formats import shorten
from lapbench.datamodules.convert.parquet import footer_sha256, read_columns, read_footer
from lapbench.datamodules.convert.writer import file_sha256
from lapbench.errors import UserError

SUFFIXES = (".parquet", ".jsonl", ".txt")
COLUMN = "text"
_LINES = 1024


class Part(NamedTuple):
    """Consecutive documents of a file: how many, and what reads them."""

    documents: int
    read: Callable[[], list[str]]


def find(patterns: Sequence[str]) -> list[Path]:
    """The files that ``patterns`` (paths or globs) name, sorted and each once.

    Raises:
        UserError: a pattern that names no file, or a file of another kind.
    """
    found: set[Path] = set()
    for pattern in patterns:
        paths = [Path(name) for name in glob.glob(pattern, recursive=True)]
        files = [path for path in paths if path.is_file()]
        if not files:
            raise UserError(f"--source {pattern}: no such file{'; it is a folder' * bool(paths)}")
        found.update(files)
    for path in sorted(found):
        if path.suffix not in SUFFIXES:
            raise UserError(f"--source {path}: expected a file of {', '.join(SUFFIXES)}")
    return sorted(found)


def parts(path: Path) -> Iterator[Part]:
    """The documents of a file, in order; a missing text (null) is an empty one.

    Raises:
        UserError: a damaged file, or one without texts; naming the place.
    """
    if path.suffix == ".parquet":
        for number, rows in enumerate(_row_groups(path)):
            yield Part(rows, partial(_rows, path, number))
    elif path.suffix == ".jsonl":
        yield from _lines(path)
    else:
        yield Part(1, partial(_whole, path))


def documents(path: Path) -> Iterator[str]:
    """The texts of a file one by one. UserError: see `parts`."""
    for part in parts(path):
        yield from part.read()


def count(path: Path) -> int | None:
    """The number of documents if it is known without reading the file. UserError: a damaged file."""
    if path.suffix == ".parquet":
        return sum(_row_groups(path))
    return 1 if path.suffix == ".txt" else None


def checksum(paths: Sequence[Path]) -> str:
    """A SHA-256 that changes with the files: of the footers of parquet files, of the content of others."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            found = footer_sha256(path, read_footer(path)[0]) if path.suffix == ".parquet" else file_sha256(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        digest.update(f"{path.name}\0{found}\n".encode())
    return digest.hexdigest()


def _row_groups(path: Path) -> list[int]:
    """The rows of each row group; UserError unless there is a column of strings."""
    import pyarrow.types as types

    metadata, schema = read_footer(path)
    column = schema.field(COLUMN).type if COLUMN in schema.names else None
    if column is None or not (types.is_string(column) or types.is_large_string(column)):
        got = f"{COLUMN} of type {column}" if column is not None else shorten(", ".join(schema.names))
        raise UserError(f"{path}: expected a column {COLUMN!r} of strings, got {got}")
    return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]


def _rows(path: Path, number: int) -> list[str]:
    (column,) = read_columns(path, number, [COLUMN])
    try:
        return [text or "" for text in column.to_pylist()]
    except UnicodeDecodeError as error:
        raise UserError(f"{path}, row group {number}: a text is not UTF-8") from error


def _lines(path: Path) -> Iterator[Part]:
    first = 1
    try:
        with path.open("rb") as stream:
            while lines := list(islice(stream, _LINES)):
                texts = [_text(line, f"{path}, line {number}") for number, line in enumerate(lines, first)]
                yield Part(len(texts), partial(list, texts))
                first += len(lines)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error


def _text(line: bytes, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {' '.join(str(error).split())}") from error
    text = value.get(COLUMN) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{place}: expected an object with a string {COLUMN!r}, got {shorten(value)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: the text is not Unicode (half of a surrogate pair)") from error
    return text


def _whole(path: Path) -> list[str]:
    try:
        return [path.read_bytes().decode()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#x}") from error
